"""A planned generation run on paper: the weights of its held steps, and how far it ends from the uncached one.

Vectors are coefficients over the uncached outputs. A held step is not fitted to the output it stands for but to the one
that leads back to the uncached trajectory, (x_{i+1} - x) / dsigma under Euler: errors of earlier held steps are made
good by later ones. Of an error that the last computed step has seen, a part is left to the model: its output has
answered to it already, and leading back all of it would be too much. The latent itself as a further regressor was
tried and gives nothing once four outputs are used: it is a sum of them. Branches have weights of their own, fitted
together to what the scheduler gets; that they differ costs a little, so that each branch alone stays near what it would
be.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from .kernel import Array, Kernel

DEPTH = 4  # computed outputs a held step may use
Ranges = tuple[tuple[int, int], ...]
RIDGE = 1e-7  # of the mean squared length: keeps weights finite where outputs are nearly parallel
TIE = 1e-3  # the same, on how far the weights of a branch lie from those of the others
LED_BACK = 0.85  # by held steps, of an error that the last computed step has seen


@dataclass(frozen=True)
class Weights:
    """How one held step is made: a weight for each of the last computed steps, newest last.

    One set of weights for all branches, or one after the other a set for each.
    """

    anchors: tuple[int, ...]
    values: tuple[float, ...]

    def of(self, branch: int) -> tuple[float, ...]:
        """The weights of one branch."""
        count = len(self.anchors)
        start = branch * count if len(self.values) > count else 0
        return self.values[start : start + count]


class Course:
    """A grid of steps with its scheduler: where the latents go, given the outputs.

    `response[i]` says how much of each output is in the latent before step i; the start of the generation is in all of
    them alike and does not matter.
    """

    def __init__(self, kernel: Kernel, response: Array) -> None:
        self.kernel, self.response, self.steps = kernel, response, kernel.steps

    @property
    def merged(self) -> Course:
        """The same with the branches of a step merged."""
        return Course(self.kernel.merged, self.response)

    def reach(self) -> Array:
        """How much of an error of each step's output is found in the last latent."""
        reached: Array = np.abs(self.response[self.steps]) * self.kernel.amplification()
        return reached

    def weights(self, computed: Collection[int], ranges: Ranges, depth: int = DEPTH) -> dict[int, Weights]:
        """The weights of every held step, fitted to lead back to the uncached trajectory.

        A step is made of computed steps of its own range: of its own expert, in a model that has two.
        """
        walk = _Walk(self)
        found = {}
        for step in range(self.steps):
            first = next((first for first, last in ranges if first <= step <= last), None)
            if first is None or step in computed:
                walk.compute(step)
            else:
                found[step] = walk.fitted(step, tuple(a for a in walk.anchors if a >= first)[-depth:])
                walk.hold(step, found[step])
        return found

    def errors(self, weights: Mapping[int, Weights]) -> Array:
        """The squared error of the latent before each step and at the end, on paper, in each generation."""
        walk = _Walk(self)
        errors = []
        for step in range(self.steps):
            errors.append(walk.error(step))
            if step in weights:
                walk.hold(step, weights[step])
            else:
                walk.compute(step)
        return np.stack([*errors, walk.error(self.steps)], axis=1)


class _Walk:
    """One run on paper, step by step."""

    def __init__(self, course: Course) -> None:
        self._course, self._parts = course, course.kernel.parts
        self._true = self._parts.sum(axis=0)
        self._outputs = np.zeros_like(self._true)
        self.anchors: list[int] = []

    def compute(self, step: int) -> None:
        self._outputs[step] = self._true[step]
        self.anchors.append(step)

    def hold(self, step: int, weights: Weights) -> None:
        each = [np.asarray(weights.of(b)) @ part[list(weights.anchors)] for b, part in enumerate(self._parts)]
        self._outputs[step] = np.sum(each, axis=0)

    def fitted(self, step: int, anchors: tuple[int, ...]) -> Weights:
        """Weights over these anchors that put the next latent where it belongs, or as near as can be."""
        features = self._parts[:, list(anchors)]
        values = fit(
            features.reshape(-1, features.shape[-1]), self._wanted(step), self._course.kernel.mean, len(features)
        )
        return Weights(anchors, tuple(map(float, values)))

    def error(self, step: int) -> Array:
        return self._course.kernel.squared(self._latent(step) - self._course.response[step] @ self._true)

    def _latent(self, step: int) -> Array:
        reached: Array = self._course.response[step] @ self._outputs
        return reached

    def _wanted(self, step: int) -> Array:
        """The output that puts the next latent where it belongs: v_i + sum_{k<i} R[i+1,k] (v_k - u_k) / R[i+1,i]."""
        row = self._course.response[step + 1]
        if abs(row[step]) < 1e-12:
            own: Array = self._true[step]
            return own
        counted = np.where(np.arange(len(row)) < self.anchors[-1], LED_BACK, 1.0) * row
        missing: Array = counted @ (self._true - self._outputs) / row[step]
        return missing


def fit(features: Array, wanted: Array, gram: Array, branches: int = 1) -> Array:
    """Least squares over vectors of which only inner products are known: (F G F' + ridge) w = F G y."""
    known = features @ gram
    return ridged(known @ features.T, known @ wanted, branches)


def ridged(normal: Array, known: Array, branches: int = 1, tie: float = TIE) -> Array:
    """The solution of normal equations, with a ridge that keeps it finite and one that keeps branches together."""
    ridge = RIDGE * np.eye(len(normal))
    if branches > 1:
        ridge += tie * np.kron(np.eye(branches) - 1 / branches, np.eye(len(normal) // branches))
    weights: Array = np.linalg.solve(normal + np.trace(normal) / len(normal) * ridge, known)
    return weights


def least_squares(anchors: Sequence[int], step: int, gram: Array) -> Weights:
    """The weights that predict the output of `step` itself best."""
    basis = np.eye(len(gram))
    return Weights(tuple(anchors), tuple(map(float, fit(basis[list(anchors)], basis[step], gram))))


def error_of(weights: Weights, step: int, gram: Array) -> float:
    """Mean squared error of predicting the output of `step`: G_tt - 2 w'G_St + w'G_SS w."""
    vector = missed_by(weights, step, len(gram))
    return float(vector @ gram @ vector)


def missed_by(weights: Weights, step: int, steps: int) -> Array:
    """What a prediction of the output of `step` misses, over the outputs."""
    vector = np.zeros(steps)
    vector[step] = 1.0
    vector[list(weights.anchors)] -= np.asarray(weights.values)
    return vector
