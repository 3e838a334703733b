"""A plan: the computed steps of one kind of generation, and what the held ones are made of."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..predictors import Newton
from .rollout import DEPTH, Weights


@dataclass(frozen=True, eq=False)
class Plan:
    """Decided before the first step; `notes` say where it comes from and what it is expected to cost."""

    computed: tuple[int, ...]
    weights: dict[int, Weights]
    notes: tuple[str, ...] = ()


def digest(weights: dict[int, Weights]) -> str:
    """Tells plans apart, by their weights to six digits."""
    rounded = [(step, w.anchors, [f"{value:.6g}" for value in w.values]) for step, w in sorted(weights.items())]
    return hashlib.sha256(str(rounded).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Planned:
    """The predictor of one branch by a plan, which may change while the generation runs.

    `plan` says what the plan is now; Newton serves where anchors are not the plan's.
    """

    plan: Callable[[], Plan]
    branch: int
    otherwise: Newton
    depth: int = DEPTH

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        planned = self.plan().weights.get(step)
        if planned is None or planned.anchors != tuple(anchors[-len(planned.anchors) :]):
            return self.otherwise.weights(step, anchors)
        return (0.0,) * (len(anchors) - len(planned.anchors)) + planned.of(self.branch)
