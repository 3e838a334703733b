"""Weights of held steps: least squares over computed outputs, and the plan that the weights make up.

The output of a held step t is predicted as a weighted sum of computed outputs, u_t = sum_j w_j v_j. The steps j are its
*anchors*: the last computed steps before it, at most `DEPTH`. Only inner products of outputs are needed to find the
best weights, so everything here works on Gram matrices G[s,t] = <v_s, v_t> and not on the outputs themselves. A vector
is written as its coefficients c over the outputs v_0 ... v_{N-1}; its squared length is c' G c.

A model with guidance makes several forwards a step, its branches. Each branch may have weights of its own. They are
fitted together to the output that the scheduler gets; `BRANCH_TIE` penalizes differences between branches, so that the
prediction of each branch alone stays close to that branch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..predictors import Newton

Array = NDArray[np.float64]
Ranges = tuple[tuple[int, int], ...]  # first and last step of each expert, most models have one

DEPTH = 4  # computed outputs that a held step is predicted from, at most
RIDGE = 1e-7  # relative to the mean diagonal: keeps weights finite where outputs are nearly parallel
BRANCH_TIE = 1e-3  # relative to the mean diagonal: penalty on differences between the weights of branches


@dataclass(frozen=True)
class Weights:
    """The weights of one held step: one value for each anchor, newest last.

    `values` is one set of weights for all branches, or the sets of all branches one after the other.
    """

    anchors: tuple[int, ...]
    values: tuple[float, ...]

    def of(self, branch: int) -> tuple[float, ...]:
        """The weights of one branch."""
        count = len(self.anchors)
        start = branch * count if len(self.values) > count else 0
        return self.values[start : start + count]


@dataclass(frozen=True, eq=False)
class Plan:
    """A schedule and the weights of its held steps; `notes` say where it comes from and what quality to expect."""

    computed: tuple[int, ...]
    weights: Mapping[int, Weights]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlanPredictor:
    """Predicts held steps of one branch with the weights of a plan, or with Newton where the anchors differ.

    `plan` returns the current plan: the guard may add computed steps while the generation runs.
    """

    plan: Callable[[], Plan]
    branch: int
    fallback: Newton
    depth: int = DEPTH

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        planned = self.plan().weights.get(step)
        if planned is None or planned.anchors != tuple(anchors[-len(planned.anchors) :]):
            return self.fallback.weights(step, anchors)
        return (0.0,) * (len(anchors) - len(planned.anchors)) + planned.of(self.branch)


def digest_weights(weights: Mapping[int, Weights]) -> str:
    """A hash of a plan's weights, rounded to six digits."""
    rounded = [(step, w.anchors, [f"{value:.6g}" for value in w.values]) for step, w in sorted(weights.items())]
    return hashlib.sha256(str(rounded).encode()).hexdigest()[:16]


def held_steps(computed: Collection[int], ranges: Ranges) -> dict[int, tuple[int, ...]]:
    """Every held step with all computed steps before it in the same range, oldest first.

    Where a model has two experts, a held step is predicted from outputs of its own expert only.
    """
    return {
        step: tuple(sorted(s for s in computed if first <= s < step))
        for first, last in ranges
        for step in range(first, last + 1)
        if step not in computed
    }


def hold_weights(computed: Collection[int], ranges: Ranges) -> dict[int, Weights]:
    """Weights that repeat the last computed output."""
    return {step: Weights(before[-1:], (1.0,)) for step, before in held_steps(computed, ranges).items()}


def fit_output(anchors: Sequence[int], step: int, gram: Array) -> Weights:
    """The weights that predict the output of `step` with the least mean squared error."""
    basis = np.eye(len(gram))
    return Weights(tuple(anchors), tuple(map(float, least_squares(basis[list(anchors)], basis[step], gram))))


def prediction_error(weights: Weights, step: int, steps: int) -> Array:
    """The error of a prediction of the output of `step`, as coefficients over the outputs: 1_t - sum_j w_j 1_j.

    Its squared length is the mean squared error, G_tt - 2 w'G_St + w'G_SS w for the anchors S.
    """
    error = np.zeros(steps)
    error[step] = 1.0
    error[list(weights.anchors)] -= np.asarray(weights.values)
    return error


def least_squares(features: Array, target: Array, gram: Array, branches: int = 1) -> Array:
    """The weights w that minimize |F'w - y|^2 for features F and a target y, given as coefficients over the outputs.

    They solve the normal equations (F G F' + ridge) w = F G y.
    """
    projected = features @ gram
    return solve_ridge(projected @ features.T, projected @ target, branches)


def solve_ridge(normal: Array, known: Array, branches: int = 1, tie: float = BRANCH_TIE) -> Array:
    """Solve (A + m P) w = b for the normal matrix A with mean diagonal m.

    P is `RIDGE` times the identity; for several branches, plus `tie` times the projection onto the differences between
    the branches' weights.
    """
    penalty = RIDGE * np.eye(len(normal))
    if branches > 1:
        penalty += tie * np.kron(np.eye(branches) - 1 / branches, np.eye(len(normal) // branches))
    weights: Array = np.linalg.solve(normal + np.trace(normal) / len(normal) * penalty, known)
    return weights
