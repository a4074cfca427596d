"""The contracts that the decoding loop is made of: what it asks of a drafter, a verifier and a target."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from specds.decode.draft import Draft
from specds.errors import ModelError
from specds.sampling import Noise, Sampling

if TYPE_CHECKING:
    import torch

    from specds.datastore.corrections import Pair
    from specds.datastore.dense import DenseIndex
    from specds.datastore.suffix import SuffixIndex
    from specds.decode.auto.cross_request import CrossRequest
    from specds.decode.draft_model import DraftDecoder
    from specds.decode.pricing.curve import Prices
    from specds.decode.verifiers.csd import Memory


class Signal(Enum):
    """Something of the target's forward pass that a drafter may ask for, besides the tokens."""

    HIDDEN = "hidden"
    """float32[m, d]: the last layer's final-normed hidden state of the rows that produced the committed tokens."""

    TOPK = "topk"
    """int32[m, TOP]: the likeliest tokens, best first, of what each committed token was picked from."""

    TREE_TOPK = "tree-topk"
    """int32[n + 1, TOP]: the same after the last token and after each draft node, accepted or not."""

    TREE_GAPS = "tree-gaps"
    """float32[n + 1, TOP]: of the tokens of TREE_TOPK, how far each one's logit is below the first's; infinite where
    there are no more tokens."""

    ENTROPY = "entropy"
    """float32[m]: the entropy in nats of the distribution that each committed token was picked from."""

    LAYER = "layer"
    """float32[m, d]: the residual stream behind the drafter's `layer`, of the committed tokens that this pass
    forwarded: in the first step of all prompt tokens, then of the last token and the accepted ones."""

    CONTEXT_TOPK = "context-topk"
    """int32[m, TOP]: the likeliest next tokens, best first, after each of the same tokens."""

    EMBEDDING = "embedding"
    """In the first step an `Embed`: the target's own input embeddings."""


TOP = 8
"""Tokens of the TOPK, TREE_TOPK and CONTEXT_TOPK signals."""

Signals = Mapping[Signal, Any]

Embed = Callable[[NDArray[np.integer]], NDArray[np.float32]]
"""int[m] token ids → float32[m, d]."""


@dataclass(frozen=True, slots=True)
class Captures:
    """What a target hands over besides logits.

    Attributes:
        hidden: the final-normed states of the rows of logits.
        layer: the residual stream behind this layer (1 is the first), of all tokens; 0: of none.
        top: the likeliest tokens after all tokens, those of the prompt too.
        logits: whether there are any; without them a pass is only good for what else is captured.
    """

    hidden: bool = False
    layer: int = 0
    top: bool = False
    logits: bool = True


class Slot(Protocol):
    """A request's place in a target's key-value cache.

    Attributes:
        tokens: the committed tokens that it holds.
    """

    @property
    def tokens(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class Item:
    """What one request asks of a pass: tokens to be put into its slot behind those that it holds.

    Attributes:
        slot: whose.
        tokens: int32[n], n ≥ 1.
        parents: int32[n]; parents[i] < i, or -1 for what follows the last token held. None: each follows the last one.
        wanted: of how many tokens, the last ones, logits are wanted; a target that captures the likeliest tokens gives
            those of all.
    """

    slot: Slot
    tokens: NDArray[np.int32]
    parents: NDArray[np.int32] | None
    wanted: int

    @classmethod
    def chain(cls, slot: Slot, tokens: Sequence[int], wanted: int = 1) -> Item:
        """Part of a prompt, or whatever else has no branches."""
        return cls(slot, np.array(tokens, np.int32), None, wanted)

    @classmethod
    def draft(cls, slot: Slot, last: int, draft: Draft) -> Item:
        """The last committed token, which is row 0, and behind it a draft, whose node i is row i + 1."""
        tokens, parents = np.empty(len(draft) + 1, np.int32), np.empty(len(draft) + 1, np.int32)
        tokens[0], parents[0] = last, -1
        tokens[1:] = draft.tokens
        np.add(draft.parents, 1, out=parents[1:])
        return cls(slot, tokens, parents if len(draft) else None, len(tokens))


@dataclass(frozen=True, slots=True)
class Forward:
    """What one pass of the target gives: of each item in turn the rows that were wanted.

    Attributes:
        logits: float[rows, vocabulary] on the target's device: a row of an item says what follows its token.
        hidden: float[rows, d], the final-normed hidden states of the same rows; None unless captured.
        ends: int[items + 1], ascending from 0: the rows of item i are ends[i] … ends[i + 1] - 1.
    """

    logits: torch.Tensor
    hidden: torch.Tensor | None = None
    ends: Sequence[int] = ()

    def of(self, item: int) -> Forward:
        """The rows of one item."""
        rows = slice(self.ends[item], self.ends[item + 1])
        hidden = None if self.hidden is None else self.hidden[rows]
        return Forward(self.logits[rows], hidden, (0, rows.stop - rows.start))


@dataclass(frozen=True, slots=True)
class Activations:
    """What a target keeps of tokens that a slot holds.

    Attributes:
        layer: float32[m, d], the residual stream behind the captured layer; None unless captured.
        top: int32[m, TOP], the likeliest tokens after each; None unless captured.
    """

    layer: NDArray[np.float32] | None = None
    top: NDArray[np.int32] | None = None


@dataclass(frozen=True, slots=True)
class Rescue:
    """A drafted token that a lossy verifier let pass where the target had picked another.

    Attributes:
        node: the draft node.
        picked: the target's own token there.
        log_ratio: how far its logit is below the picked one's, at most 0 where that was the likeliest.
        count: how often the pair was seen to diverge before; 0 where nobody counts.
    """

    node: int
    picked: int
    log_ratio: float
    count: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier makes of a draft.

    Attributes:
        path: indices of the accepted draft nodes, from the root down; empty when none is.
        next_token: the target's own token after the last accepted one.
        rescues: which of the accepted nodes the target had not picked; none of a lossless verifier's.
    """

    path: tuple[int, ...]
    next_token: int
    rescues: tuple[Rescue, ...] = ()


@dataclass(frozen=True, slots=True)
class Case:
    """A draft to be judged.

    Attributes:
        draft: n nodes.
        logits: float[n + 1, vocabulary], rows as in `Item.draft`.
        position: absolute position (0-based, prompt included) of the token that row 0 predicts.
        noise: of the request.
    """

    draft: Draft
    logits: torch.Tensor
    position: int
    noise: Noise


@dataclass(frozen=True, slots=True)
class Step:
    """A request's part of one forward pass of the target and what came of it: a row of the trace.

    Attributes:
        index: 0 for the prefill, then 1, 2, …
        position: how many tokens were committed before this step; the first of `tokens` has this index.
        draft: what was proposed (after trimming to budget and to what is left to generate).
        path: the accepted draft nodes.
        tokens: the committed tokens: the accepted ones and the target's own, cut at a stop token.
        signals: what the drafter asked for.
        rescues: accepted nodes that the target had not picked.
        draft_seconds, forward_seconds, verify_seconds, commit_seconds: wall time of each part; of a pass that others
            share, in proportion to the query tokens. Fetching signals counts as drafting. A GPU works while the CPU
            goes on, so that there the wait for the forward pass shows up where its result is read, in verify_seconds.
        asked: what the drafter asked for this draft, and the seconds of each; empty if it does not say.
        forward_pass: number of the pass, counted from 0 over all requests; of a prompt its last one.
        pass_tokens: query tokens of the pass, those of other requests included; of a prompt of all its passes. A step
            whose own are as many had its passes alone.
    """

    index: int
    position: int
    draft: Draft
    path: tuple[int, ...]
    tokens: tuple[int, ...]
    signals: Signals
    draft_seconds: float
    forward_seconds: float
    verify_seconds: float
    commit_seconds: float
    rescues: tuple[Rescue, ...] = ()
    asked: Mapping[str, float] = field(default_factory=dict)
    forward_pass: int = 0
    pass_tokens: int = 0

    @property
    def accepted(self) -> int:
        """How many drafted tokens were committed."""
        return min(len(self.path), len(self.tokens))


class Use(Enum):
    """What a drafter makes of a draft model."""

    NEVER = "never"
    OPTIONAL = "optional"
    ALWAYS = "always"


@dataclass(frozen=True, slots=True)
class NoOptions:
    """There are none."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a drafter may draw on besides the request's own text.

    Attributes:
        suffix, dense: the stores' indexes of each kind, in the order of the stores.
        draft_model: what drafts token by token.
        shared: the cross-request state of a drafter that has some; see `Drafter.cross_request`.
    """

    suffix: Sequence[SuffixIndex] = ()
    dense: Sequence[DenseIndex] = ()
    draft_model: DraftDecoder | None = None
    shared: CrossRequest | None = None


NO_RESOURCES = Resources()


class Drafter(Protocol):
    """Proposes drafts for one request; speaks numpy, so that it can serve inside another engine.

    What a drafter is and can do stands in attributes of its class; one that says nothing has these defaults.

    Attributes:
        Options: a dataclass; its fields are made by `registry.option`.
        summary, source: what it proposes and the paper, a line each.
        indexes: kinds of index that it looks things up in; of several kinds each store must have one.
        store_required: whether it is of no use without a store.
        draft_model: whether it drafts with a draft model.
        drafts: whether it ever proposes anything.
        needs: what the target must hand over at each step.
        layer: of which layer Signal.LAYER is: its number, or below 1 a share of all layers.
        asked: what was asked for the last draft, and the seconds of each; empty if it does not say.
    """

    Options: ClassVar[type[Any]] = NoOptions
    summary: ClassVar[str] = ""
    source: ClassVar[str] = ""
    indexes: ClassVar[tuple[str, ...]] = ()
    store_required: ClassVar[bool] = False
    draft_model: ClassVar[Use] = Use.NEVER
    drafts: ClassVar[bool] = True
    needs: frozenset[Signal] = frozenset()
    layer: float = 0.0
    asked: Mapping[str, float] = MappingProxyType({})

    def __init__(self, options: Any, resources: Resources = NO_RESOURCES) -> None: ...

    @classmethod
    def cross_request(
        cls, options: Any, curve: Prices | None, stores: Sequence[Path], fingerprint: str
    ) -> CrossRequest | None:
        """What the requests of one engine share, for a drafter that chooses the size of its drafts itself.

        None, the default, is for all others: the engine's budget cuts their drafts.

        Args:
            options: the drafter's.
            curve: what passes cost; None: drafts depend on nothing but the request.
            stores: their paths, for what lies beside them.
            fingerprint: the target's.

        Raises:
            InputError: something that the options name, or that lies there, cannot be read.
        """
        return None

    def start(self, prompt: Sequence[int]) -> None:
        """A new request: forget the last one, take the prompt's token ids."""

    def propose(self, budget: int) -> Draft:
        """At most `budget` nodes to follow the last committed token; the empty draft is ordinary decoding."""

    def observe(self, step: Step) -> None:
        """A step was committed (the first is the prefill's)."""


class Verifier(Protocol):
    """Turns the target's logits over a draft into the accepted path.

    Attributes:
        Options, summary: as a drafter's.
        lossless: whether the text is the target's own.
        independent: whether it draws on its own, so that above temperature 0 texts are not those of plain sampling.
        memory: what it counts, and learns from; None if it counts nothing.
    """

    Options: ClassVar[type[Any]] = NoOptions
    summary: ClassVar[str] = ""
    lossless: ClassVar[bool]
    independent: ClassVar[bool] = False
    memory: Memory | None = None

    def __init__(self, options: Any, sampling: Sampling, pair: Pair | None = None) -> None:
        """Args:
        pair: who drafts for whom; a correction table of another pair is refused.
        """

    def verify(self, case: Case) -> Verdict:
        """Judge a draft.

        Raises:
            ModelError: logits that are not numbers.
        """

    def verify_all(self, cases: Sequence[Case]) -> list[Verdict | ModelError]:
        """Judge the drafts of several requests, one after the other; of one that cannot be judged, why."""
        verdicts: list[Verdict | ModelError] = []
        for case in cases:
            try:
                verdicts.append(self.verify(case))
            except ModelError as error:
                verdicts.append(error)
        return verdicts


class Target(Protocol):
    """The model whose text is wanted, with the key-value cache of all requests that are being answered.

    Attributes:
        chunk: tokens of prompts that one pass takes at best.
        capacity: tokens that all requests together may hold.
    """

    chunk: int
    capacity: int

    def open(self, prompt: Sequence[int], length: int) -> Slot | None:
        """A slot for a request; it holds already what other requests computed of the prompt, its last token never.

        Args:
            prompt: at least one token.
            length: how many tokens prompt and answer may have together.

        Returns:
            None where other slots must be closed first.

        Raises:
            PromptError: there will never be room for so many.
        """

    def close(self, slot: Slot, *, keep: bool = True) -> None:
        """The request is done.

        Args:
            keep: what it held may serve later ones, as long as there is room; False: it is not to be trusted.
        """

    def forget(self) -> None:
        """What requests held that are done serves no later ones."""

    def forward(self, items: Sequence[Item]) -> Forward:
        """One masked pass over the tokens of all items, of different slots. Its results are valid until the next pass.

        What is not committed is forgotten.
        """

    def commit(self, slot: Slot, rows: Sequence[int]) -> None:
        """Hold some of the tokens of the slot's item in the last pass: a branch of it, ascending; forget the others."""

    def layer_skip(self, slot: Slot, token: int, ahead: int, skip: frozenset[int]) -> torch.Tensor:
        """Logits, float[vocabulary], of a pass that leaves layers out: what the model itself would draft.

        It looks at what the slot holds, and at the tokens drafted so before it; what it puts behind them is
        overwritten by the next pass.

        Args:
            token: the one to be forwarded: the last committed one, then one drafted so after the other.
            ahead: how many were drafted so since the last commit.
            skip: layers left out, 0 the first. The first and the last are never.
        """

    def activations(self, slot: Slot, start: int = 0) -> Activations:
        """What the captures keep of the tokens that a slot holds, from the one at `start` on."""

    def embed(self, tokens: NDArray[np.integer]) -> NDArray[np.float32]:
        """float32[m, d]: input embeddings of m token ids."""
