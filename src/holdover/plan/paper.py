"""What schedules are expected to lose: generations run on paper, and what the model makes of their errors.

Held steps lead back to the uncached trajectory, so an error lasts until later ones have made it good. What the model
makes of it meanwhile stays: its outputs are computed from latents that are off. So a generation ends with

    |d_N|^2 + sum_a (((s_a - s_b) / s_a)^2 + A_a^2 - A_b^2) |d_a|^2

over the computed steps a and the next ones b. d is the error of the latent on paper; s the noise level, for an output
changes by d/s where its latent is off by d; A how much more than on paper errors were measured to grow from a step to
the end. On the model in the box this is within 2.4 decibels of what nine pictures in ten keep, from 6 to 25 computed
steps of 50. It says what to expect of a schedule, not which to choose: schedules that it likes best are no better, for
they are those it is most wrong about.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .kernel import Array
from .rollout import DEPTH, LED_BACK, RIDGE, Course, Ranges

EXPECTED = 90.0  # percentile of the generations: nine in ten are expected to stay below
Indices = NDArray[np.intp]


class Paper:
    """Runs schedules of one course on paper, many at a time, over the steps that run."""

    def __init__(self, course: Course, ranges: Ranges) -> None:
        kernel = course.kernel.merged
        self._gram, self._grams = kernel.mean, kernel.grams
        self._moves: Array = course.response[course.steps]
        self._end = course.steps
        self._first, self._last = _bounds(ranges, self._end)
        self._noise, self._grown = np.append(kernel.noise, 0.0), np.exp(kernel.grown.T)

    def expected(self, schedules: Sequence[Sequence[int]]) -> Array:
        """The squared error of the last latent that nine generations in ten stay below, for each schedule.

        The first step of every range is among the steps of each.
        """
        steps = np.full((len(schedules), 1 + max(map(len, schedules))), self._end)
        for row, schedule in zip(steps, schedules, strict=True):
            row[: len(schedule)] = schedule
        errors, stayed = np.zeros((len(steps), self._end)), np.zeros((len(steps), len(self._grams)))
        for count in range(1, steps.shape[1]):
            going = np.flatnonzero(steps[:, count - 1] < self._end)
            computed, following = steps[going, :count], steps[going, count]
            stayed[going] += self._made_of(errors[going], computed[:, -1], following)
            errors[going] = self._led_back(errors[going], computed, following)
        expected: Array = np.percentile(self._lengths(errors) + stayed, EXPECTED, axis=1)
        return expected

    def _made_of(self, errors: Array, last: Indices, following: Indices) -> Array:
        """(W, G): what the model makes of errors before the last step until the following one, in each generation."""
        here, there = np.maximum(self._noise[last], 1e-12), self._noise[following]
        answered = ((here - there) / here) ** 2
        made: Array = self._lengths(errors) * (answered[:, None] + self._grown[last] - self._grown[following])
        return made

    def _led_back(self, errors: Array, computed: Indices, following: Indices) -> Array:
        """The errors before the following steps: what no outputs at hand can make good of the gap."""
        last, steps = computed[:, -1:], np.arange(self._end)
        held = (steps > last) & (steps < following[:, None]) & (steps <= self._last[last])
        made: Array = np.where(held, self._moves, 0.0)
        anchors, wanted, left = computed[:, -DEPTH:], LED_BACK * errors + made, errors + made
        weights = (self._fits(anchors) @ wanted[..., None])[..., 0] * held.any(axis=1, keepdims=True)
        left[np.arange(len(left))[:, None], anchors] -= weights
        return left

    def _fits(self, anchors: Indices) -> Array:
        """(W, A, N): takes what is wanted to the weights of these outputs; nought for those of another range."""
        own = anchors >= self._first[anchors[:, -1:]]
        normal = np.where(own[:, :, None] & own[:, None], self._gram[anchors[:, :, None], anchors[:, None]], 0.0)
        ridge = RIDGE * np.trace(normal, axis1=1, axis2=2) / own.sum(axis=1)
        places = np.arange(anchors.shape[1])
        normal[:, places, places] += np.where(own, ridge[:, None], 1.0)
        return np.linalg.solve(normal, np.where(own[..., None], self._gram[anchors], 0.0))

    def _lengths(self, errors: Array) -> Array:
        """(W, G): the squared length of each error in each generation."""
        lengths: Array = np.einsum("giw,wi->wg", self._grams @ errors.T, errors)
        return np.maximum(lengths, 0.0)


def _bounds(ranges: Ranges, end: int) -> tuple[Indices, Indices]:
    """The first and the last step of the range that each step is in."""
    first, last = np.zeros(end, dtype=np.intp), np.full(end, end - 1, dtype=np.intp)
    for begin, finish in ranges:
        first[begin : finish + 1], last[begin : finish + 1] = begin, finish
    return first, last
