"""Which steps to compute, judged by the whole way: schedules are run on paper, and the best few ways to each step kept.

Held steps lead back to the uncached trajectory, so an error lasts until later ones have made it good. What the model
makes of it meanwhile stays: its outputs are computed from latents that are off. So the error a generation ends with is

    |d_N|^2 + sum_a ((s_a - s_b) / s_a)^2 |d_a|^2 + sum_a (A_a^2 - A_b^2) |d_a|^2

over the computed steps a and the next ones b. d is the error of the latent on paper; s the noise level, for an output
changes by d/s where its latent is off by d; A how much more than that errors were measured to grow from a step to the
end. The last sum is what makes some pictures hard: it counts in full for the hard ones and by a part for the mean. A
schedule costs the geometric mean of both. That depends on the whole schedule, so no dynamic programme finds the least;
a beam comes near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kernel import Array
from .rollout import DEPTH, RIDGE, Course, Ranges
from .search import GAP

ORDINARY = 0.3  # the part of measured growth that counts for the mean; found by trial on the model in the box
HARD = 90.0  # percentile of the generations that stands for hard ones
WIDTH = 4  # ways to each step that are kept
SPARSE = 6  # fewer computed steps than this may lie further apart than GAP
Indices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways so far, one a row: the computed steps, the error now, and in each generation what came of earlier errors.

    `answered` is what outputs added that answered to them, `grown` what they grew by beyond that.
    """

    computed: Indices
    errors: Array
    answered: Array
    grown: Array

    @property
    def last(self) -> Indices:
        """The last computed step of each."""
        return self.computed[:, -1]

    def at(self, rows: Indices) -> Ways:
        """Some of them."""
        return Ways(self.computed[rows], self.errors[rows], self.answered[rows], self.grown[rows])


class Beam:
    """Runs schedules of one course on paper, over the steps that run."""

    def __init__(self, course: Course, ranges: Ranges, growth: float = ORDINARY) -> None:
        kernel = course.kernel.merged
        self._gram, self._grams = kernel.mean, kernel.grams
        self._moves: Array = course.response[course.steps]
        self._ranges, self._end, self._growth = ranges, course.steps, growth
        self._first, self._stop = _bounds(ranges, self._end)
        self._answers = _answers(np.append(kernel.noise, 0.0))
        self._amplified = np.exp(kernel.grown.T)

    def judged(self, schedules: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """What schedules cost, and the squared error that all but hard generations stay below.

        The first step of every range is among the steps of each.
        """
        steps = np.full((len(schedules), 1 + max(map(len, schedules))), self._end)
        for row, schedule in zip(steps, schedules, strict=True):
            row[: len(schedule)] = schedule
        ways = self._begun(steps[:, :1])
        for following in steps.T[1:]:
            going = np.flatnonzero(ways.last < self._end)
            taken = self._taken(ways.at(going), np.arange(len(going)), following[going])
            ways = Ways(np.column_stack([ways.computed, following]), ways.errors, ways.answered, ways.grown)
            ways.errors[going], ways.answered[going], ways.grown[going] = taken.errors, taken.answered, taken.grown
        return self._judged(ways)

    def schedules(self, width: int = WIDTH) -> dict[int, tuple[int, ...]]:
        """The best schedule found for every number of computed steps; `width` ways to each step are kept."""
        ways, found = self._begun(np.array([[self._ranges[0][0]]])), {}
        for count in range(1, 1 + sum(last - first + 1 for first, last in self._ranges)):
            taken = self._taken(ways, *self._ahead(ways.last, count < SPARSE))
            whole = taken.at(np.flatnonzero(taken.last == self._end))
            if len(whole.last):
                best = self._judged(whole)[0].argmin()
                found[count] = tuple(whole.computed[best, :-1].tolist())
            ways = taken.at(_best(taken.last, self._mean(taken), self._end, width))
        return found

    def _judged(self, ways: Ways) -> tuple[Array, Array]:
        """What ways to the end cost, and the squared error that all but hard generations stay below."""
        hard = np.percentile(self._lengths(ways.errors) + ways.answered + ways.grown, HARD, axis=1)
        return np.sqrt(self._mean(ways) * hard), hard

    def _mean(self, ways: Ways) -> Array:
        """The mean squared error of ways, if nothing is lost after them."""
        left = np.maximum(np.einsum("wi,wi->w", ways.errors @ self._gram, ways.errors), 0.0)
        mean: Array = left + ways.answered.mean(axis=1) + self._growth * ways.grown.mean(axis=1)
        return mean

    def _begun(self, first: Indices) -> Ways:
        count, generations = len(first), len(self._grams)
        return Ways(first, np.zeros((count, self._end)), *np.zeros((2, count, generations)))

    def _ahead(self, last: Indices, sparse: bool) -> tuple[Indices, Indices]:
        """Every way with every step that may be computed next: in its range, or at the beginning of the next one."""
        furthest = self._end if sparse else last + GAP
        steps = np.arange(1, self._end + 1)
        stop = self._stop[last]
        beyond = np.array([next((first for first, _ in self._ranges if first > s), self._end) for s in stop])
        inside = (steps > last[:, None]) & (steps <= stop[:, None])
        inside[np.arange(len(last)), beyond - 1] = True
        near = np.minimum(steps, stop[:, None] + 1) <= np.reshape(furthest, (-1, 1))
        way, place = np.nonzero(inside & near)
        return way, steps[place]

    def _taken(self, ways: Ways, way: Indices, following: Indices) -> Ways:
        """Ways taken on to their following steps."""
        last, lengths = ways.last[way], self._lengths(ways.errors)[way]
        answered = ways.answered[way] + self._answers[last, following][:, None] * lengths
        grown = ways.grown[way] + (self._amplified[last] - self._amplified[following]) * lengths
        computed = np.column_stack([ways.computed[way], following])
        return Ways(computed, self._led_back(ways, way, following), answered, grown)

    def _lengths(self, errors: Array) -> Array:
        """(W, G): the squared length of each error in each generation."""
        lengths: Array = np.einsum("giw,wi->wg", self._grams @ errors.T, errors)
        return np.maximum(lengths, 0.0)

    def _led_back(self, ways: Ways, way: Indices, following: Indices) -> Array:
        """The error of the latent before the following step: what no outputs at hand can make good of the gap."""
        last, steps = ways.last[way][:, None], np.arange(self._end)
        held = (steps > last) & (steps < following[:, None]) & (steps <= self._stop[last])
        errors: Array = ways.errors[way] + np.where(held, self._moves, 0.0)
        anchors = ways.computed[:, -DEPTH:]
        weights = (self._fits(anchors)[way] @ errors[..., None])[..., 0] * held.any(axis=1, keepdims=True)
        errors[np.arange(len(way))[:, None], anchors[way]] -= weights
        return errors

    def _fits(self, anchors: Indices) -> Array:
        """(W, A, N): takes what is wanted to the weights of these outputs; nought for those of another range."""
        own = anchors >= self._first[anchors[:, -1:]]
        normal = np.where(own[:, :, None] & own[:, None], self._gram[anchors[:, :, None], anchors[:, None]], 0.0)
        ridge = RIDGE * np.trace(normal, axis1=1, axis2=2) / own.sum(axis=1)
        places = np.arange(anchors.shape[1])
        normal[:, places, places] += np.where(own, ridge[:, None], 1.0)
        return np.linalg.solve(normal, np.where(own[..., None], self._gram[anchors], 0.0))


def _best(last: Indices, costs: Array, end: int, width: int) -> Indices:
    """The best ways to each step before the end, `width` of them."""
    order = np.lexsort((costs, last))
    steps = last[order]
    begins = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    rank = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    return order[(rank < width) & (steps < end)]


def _bounds(ranges: Ranges, end: int) -> tuple[Indices, Indices]:
    """The first and the last step of the range that each step is in."""
    first, stop = np.zeros(end, dtype=np.intp), np.full(end, end - 1, dtype=np.intp)
    for begin, finish in ranges:
        first[begin : finish + 1], stop[begin : finish + 1] = begin, finish
    return first, stop


def _answers(noise: Array) -> Array:
    """(N, N+1): the share of a squared error before a step that outputs add by answering to it, up to the next one."""
    here = np.maximum(noise[:-1, None], 1e-12)
    answers: Array = ((here - noise) / here) ** 2
    return answers
