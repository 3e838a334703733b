"""From what was measured to a plan: the best schedule for every budget, its weights, and what it should lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .beam import Beam
from .rollout import DEPTH, Course, Ranges, Weights
from .schedules import known
from .search import Gaps, schedules

Schedules = dict[int, tuple[float, tuple[int, ...]]]
GAP_BY_GAP = "dynamic programming"
OTHERWISE = (0.0, 0.1, 1.0)  # other parts of the measured growth to reckon with, for trials


@dataclass(frozen=True)
class Choice:
    """A schedule and where it comes from; its cost, by which it is chosen, and the error it is expected to leave.

    That is the squared error of the last latent, and nine generations in ten are expected to stay below it.
    """

    computed: tuple[int, ...]
    origin: str
    cost: float = 0.0
    error: float = 0.0

    def psnr(self, offset: float) -> float:
        """The expected quality in dB; `offset` is what the error of a latent means for a picture."""
        return math.inf if self.error <= 0 else offset - 10 * math.log10(self.error)


class Planner:
    """Plans for one model on one grid under one scheduler.

    `ranges` are the steps that run, first and last: one range, or one for each of two experts.
    """

    def __init__(self, course: Course, ranges: Ranges) -> None:
        self._course, self._ranges = course, ranges

    @cached_property
    def frontier(self) -> dict[int, Choice]:
        """For every number of computed steps the schedule that is expected to cost least."""
        candidates = [
            (name, steps)
            for count, found in sorted(self._beam.schedules().items())
            for name, steps in (("beam search", found), *self._others(count))
        ]
        frontier: dict[int, Choice] = {}
        for choice in self._judged(candidates):
            count = len(choice.computed)
            if count not in frontier or choice.cost < frontier[count].cost:
                frontier[count] = choice
        return frontier

    def alternatives(self, count: int) -> list[tuple[int, ...]]:
        """Schedules worth a trial, the best first: errors may grow more or less than is reckoned with."""
        found = [self.frontier[count].computed]
        found += [Beam(self._course, self._ranges, growth).schedules()[count] for growth in OTHERWISE]
        found += [steps for name, steps in self._others(count) if name == GAP_BY_GAP]
        return list(dict.fromkeys(found))

    def weights(self, computed: Collection[int], depth: int = DEPTH) -> dict[int, Weights]:
        """The weights of the held steps of a schedule."""
        return self._course.weights(computed, self._ranges, depth)

    def judged(self, computed: tuple[int, ...], origin: str) -> Choice:
        """A schedule with its cost."""
        return self._judged([(origin, computed)])[0]

    def _judged(self, candidates: Sequence[tuple[str, tuple[int, ...]]]) -> list[Choice]:
        costs, errors = self._beam.judged([steps for _, steps in candidates])
        return [
            Choice(steps, name, float(cost), float(error))
            for (name, steps), cost, error in zip(candidates, costs, errors, strict=True)
        ]

    def _others(self, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The schedule that costs least gap by gap and, where one expert runs, those that are known."""
        if count in self._gap_by_gap:
            yield GAP_BY_GAP, self._gap_by_gap[count][1]
        if len(self._ranges) == 1:
            first, last = self._ranges[0]
            for name, steps in known(last - first + 1, count):
                yield name, tuple(first + step for step in steps)

    @cached_property
    def _beam(self) -> Beam:
        return Beam(self._course, self._ranges)

    @cached_property
    def _gap_by_gap(self) -> Schedules:
        """What dynamic programming finds, every number of computed steps shared between the ranges at its best."""
        gram, reach = self._course.kernel.merged.mean, self._course.reach()
        total: Schedules = {0: (0.0, ())}
        for first, last in self._ranges:
            gaps = Gaps(gram[: last + 1, : last + 1], reach[: last + 1], first)
            total = _joined(total, {count: (gaps.of(steps), steps) for count, steps in schedules(gaps).items()})
        return total


def _joined(left: Schedules, right: Schedules) -> Schedules:
    """The cheapest way to share each number of computed steps between two ranges."""
    best: Schedules = {}
    for a, (cost, first) in left.items():
        for b, (more, second) in right.items():
            if a + b not in best or cost + more < best[a + b][0]:
                best[a + b] = (cost + more, first + second)
    return best
