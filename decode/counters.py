"""What the steps of a run add up to: tokens, acceptance, and where the time went."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specds.decode.contracts import Step


@dataclass(frozen=True, slots=True)
class Counters:
    """Sums over steps (forward passes of the target, prefills included).

    Attributes:
        steps: forward passes.
        tokens: committed tokens, the target's own included.
        drafted: draft nodes verified.
        accepted: draft tokens committed.
        path_drafted: lengths of the best paths: of the longest path through the last accepted node.
        rescued: draft tokens accepted though the target had picked others.
        draft_seconds, forward_seconds, verify_seconds, commit_seconds: wall time of each part.
    """

    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    path_drafted: int = 0
    rescued: int = 0
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    commit_seconds: float = 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Counters:
        """The sums over some steps."""
        total = cls()
        for step in steps:
            total = total + cls(
                1,
                len(step.tokens),
                len(step.draft),
                step.accepted,
                best_path_length(step),
                sum(rescue.node in step.path[: step.accepted] for rescue in step.rescues),
                step.draft_seconds,
                step.forward_seconds,
                step.verify_seconds,
                step.commit_seconds,
            )
        return total

    def record(self) -> dict[str, int | float]:
        """As JSON, as it stands in an answer's record."""
        return {
            "tokens": self.tokens,
            "steps": self.steps,
            "mat": round(self.mat, 4),
            "drafted": self.drafted,
            "accepted": self.accepted,
            "acceptance": round(self.acceptance, 4),
            "node_acceptance": round(self.node_acceptance, 4),
            "rescued": self.rescued,
            "seconds": round(self.seconds, 4),
            "draft_seconds": round(self.draft_seconds, 4),
            "forward_seconds": round(self.forward_seconds, 4),
        }

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, name) + getattr(other, name) for name in Counters.__slots__))

    @property
    def seconds(self) -> float:
        """Wall time of all parts."""
        return self.draft_seconds + self.forward_seconds + self.verify_seconds + self.commit_seconds

    @property
    def mat(self) -> float:
        """Mean accepted tokens a step, the target's own included: tokens / steps."""
        return self.tokens / self.steps if self.steps else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Committed tokens by wall time, prefill included."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted draft tokens along the best path / its length, over all steps; 0 when nothing was drafted."""
        return self.accepted / self.path_drafted if self.path_drafted else 0.0

    @property
    def node_acceptance(self) -> float:
        """Accepted draft tokens / verified draft nodes; equals `acceptance` for chains."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def drafting_share(self) -> float:
        """Share of the wall time spent in the drafter."""
        return self.draft_seconds / self.seconds if self.seconds else 0.0


def best_path_length(step: Step) -> int:
    """Length of the longest drafted path through the last accepted node; of the longest of all if none was."""
    if not len(step.draft):
        return 0
    depths = step.draft.depths()
    if step.path:
        depths = depths[step.draft.ancestors()[:, step.path[-1]]]
    return int(np.max(depths))
