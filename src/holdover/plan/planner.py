"""From what was measured to a plan: the best schedule for every budget, its weights, and its expected cost."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from .rollout import DEPTH, Course, Ranges, Weights
from .schedules import known
from .search import Gaps, schedules


@dataclass(frozen=True)
class Choice:
    """A schedule, where it comes from, and its cost: the squared error it is expected to leave in the last latent."""

    computed: tuple[int, ...]
    origin: str
    cost: float

    def psnr(self, offset: float) -> float:
        """The expected quality in dB; `offset` is what the error of a latent means for a picture."""
        return math.inf if self.cost <= 0 else offset - 10 * math.log10(self.cost)


class Planner:
    """Plans for one model on one grid under one scheduler.

    `ranges` are the steps that run, first and last: one range, or one for each of two experts.
    """

    def __init__(self, course: Course, ranges: Ranges) -> None:
        self._course, self._ranges = course, ranges

    @cached_property
    def frontier(self) -> dict[int, Choice]:
        """For every number of computed steps the schedule that is expected to cost least."""
        total: dict[int, Choice] = {0: Choice((), "", 0.0)}
        for gaps in self._gaps:
            total = _joined(total, _of_range(gaps))
        return dict(sorted(total.items()))

    def weights(self, computed: Collection[int], depth: int = DEPTH) -> dict[int, Weights]:
        """The weights of the held steps of a schedule."""
        return self._course.weights(computed, self._ranges, depth)

    def judged(self, computed: tuple[int, ...], origin: str) -> Choice:
        """A schedule with its cost."""
        shares = [[step for step in computed if gaps.first <= step < gaps.steps] for gaps in self._gaps]
        return Choice(computed, origin, sum(gaps.of(share) for gaps, share in zip(self._gaps, shares, strict=True)))

    @cached_property
    def _gaps(self) -> list[Gaps]:
        gram, reach = self._course.kernel.merged.mean, self._course.reach()
        return [Gaps(gram[: last + 1, : last + 1], reach[: last + 1], first) for first, last in self._ranges]


def _of_range(gaps: Gaps) -> dict[int, Choice]:
    """For every number of computed steps the cheapest of the schedule found and the schedules known."""
    found, length = schedules(gaps), gaps.steps - gaps.first
    choices = {}
    for count in range(1, length + 1):
        candidates = [(name, tuple(gaps.first + s for s in steps)) for name, steps in known(length, count)]
        if count in found:
            candidates.insert(0, ("dynamic programming", found[count]))
        judged = [Choice(steps, name, gaps.of(steps)) for name, steps in candidates]
        choices[count] = min(judged, key=lambda choice: choice.cost)
    return choices


def _joined(left: dict[int, Choice], right: dict[int, Choice]) -> dict[int, Choice]:
    """The best way to share each number of computed steps between two ranges."""
    best: dict[int, Choice] = {}
    for a, first in left.items():
        for b, second in right.items():
            cost = first.cost + second.cost
            if a + b not in best or cost < best[a + b].cost:
                best[a + b] = Choice(first.computed + second.computed, second.origin, cost)
    return best
