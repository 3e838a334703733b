"""Predictors: what a held step would have been. Each is linear in the past: a weighted sum of computed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Protocol


class Predictor(Protocol):
    """Computes the weights of the last `depth` computed steps."""

    @property
    def depth(self) -> int:
        """How many computed steps are remembered."""

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        """One weight for each anchor (computed steps, newest last), to predict `step`."""


@dataclass(frozen=True)
class Hold:
    """The last computed value, unchanged."""

    depth: ClassVar[int] = 1

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        return (*(0.0 for _ in anchors[1:]), 1.0)


@dataclass(frozen=True)
class Newton:
    """The polynomial through the last `depth` computed steps; `places` are the noise levels of all steps."""

    depth: int
    places: tuple[float, ...]

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        near = anchors[-self.depth :]
        return (0.0,) * (len(anchors) - len(near)) + newton_weights([self.places[a] for a in near], self.places[step])


def newton_weights(nodes: Sequence[float], point: float) -> tuple[float, ...]:
    """The weight of each node's value in the polynomial through all nodes, evaluated at `point`."""
    return tuple(
        prod((point - other) / (node - other) for j, other in enumerate(nodes) if j != i)
        for i, node in enumerate(nodes)
    )
