"""The decoding loop: draft → forward → verify → commit → observe."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from time import perf_counter
from typing import Any

from specds.decode.contracts import TOP, Drafter, Forward, Signal, Signals, Step, Target, Verdict, Verifier
from specds.decode.draft import empty
from specds.decode.pricing.budget import Budget
from specds.decode.top import entropies, rows_of, top_gaps, top_ids
from specds.reference import until_stop


def decode(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    budget: Budget,
    stop_tokens: Collection[int] = (),
) -> Iterator[Step]:
    """Generate from a prompt, one step (one forward pass of the target) at a time.

    The prompt's own pass is step 0 and commits one token. The last committed token is always still to be
    forwarded; nothing is forwarded that no later token needs. Ends after a stop token or `max_new_tokens`.

    Args:
        prompt: at least one token id.
        max_new_tokens: at least 1.
        budget: cuts drafts to size.
        stop_tokens: ids that end the text; the one that does is committed.
    """
    began = perf_counter()
    forward = target.prefill(prompt)
    forwarded = perf_counter()
    draft = empty()
    verdict = verifier.verify(draft, forward.logits, len(prompt))
    verified = perf_counter()
    tokens = [verdict.next_token]
    drafter.start(prompt)
    signals = _signals(target, drafter, forward, verdict, 1, first=True)
    times = (perf_counter() - verified, forwarded - began, verified - forwarded, 0.0)
    step = Step(0, len(prompt), draft, (), tuple(tokens), signals, *times)
    produced = 1

    while True:
        yield step
        if produced >= max_new_tokens or tokens[-1] in stop_tokens:
            return
        began = perf_counter()
        drafter.observe(step)
        budget.observe(step)
        # The target adds a token of its own, so a draft deeper than what is left less one cannot be used.
        draft = drafter.propose(budget.most).trim(budget.most, depth=max_new_tokens - produced - 1)
        draft = budget.fit(draft, len(prompt) + produced - 1)
        drafted = perf_counter()
        forward = target.forward(tokens[-1], draft)
        forwarded = perf_counter()
        verdict = verifier.verify(draft, forward.logits, len(prompt) + produced)
        verified = perf_counter()
        tokens = until_stop([*(int(draft.tokens[node]) for node in verdict.path), verdict.next_token], stop_tokens)
        target.commit(verdict.path)
        committed = perf_counter()
        signals = _signals(target, drafter, forward, verdict, len(tokens))
        drafting = drafted - began + perf_counter() - committed
        times = (drafting, forwarded - drafted, verified - forwarded, committed - verified)
        step = Step(
            step.index + 1,
            len(prompt) + produced,
            draft,
            verdict.path,
            tuple(tokens),
            signals,
            *times,
            verdict.rescues,
            dict(drafter.asked),
        )
        produced += len(tokens)


def _signals(
    target: Target, drafter: Drafter, forward: Forward, verdict: Verdict, committed: int, first: bool = False
) -> Signals:
    signals: dict[Signal, Any] = {}
    # Token i of the step was predicted by row 0 and then by the row of the i-th accepted node.
    rows = [0, *(node + 1 for node in verdict.path)][:committed]
    if Signal.HIDDEN in drafter.needs and forward.hidden is not None:
        signals[Signal.HIDDEN] = rows_of(forward.hidden, rows)
    if Signal.TOPK in drafter.needs:
        signals[Signal.TOPK] = top_ids(forward.logits, TOP, rows)
    if Signal.TREE_GAPS in drafter.needs:
        signals[Signal.TREE_TOPK], signals[Signal.TREE_GAPS] = top_gaps(forward.logits, TOP)
    elif Signal.TREE_TOPK in drafter.needs:
        signals[Signal.TREE_TOPK] = top_ids(forward.logits, TOP)
    if Signal.LAYER in drafter.needs or Signal.CONTEXT_TOPK in drafter.needs:
        kept = target.activations()
        new = slice(None) if first else slice(-1 - len(verdict.path), None)
        if kept.layer is not None:
            signals[Signal.LAYER] = kept.layer[new]
        if kept.top is not None:
            signals[Signal.CONTEXT_TOPK] = kept.top[new]
    if first and Signal.EMBEDDING in drafter.needs:
        signals[Signal.EMBEDDING] = target.embed
    if Signal.ENTROPY in drafter.needs:
        signals[Signal.ENTROPY] = entropies(forward.logits, rows)
    return signals
