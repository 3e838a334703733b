"""The error model: what error a schedule leaves in the latents, computed from measurements without the model.

Symbols, for a generation of N steps:

- v_i: the output of the model at step i of an uncached generation; u_i: the same with held steps. At a computed step
  the simulation takes u_i = v_i, at a held one u_i = sum_j w_j v_j. The steps j are its *anchors*: the last computed
  steps before it, at most `PlannerOptions.depth`.
- G[s,t] = <v_s, v_t> / (values in a latent): the Gram matrix of the outputs, one for each measured generation.
- x_i: the latent before step i, and x_N the final one. Every deterministic scheduler is linear in the outputs,
  x_i = (part of x_0) + sum_k R[i,k] v_k. The (N+1, N) matrix R is the *scheduler response*. Under Euler,
  R[i,k] = sigma_{k+1} - sigma_k for k < i.
- d_i = sum_k R[i,k] (u_k - v_k): the simulated error of the latent before step i.

All vectors are written as coefficients c over the outputs v_0 ... v_{N-1}, and |c|^2 = c' G c. A schedule is therefore
simulated with a few small matrices, in microseconds.

A model with guidance makes several forwards a step, its branches. Each branch may have weights of its own. They are
fitted together to the output that the scheduler gets; `PlannerOptions.branch_tie` penalizes differences between
branches, so that the prediction of each branch alone stays close to that branch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ..predictors import newton_weights
from ..profiles import PlannerOptions

Array = NDArray[np.float64]
Indices = NDArray[np.intp]
Ranges = tuple[tuple[int, int], ...]  # first and last step of each expert; most models have one

DEFAULT_OPTIONS = PlannerOptions()
DEPTH = DEFAULT_OPTIONS.depth
RIDGE = 1e-7  # relative to the mean diagonal: keeps weights finite where outputs are nearly parallel
EXPECTED_PERCENTILE = 90.0  # of the generations: nine in ten are expected to have a smaller error


@dataclass(frozen=True)
class Weights:
    """The weights of one held step for its anchors, newest last: one set for all branches, or one set after another."""

    anchors: tuple[int, ...]
    values: tuple[float, ...]

    def of(self, branch: int) -> tuple[float, ...]:
        """The weights of one branch."""
        count = len(self.anchors)
        start = branch * count if len(self.values) > count else 0
        return self.values[start : start + count]


def held_steps(computed: Collection[int], ranges: Ranges) -> dict[int, tuple[int, ...]]:
    """Every held step with all computed steps of the same expert before it, oldest first."""
    return {
        step: tuple(sorted(s for s in computed if first <= s < step))
        for first, last in ranges
        for step in range(first, last + 1)
        if step not in computed
    }


def fit_output(anchors: Sequence[int], step: int, gram: Array) -> Weights:
    """The weights that predict the output of `step` with the least mean squared error."""
    basis = np.eye(len(gram))
    return Weights(tuple(anchors), tuple(map(float, least_squares(basis[list(anchors)], basis[step], gram))))


def prediction_error(weights: Weights, step: int, steps: int) -> Array:
    """The error of a prediction of the output of `step`, as coefficients over the outputs: 1_t - sum_j w_j 1_j."""
    error = np.zeros(steps)
    error[step] = 1.0
    error[list(weights.anchors)] -= np.asarray(weights.values)
    return error


def least_squares(features: Array, target: Array, gram: Array, branches: int = 1, tie: float = 0.0) -> Array:
    """The weights w that minimize |F'w - y|^2 for features F and target y: (F G F' + ridge) w = F G y."""
    projected = features @ gram
    return solve_ridge(projected @ features.T, projected @ target, branches, tie)


def solve_ridge(normal: Array, known: Array, branches: int = 1, tie: float = 0.0) -> Array:
    """Solve (A + m P) w = b for the normal matrix A with mean diagonal m.

    P is `RIDGE` times the identity; for several branches, plus `tie` times the projection onto the differences between
    the branches' weights.
    """
    penalty = RIDGE * np.eye(len(normal))
    if branches > 1:
        penalty += tie * np.kron(np.eye(branches) - 1 / branches, np.eye(len(normal) // branches))
    weights: Array = np.linalg.solve(normal + np.trace(normal) / len(normal) * penalty, known)
    return weights


@dataclass(frozen=True, eq=False)
class Measurements:
    """What calibration measured on uncached generations, on a grid of noise levels.

    - `noise`: the noise level of each step, decreasing, 1 at pure noise.
    - `grams`: (generations, B N, B N), Gram matrices of the outputs of B branches: all steps of the first branch, then
      all steps of the second.
    - `growth`: (generations, N+1), log of the real over the simulated squared error of a generation with held steps,
      before each step and at the end.
    - `mix`: the share of each branch in the output that the scheduler gets; s and 1 - s for guidance scale s. If it
      changes from step to step: the shares of the first branch at all steps, then those of the second.
    - `tied`: all branches are held with the same weights, such as the parts of a doubled batch.
    """

    noise: Array
    grams: Array
    growth: Array
    mix: tuple[float, ...] = (1.0,)
    tied: bool = False

    @property
    def steps(self) -> int:
        """The number of steps N."""
        return len(self.noise)

    @cached_property
    def mean_gram(self) -> Array:
        """The Gram matrix that weights are fitted on."""
        return np.asarray(self.grams.mean(axis=0))

    @cached_property
    def shares(self) -> Array:
        """(B, N): the share of each branch at each step."""
        count = self.grams.shape[1] // self.steps
        return np.broadcast_to(np.reshape(self.mix, (count, -1)), (count, self.steps))

    @cached_property
    def mean_mix(self) -> tuple[float, ...]:
        """The share of each branch, as the mean over the steps."""
        count = len(self.shares)
        return self.mix if len(self.mix) == count else tuple(self.shares.mean(axis=1).tolist())

    @cached_property
    def outputs(self) -> Array:
        """(N, B N): what the scheduler gets at each step."""
        return np.concatenate([np.diag(row) for row in self.shares], axis=1)

    def features(self, step: int, anchors: Sequence[int]) -> Array:
        """(sets of weights, anchors, B N): the outputs of earlier steps, mixed as at `step`."""
        branches, rows = np.diag(self.shares[:, step]), np.eye(self.steps)[list(anchors)]
        features: Array = np.einsum("bc,st->bsct", branches, rows).reshape(len(branches), len(rows), -1)
        return features.sum(axis=0, keepdims=True) if self.tied else features

    @cached_property
    def merged(self) -> Measurements:
        """The same measurements with the branches of a step merged, by the mean mix, into what the scheduler gets."""
        mixed = np.concatenate([share * np.eye(self.steps) for share in self.mean_mix], axis=1)
        return self if len(self.mix) == 1 else Measurements(self.noise, mixed @ self.grams @ mixed.T, self.growth)

    def squared_norm(self, vector: Array) -> Array:
        """The squared length c' G c of a vector in each generation."""
        squared: Array = np.einsum("i,gij,j->g", vector, self.grams, vector)
        return np.maximum(squared, 0.0)

    @cached_property
    def growth_to_end(self) -> Array:
        """(generations, N+1): log of the factor A^2 by which a squared error before each step grows until the end.

        Errors never shrink, and an early error grows at least as much as a late one.
        """
        growth = np.maximum(self.growth[:, -1:] - self.growth, 0.0)
        return np.maximum.accumulate(growth[:, ::-1], axis=1)[:, ::-1]

    def amplification(self, percentile: float | None) -> Array:
        """The factor by which an error made at each step grows until the end, in so many percent of the generations."""
        if percentile is None:
            return np.ones(self.steps)
        growth = np.percentile(self.growth[:, -1:] - self.growth[:, :-1], percentile, axis=0)
        factors: Array = np.maximum(np.exp(0.5 * growth), 1.0)
        return np.maximum.accumulate(factors[::-1])[::-1]

    def at(self, noise: Array) -> Measurements:
        """The measurements on another grid of noise levels, by cubic interpolation of the outputs.

        The difference between cubic and linear interpolation is added to each output as independent noise, because
        how smooth the outputs are between measured steps is not known and weights must not rely on it.
        """
        if np.array_equal(noise, self.noise):
            return self
        branches = np.eye(len(self.shares))
        cubic = np.kron(branches, interpolation_matrix(self.noise, noise))
        doubt = cubic - np.kron(branches, interpolation_matrix(self.noise, noise, points=2))
        known, wanted = np.append(self.noise, 0.0), np.append(noise, 0.0)
        growth = np.stack([np.interp(-wanted, -known, row) for row in self.growth])
        grams, diagonal = cubic @ self.grams @ cubic.T, range(len(cubic))
        grams[:, diagonal, diagonal] += np.einsum("ti,gij,tj->gt", doubt, self.grams, doubt)
        return Measurements(noise, grams, growth, self.mean_mix, self.tied)


def interpolation_matrix(known: Array, wanted: Array, points: int = 4) -> Array:
    """The matrix from values at `known` to values at `wanted`: polynomials through the nearest points, flat outside."""
    matrix = np.zeros((len(wanted), len(known)))
    places, first = np.unique(known, return_index=True)
    for row, point in zip(matrix, np.clip(wanted, places[0], places[-1]), strict=True):
        nearest = np.argsort(np.abs(places - point), kind="stable")[:points]
        row[first[nearest]] = newton_weights(places[nearest].tolist(), float(point))
    return matrix


class ErrorModel:
    """Simulates generations with held steps on one grid under one scheduler; by default one expert runs all steps."""

    def __init__(
        self,
        measurements: Measurements,
        response: Array,
        ranges: Ranges | None = None,
        options: PlannerOptions = DEFAULT_OPTIONS,
    ) -> None:
        self.measurements, self.response, self.options = measurements, response, options
        self.steps = measurements.steps
        self.ranges: Ranges = ranges or ((0, self.steps - 1),)
        self._first, self._last = (
            np.zeros(self.steps, dtype=np.intp),
            np.full(self.steps, self.steps - 1, dtype=np.intp),
        )
        for first, last in self.ranges:  # of the range that each step is in
            self._first[first : last + 1], self._last[first : last + 1] = first, last

    def reach(self) -> Array:
        """How much of an error in each step's output is found in the final latent: |R[N,t]| times its amplification."""
        amplification = self.measurements.amplification(self.options.growth_percentile)
        return np.asarray(np.abs(self.response[self.steps]) * amplification)

    def fit_weights(self, computed: Collection[int]) -> dict[int, Weights]:
        """The weights of all held steps of a schedule, fitted to steer back to the uncached trajectory.

        At held step i the target is not v_i but the output that would put the next latent where the uncached generation
        has it,

            v_i + sum_{k<i} R[i+1,k] / R[i+1,i] (v_k - u_k),

        so that each held step corrects the errors of earlier ones. Errors of steps k before the last computed step are
        visible to the model and enter with `corrected_share`.
        """
        held, exact = held_steps(computed, self.ranges), self.measurements.outputs
        options, tie = self.options, self.options.branch_tie or 0.0
        outputs, weights = np.zeros_like(exact), {}
        for step in range(self.steps):
            if step not in held:
                outputs[step] = exact[step]
                continue
            anchors, row, target = held[step][-options.depth :], self.response[step + 1], exact[step]
            if abs(row[step]) >= 1e-12:
                shares = np.where(np.arange(self.steps) < anchors[-1], options.corrected_share, 1.0)
                target = (shares * row) @ (exact - outputs) / row[step]  # outputs[step] is still 0: v_i is in the sum
            features = self.measurements.features(step, anchors)
            gram = self.measurements.mean_gram
            values = least_squares(np.concatenate(features), target, gram, len(features), tie)
            weights[step] = Weights(anchors, tuple(map(float, values)))
            outputs[step] = self._predict(step, weights[step])
        return weights

    def latent_errors(self, weights: Mapping[int, Weights]) -> Array:
        """(generations, N+1): the simulated squared error |d_i|^2 of the latent before each step and at the end."""
        exact = self.measurements.outputs
        outputs = exact.copy()
        for step, held in weights.items():
            outputs[step] = self._predict(step, held)
        errors = [self.measurements.squared_norm(row @ outputs - row @ exact) for row in self.response]
        return np.stack(errors, axis=1)

    def _predict(self, step: int, weights: Weights) -> Array:
        """The predicted output of a held step with its branches mixed, as coefficients over the outputs."""
        by_branch = enumerate(self.measurements.features(step, weights.anchors))
        return np.asarray(np.sum([np.asarray(weights.of(b)) @ outputs for b, outputs in by_branch], axis=0))

    def expected_errors(self, schedules: Sequence[Sequence[int]]) -> Array:
        """The squared error of the final latent that 90 % of generations are expected to stay below, by schedule.

        Held steps correct errors of earlier ones, but meanwhile the model computes outputs from wrong latents. With
        that, a generation ends with the squared error

            |d_N|^2 + sum_a (((sigma_a - sigma_b) / sigma_a)^2 + A_a^2 - A_b^2) |d_a|^2

        over the computed steps a, each with the next computed step b. The first factor is the model's response: an
        output changes by about d / sigma where its latent is off by d. A_i is how much more than simulated an error
        was measured to grow from step i to the end.

        It predicts the quality of a schedule (on the emoji model within 2.4 dB) but does not rank schedules well enough
        to choose one: it is most wrong about those it rates best. Each must contain the first step of every range.
        """
        merged, end = self.measurements.merged, self.steps
        noise, growth = np.append(merged.noise, 0.0), np.exp(merged.growth_to_end.T)
        steps = np.full((len(schedules), 1 + max(map(len, schedules))), end)
        for row, schedule in zip(steps, schedules, strict=True):
            row[: len(schedule)] = schedule
        errors, response = np.zeros((len(steps), end)), np.zeros((len(steps), len(merged.grams)))
        for count in range(1, steps.shape[1]):
            active = np.flatnonzero(steps[:, count - 1] < end)
            computed, following = steps[active, :count], steps[active, count]
            last = computed[:, -1]
            sigma = np.maximum(noise[last], 1e-12)
            factor = (((sigma - noise[following]) / sigma) ** 2)[:, None] + growth[last] - growth[following]
            response[active] += _squared_norms(errors[active], merged.grams) * factor
            errors[active] = self._errors_after_gap(errors[active], computed, following)
        return np.percentile(_squared_norms(errors, merged.grams) + response, EXPECTED_PERCENTILE, axis=1)

    def _errors_after_gap(self, errors: Array, computed: Indices, following: Indices) -> Array:
        """d_b from d_a, where `computed` ends with a and `following` is b: the part that no anchor corrects."""
        last, steps = computed[:, -1:], np.arange(self.steps)
        held = (steps > last) & (steps < following[:, None]) & (steps <= self._last[last])
        added: Array = np.where(held, self.response[self.steps], 0.0)
        anchors, left = computed[:, -self.options.depth :], errors + added
        target = self.options.corrected_share * errors + added
        usable = anchors >= self._first[anchors[:, -1:]]  # anchors of another expert get weight 0
        gram = self.measurements.merged.mean_gram
        normal = np.where(usable[:, :, None] & usable[:, None], gram[anchors[:, :, None], anchors[:, None]], 0.0)
        ridge = RIDGE * np.trace(normal, axis1=1, axis2=2) / usable.sum(axis=1)
        diagonal = np.arange(anchors.shape[1])
        normal[:, diagonal, diagonal] += np.where(usable, ridge[:, None], 1.0)
        solution = np.linalg.solve(normal, np.where(usable[..., None], gram[anchors], 0.0))
        weights = (solution @ target[..., None])[..., 0] * held.any(axis=1, keepdims=True)
        left[np.arange(len(left))[:, None], anchors] -= weights
        return left


def _squared_norms(vectors: Array, grams: Array) -> Array:
    """(vectors, generations): the squared length of each vector in each generation."""
    squared: Array = np.einsum("giw,wi->wg", grams @ vectors.T, vectors)
    return np.maximum(squared, 0.0)
