"""Extrapolation on the true spacing of the steps: the polynomial through the last computed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Newton:
    """The polynomial through the last `depth` computed steps; exact for polynomials of degree `depth - 1`.

    `places` says where each step lies (its noise level); steps need not be evenly spaced.
    """

    depth: int
    places: tuple[float, ...]

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        near = anchors[-self.depth :]
        return (0.0,) * (len(anchors) - len(near)) + newton_weights([self.places[a] for a in near], self.places[step])


def newton_weights(nodes: Sequence[float], point: float) -> tuple[float, ...]:
    """The weight of each node's value in the polynomial through all of them, at `point`."""
    return tuple(
        prod((point - other) / (node - other) for j, other in enumerate(nodes) if j != i)
        for i, node in enumerate(nodes)
    )
