"""The decoding loop: admit → draft → forward → verify → commit → observe, for many requests at once."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from time import perf_counter

from specds.decode.admission import Running
from specds.decode.contracts import Drafter, Step, Target, Verdict, Verifier
from specds.decode.pricing.budget import Budget
from specds.decode.pricing.curve import Load
from specds.decode.request import Listed, Part, Request, Source
from specds.decode.signals import Observed
from specds.errors import ModelError
from specds.reference import until_stop
from specds.sampling import Noise


def decode(
    target: Target, requests: Source, verifier: Verifier, budget: Budget, *, parallel: int = 1
) -> Iterator[Request]:
    """Answer requests, as many at once as there may be; yields each of them after each of its steps.

    A step is a request's part of one pass of the target. The pass over the end of its prompt is step 0 and commits one
    token. The last committed token is always still to be forwarded; nothing is forwarded that no later token needs. A
    request ends after a stop token, `max_new_tokens`, or with an `error`; the next one takes its place at once.

    Args:
        budget: cuts the drafts of all requests to size.
        parallel: most requests at once.
    """
    running = Running(target, requests, budget, parallel)
    number = 0
    try:
        while running.admit():
            yield from running.take_failed()
            parts = _draft(running, budget)
            if not parts:
                continue
            drafted = perf_counter()
            forward = target.forward([part.item for part in parts])
            forwarded = perf_counter()
            answering = [(place, part) for place, part in enumerate(parts) if part.answers]
            verdicts = verifier.verify_all([part.case(forward.of(place)) for place, part in answering])
            verified = perf_counter()
            done = _Pass(number, parts, forwarded - drafted, (verified - forwarded) / max(1, len(answering)))
            done.share_out(target)
            budget.observe(done.rows, verified - drafted)
            observed = Observed(forward, [part.request.drafting.needs for part in parts])
            for (place, part), verdict in zip(answering, verdicts, strict=True):
                if isinstance(verdict, ModelError):
                    part.request.error = verdict
                else:
                    done.commit(target, part, verdict, observed, place)
            number += 1
            for _, part in answering:
                running.retire(part.request)
                yield part.request
    finally:
        running.close()


class _Pass:
    """One forward pass, and what its parts have of it.

    Args:
        number: counted from 0.
        forward_seconds: of all parts together. verify_seconds: of each that commits a token.
    """

    def __init__(self, number: int, parts: Sequence[Part], forward_seconds: float, verify_seconds: float) -> None:
        self._number, self._parts = number, parts
        self._forward_seconds, self._verify_seconds = forward_seconds, verify_seconds
        self.rows = sum(len(part.item.tokens) for part in parts)

    def share_out(self, target: Target) -> None:
        """Its time, by query tokens; what was read of prompts is committed."""
        for part in self._parts:
            part.request.forward_seconds += self._forward_seconds * len(part.item.tokens) / self.rows
            part.request.pass_tokens += self.rows
            if part.reads:
                target.commit(part.item.slot, range(len(part.item.tokens)))

    def commit(self, target: Target, part: Part, verdict: Verdict, observed: Observed, place: int) -> None:
        """A request's step: the accepted tokens and the target's own; its drafter's signals.

        Args:
            place: of the part's item in the pass.
        """
        began, request = perf_counter(), part.request
        nodes = [int(part.draft.tokens[node]) for node in verdict.path]
        tokens = until_stop([*nodes, verdict.next_token], request.stop_tokens)
        if not part.reads:
            target.commit(part.item.slot, [0, *(node + 1 for node in verdict.path)])
        committed = perf_counter()
        if part.reads:
            request.drafting.start(request.prompt)
        signals = observed.of(place, request, verdict, len(tokens), target)
        request.step = Step(
            0 if request.step is None else request.step.index + 1,
            request.position,
            part.draft,
            verdict.path,
            tuple(tokens),
            signals,
            request.draft_seconds + perf_counter() - committed,
            request.forward_seconds,
            self._verify_seconds,
            committed - began,
            verdict.rescues,
            {} if part.reads else dict(request.drafting.asked),
            self._number,
            request.pass_tokens,
        )
        request.draft_seconds = request.forward_seconds = 0.0
        request.pass_tokens = 0
        request.produced += len(tokens)


def _draft(running: Running, budget: Budget) -> list[Part]:
    """What every request asks of the next pass: part of a prompt, or its last token with a draft that is worth it."""
    reading, writing = running.read(), running.writing()
    load = Load([request.position - 1 for request in writing], sum(len(part.item.tokens) for part in reading))
    budget.prepare(load)
    drafts = budget.allocate([request.propose() for request in writing])
    parts = reading
    for request, draft in zip(writing, drafts, strict=True):
        if request.error is not None:
            running.give_up(request)
        else:
            parts.append(request.write(draft))
    return parts


def decode_one(
    target: Target,
    drafter: Drafter,
    verifier: Verifier,
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    budget: Budget,
    stop_tokens: Collection[int] = (),
) -> Iterator[Step]:
    """Answer one prompt, with a drafter that is there already; yields its steps.

    Raises:
        SpecdsError: what the request failed with.
    """
    request = Request(prompt, max_new_tokens, lambda slot: drafter, Noise((0, 0)), stop_tokens)
    for _ in decode(target, Listed([request]), verifier, budget):
        if request.error is not None:
            raise request.error
        assert request.step is not None
        yield request.step
