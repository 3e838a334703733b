"""What was measured of a model for planning: inner products of its outputs along uncached generations.

Every predictor is linear in the past, so all a planner needs is how the outputs v_0 ... v_{N-1} of an uncached
generation lie to each other: one Gram matrix a generation. Where a step has several branches their outputs are told
apart, all of the first, then all of the second; what the scheduler gets is a mix of them. A vector is written as its
coefficients over the outputs; its length is then a quadratic form. Knows nothing of models, pipelines or torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..predictors import newton_weights

Array = NDArray[np.float64]
CAREFUL = 75.0  # percentile of the generations whose error growth is planned for


@dataclass(frozen=True, eq=False)
class Kernel:
    """Gram matrices of the outputs, one a generation, divided by the number of values in a latent.

    - `noise`: the noise level of each step, 1 at pure noise, falling.
    - `grams`: (generations, B N, B N) for B branches.
    - `growth`: (generations, N+1), the logarithm of how much larger the squared error of a generation with held steps
      really was, before each step and at the end, than the same generation on paper.
    - `mix`: how much of each branch is in the output the scheduler gets; guidance s mixes them as s, 1 - s.
    """

    noise: Array
    grams: Array
    growth: Array
    mix: tuple[float, ...] = (1.0,)

    @property
    def steps(self) -> int:
        """The number of steps of the grid."""
        return len(self.noise)

    @cached_property
    def mean(self) -> Array:
        """The Gram matrix to fit weights on."""
        mean: Array = self.grams.mean(axis=0)
        return mean

    @cached_property
    def parts(self) -> Array:
        """(B, N, B N): what each branch brings to the output the scheduler gets at each step."""
        shares: Array = np.diag(np.array(self.mix, dtype=np.float64))
        parts: Array = np.einsum("bc,st->bsct", shares, np.eye(self.steps))
        return parts.reshape(len(self.mix), self.steps, -1)

    @cached_property
    def merged(self) -> Kernel:
        """The same with the branches of a step merged into the output the scheduler gets."""
        whole = self.parts.sum(axis=0)
        return self if len(self.mix) == 1 else Kernel(self.noise, whole @ self.grams @ whole.T, self.growth)

    def squared(self, vector: Array) -> Array:
        """The squared length of a vector in each generation."""
        lengths: Array = np.einsum("i,gij,j->g", vector, self.grams, vector)
        return np.maximum(lengths, 0.0)

    @cached_property
    def grown(self) -> Array:
        """(generations, N+1): the logarithm of how much a squared error before each step grows until the end.

        Errors are taken not to shrink, and early ones to grow at least as much as late ones.
        """
        grown = np.maximum(self.growth[:, -1:] - self.growth, 0.0)
        return np.maximum.accumulate(grown[:, ::-1], axis=1)[:, ::-1]

    def amplification(self) -> Array:
        """By how much an error made at each step grows until the end, in three of four generations at most."""
        grown = np.percentile(self.growth[:, -1:] - self.growth[:, :-1], CAREFUL, axis=0)
        factors: Array = np.maximum(np.exp(0.5 * grown), 1.0)
        return np.maximum.accumulate(factors[::-1])[::-1]

    def on(self, noise: Array) -> Kernel:
        """The same model on another grid of noise levels: its outputs are smooth in the noise and are interpolated.

        Between two measured outputs nobody knows how smooth they are. By how much a cubic and a straight line differ
        there is added to each output as noise of its own, so that no weights are fitted to a smoothness nobody saw.
        """
        if np.array_equal(noise, self.noise):
            return self
        each = np.eye(len(self.mix))
        moved = np.kron(each, interpolation(self.noise, noise))
        doubt = moved - np.kron(each, interpolation(self.noise, noise, points=2))
        known, wanted = np.append(self.noise, 0.0), np.append(noise, 0.0)
        growth = np.stack([np.interp(-wanted, -known, row) for row in self.growth])
        grams = moved @ self.grams @ moved.T
        own = range(len(moved))
        grams[:, own, own] += np.einsum("ti,gij,tj->gt", doubt, self.grams, doubt)
        return Kernel(noise, grams, growth, self.mix)


def interpolation(known: Array, wanted: Array, points: int = 4) -> Array:
    """The matrix that takes values at `known` to values at `wanted`: through the nearest points, flat outside."""
    matrix = np.zeros((len(wanted), len(known)))
    places, first = np.unique(known, return_index=True)
    for row, point in zip(matrix, np.clip(wanted, places[0], places[-1]), strict=True):
        near = np.argsort(np.abs(places - point), kind="stable")[:points]
        row[first[near]] = newton_weights(places[near].tolist(), float(point))
    return matrix
