"""Predictors: what a held step would have been. Each is linear in the past: a weighted sum of computed values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import factorial, prod
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray


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


@dataclass(frozen=True)
class Taylor:
    """TaylorSeer's series of the last `order` + 1 computed steps, with finite differences in place of derivatives.

    Each difference is divided by the distance of the last two computed steps, as published: beyond order 1 this is
    exact on polynomials only where computed steps are one apart. `exact` uses the polynomial through the steps instead.
    """

    order: int
    exact: bool = False

    @property
    def depth(self) -> int:
        return self.order + 1

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        near = anchors[-self.depth :]
        unused = (0.0,) * (len(anchors) - len(near))
        if self.exact:
            return unused + newton_weights(near, step)
        units = np.eye(len(near))
        series = [units[0]]  # the differences of order 0, 1, ... at one computed step, as weights of all steps
        for i in range(1, len(near)):
            before, series = series, [units[i]]
            for lower in before:
                series.append((series[-1] - lower) / (near[i] - near[i - 1]))
        ahead = step - near[-1]
        total = sum((terms * (ahead**k / factorial(k)) for k, terms in enumerate(series)), np.zeros(len(near)))
        return (*unused, *total.tolist())


@dataclass(frozen=True)
class Chebyshev:
    """Spectrum's forecast: Chebyshev polynomials up to `degree`, fitted to all computed steps by ridge regression.

    `first` and `last` are the steps at which the polynomials' variable is -1 and 1. The forecast is mixed with the
    straight line through the last two computed steps, whose share is 1 - `share`.
    """

    degree: int
    ridge: float
    share: float
    first: int
    last: int
    depth: int

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        left, scales, right = np.linalg.svd(self._basis(anchors), full_matrices=False)
        shrunk = scales / (scales**2 + self.ridge)  # the normal equations would be singular for a tiny ridge
        total = self.share * (left @ (shrunk * (right @ self._basis([step])[0])))
        line = newton_weights(anchors[-2:], step)
        total[-len(line) :] += (1.0 - self.share) * np.array(line)
        return tuple(total.tolist())

    def _basis(self, steps: Sequence[int]) -> NDArray[np.floating[Any]]:
        """The value of every polynomial at each step."""
        places = (np.asarray(steps, dtype=np.float64) - self.first) * 2.0 / (self.last - self.first) - 1.0
        return np.polynomial.chebyshev.chebvander(places, self.degree)
