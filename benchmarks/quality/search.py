"""The best a method can do with a number of computed steps, where its settings do not say how many that will be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import sqrt

from .bench import Bench, Course, Row
from .ways import Way

SLACK = 0.5  # computed steps above the budget that a row may have, in its favour


@dataclass(frozen=True, eq=False)
class Tried:
    """A setting, the steps it computed and how near its pictures came."""

    way: Way
    computed: float
    psnr: float


class Pool:
    """All settings of one method that were tried on a few prompts."""

    def __init__(self, bench: Bench, course: Course) -> None:
        self.bench, self.course = bench, course
        self._tried: dict[str, Tried] = {}

    def add(self, way: Way) -> float:
        """Try a setting, once; returns the steps it computed."""
        if way.key not in self._tried:
            self._tried[way.key] = Tried(way, *self.bench.nearness(way, self.course))
        return self._tried[way.key].computed

    def add_all(self, ways: Iterable[Way]) -> None:
        """Try many."""
        for way in ways:
            self.add(way)

    def best(self, budget: int) -> Tried:
        """The nearest of those within the budget; where none is, the one that computes least."""
        within = [tried for tried in self._tried.values() if tried.computed <= budget + SLACK]
        if not within:
            return min(self._tried.values(), key=lambda tried: tried.computed)
        return max(within, key=lambda tried: tried.psnr)

    def rows(self, budgets: Sequence[int]) -> list[Row]:
        """The best setting for each budget, on all prompts."""
        made: dict[str, Row] = {}
        rows = []
        for budget in budgets:
            way = self.best(budget).way
            if way.key not in made:
                made[way.key] = self.bench.row(way, self.course, budget)
            rows.append(made[way.key] | {"wanted": budget, "settings_tried": len(self._tried)})
        return rows


def bisect(pool: Pool, make: Callable[[float], Way], budgets: Sequence[int], span: tuple[float, float]) -> list[float]:
    """Try thresholds until every budget is met as nearly as they allow: a larger one computes fewer steps.

    Returns for each budget the threshold that came nearest from below.
    """
    seen: list[tuple[float, float]] = []
    for budget in budgets:
        low = max((t for t, computed in seen if computed > budget), default=span[0])
        high = min((t for t, computed in seen if computed <= budget), default=span[1])
        for _ in range(pool.bench.scale.halvings):
            if high < 1.01 * low or any(budget - SLACK < computed <= budget for _, computed in seen):
                break
            middle = sqrt(low * high)
            seen.append((middle, pool.add(make(middle))))
            low, high = (middle, high) if seen[-1][1] > budget else (low, middle)
    return [max(within)[1] for b in budgets if (within := [(c, t) for t, c in seen if c <= b + SLACK])]


def spread(candidates: Sequence[Way], most: int) -> list[Way]:
    """At most so many of them, evenly over the list."""
    if len(candidates) <= most:
        return list(candidates)
    return [candidates[index * len(candidates) // most] for index in range(most)]
