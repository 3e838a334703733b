"""Which steps to compute, judged by the whole way: schedules are run on paper, and the best few ways to each step kept.

Held steps lead back to the uncached trajectory, so an error lasts until later ones have made it good. What the model
makes of it meanwhile stays: its outputs are computed from latents that are off. The cost of a schedule is the error at
the end and a share of what errors on the way have grown to,

    c = |d_N|^2 + STAYS * sum_a (A_a^2 - A_b^2 + ((s_a - s_b) / s_a)^2) |d_a|^2,

over the computed steps a and the next ones b: d is the error of the latent, A how much an error grows from a step to
the end, as measured, and s the noise level, for an output changes by d/s where its latent is off by d. All of it is a
mean over the measured generations. The cost depends on the whole schedule, so no dynamic programme finds the least; a
beam comes near it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .kernel import Array
from .rollout import DEPTH, RIDGE, Course, Ranges
from .search import GAP

STAYS = 0.3  # of what the model makes of an error, when schedules are compared; found by trial on the model in the box
FEW = 90.0  # percentile of the generations whose error is expected, with all staying of what the model makes of it
WIDTH = 4  # ways to each step that are kept
SPARSE = 6  # fewer computed steps than this may lie further apart than GAP
Indices = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Ways:
    """Ways so far, one a row: the computed steps, by how much errors grew in each generation, and the error now."""

    computed: Indices
    grown: Array
    errors: Array

    @property
    def last(self) -> Indices:
        """The last computed step of each."""
        return self.computed[:, -1]


class Beam:
    """Runs schedules of one course on paper, over the steps that run."""

    def __init__(self, course: Course, ranges: Ranges, stays: float = STAYS) -> None:
        kernel = course.kernel.merged
        self._gram, self._grams = kernel.mean, kernel.grams
        self._moves: Array = course.response[course.steps]
        self._ranges, self._end, self._stays = ranges, course.steps, stays
        self._first, self._stop = _bounds(ranges, self._end)
        self._grows = _grows(np.append(kernel.noise, 0.0), np.exp(kernel.grown))

    def judged(self, schedules: Sequence[Sequence[int]]) -> tuple[Array, Array]:
        """What schedules cost, and the squared error that all but a few generations stay below.

        The first step of every range is among the steps of each.
        """
        steps = np.full((len(schedules), 1 + max(map(len, schedules))), self._end)
        for row, schedule in zip(steps, schedules, strict=True):
            row[: len(schedule)] = schedule
        ways, costs = self._begun(steps[:, :1]), np.zeros(len(steps))
        grown, errors = ways.grown, ways.errors
        for count in range(1, steps.shape[1]):
            going = np.flatnonzero(steps[:, count - 1] < self._end)
            ways = Ways(steps[going, :count], grown[going], errors[going])
            taken, costs[going] = self._taken(ways, np.arange(len(going)), steps[going, count])
            grown[going], errors[going] = taken.grown, taken.errors
        return costs, np.percentile(self._lengths(errors) + grown, FEW, axis=1)

    def schedules(self, width: int = WIDTH) -> dict[int, tuple[int, ...]]:
        """The best schedule found for every number of computed steps; `width` ways to each step are kept."""
        ways, found = self._begun(np.array([[self._ranges[0][0]]])), {}
        for count in range(1, self._end + 1):
            taken, costs = self._taken(ways, *self._ahead(ways.last, count < SPARSE))
            whole = np.flatnonzero(taken.last == self._end)
            if len(whole):
                best = whole[costs[whole].argmin()]
                found[count] = tuple(taken.computed[best, :-1].tolist())
            kept = _best(taken.last, costs, self._end, width)
            if not len(kept):
                break
            ways = Ways(taken.computed[kept], taken.grown[kept], taken.errors[kept])
        return found

    def _begun(self, first: Indices) -> Ways:
        return Ways(first, np.zeros((len(first), len(self._grams))), np.zeros((len(first), self._end)))

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

    def _taken(self, ways: Ways, way: Indices, following: Indices) -> tuple[Ways, Array]:
        """Ways taken on to their following steps, with what each costs if nothing is lost after that."""
        grown = ways.grown[way] + self._grows[ways.last[way], following] * self._lengths(ways.errors)[way]
        errors = self._led_back(ways, way, following)
        left = np.maximum(np.einsum("wi,wi->w", errors @ self._gram, errors), 0.0)
        taken = Ways(np.column_stack([ways.computed[way], following]), grown, errors)
        return taken, left + self._stays * grown.mean(axis=1)

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


def _grows(noise: Array, growth: Array) -> Array:
    """(N, N+1, G): what the model makes of an error before a step, up to the next computed one, in each generation."""
    here = np.maximum(noise[:-1, None], 1e-12)
    answered = ((here - noise) / here) ** 2
    lasting = growth.T[:-1, None] - growth.T[None]
    return np.maximum(lasting + answered[..., None], 0.0)
