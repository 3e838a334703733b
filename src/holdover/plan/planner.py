"""From what was measured to a plan: the best schedule for every budget, its weights, and what it should lose."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from .paper import Paper
from .rollout import DEPTH, Course, Ranges, Weights
from .schedules import known
from .search import LAST, Gaps, schedules

LASTS = (1.0, 2.0, 6.0)  # other counts of the last gap, for trials


@dataclass(frozen=True)
class Choice:
    """A schedule and where it comes from; the cost it is chosen by, and the error it is expected to leave.

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
        return {len(choice.computed): choice for choice in self._expected(_cheapest(self._gaps))}

    def alternatives(self, count: int) -> list[tuple[int, ...]]:
        """Schedules worth a trial, the best first: the last gap may count for more or less than is reckoned with."""
        others = (choice for last in LASTS for choice in _cheapest(self._gaps_with(last)))
        found = [self.frontier[count].computed, *(c.computed for c in others if len(c.computed) == count)]
        return list(dict.fromkeys(found))

    def weights(self, computed: Collection[int], depth: int = DEPTH) -> dict[int, Weights]:
        """The weights of the held steps of a schedule."""
        return self._course.weights(computed, self._ranges, depth)

    def judged(self, computed: tuple[int, ...], origin: str) -> Choice:
        """A schedule with its cost and the error that is expected."""
        shares = [[step for step in computed if gaps.first <= step < gaps.steps] for gaps in self._gaps]
        cost = sum(gaps.of(share) for gaps, share in zip(self._gaps, shares, strict=True))
        return self._expected([Choice(computed, origin, cost)])[0]

    def _expected(self, choices: Sequence[Choice]) -> list[Choice]:
        errors = self._paper.expected([choice.computed for choice in choices])
        return [replace(choice, error=float(error)) for choice, error in zip(choices, errors, strict=True)]

    @cached_property
    def _paper(self) -> Paper:
        return Paper(self._course, self._ranges)

    @cached_property
    def _gaps(self) -> list[Gaps]:
        return self._gaps_with(LAST)

    def _gaps_with(self, last: float) -> list[Gaps]:
        """What gaps cost in each range; only after the last range nothing leads back."""
        gram, reach = self._course.kernel.merged.mean, self._course.reach()
        return [
            Gaps(gram[: end + 1, : end + 1], reach[: end + 1], first, last if end == self._ranges[-1][1] else 1.0)
            for first, end in self._ranges
        ]


def _cheapest(ranges: Sequence[Gaps]) -> list[Choice]:
    """The cheapest schedule for every number of computed steps, shared between the ranges at its best."""
    total: dict[int, Choice] = {0: Choice((), "")}
    for gaps in ranges:
        total = _joined(total, _of_range(gaps))
    return [choice for _, choice in sorted(total.items())]


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
