"""Which steps to compute: exact dynamic programming over pairs of computed steps, every budget in one sweep.

The cost of a gap is the error of the steps held in it, each predicted from the two computed steps before, summed with
its sign because neighbouring errors point the same way: c = g'Gg, g = sum_t A_t (1_t - sum_j w_j 1_j), where A_t is how
much of an error at step t is found at the end. Later held steps lead back to the uncached trajectory and make good part
of it. After the last gap there are none, so that one counts several times.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from itertools import pairwise

import numpy as np

from .kernel import Array
from .rollout import ridged

GAP = 12  # steps from one computed step to the next, at most
LAST = 3.0  # times that the last gap counts; found by trial on the model in the box
Pair = tuple[int, int]


class Gaps:
    """The cost of going from one computed step to the next, by the two last computed steps and the width of the gap."""

    def __init__(self, gram: Array, reach: Array, first: int = 0, last: float = LAST) -> None:
        self._gram, self._reach, self._last = gram, reach, last
        self.first, self.steps = first, len(reach)
        self._known: dict[Pair, list[float]] = {}

    def after(self, previous: int, last: int) -> list[float]:
        """Costs by width: 0, 1 (nothing held), 2 ... to the end; `previous` is -1 where only one step is computed."""
        found = self._known.get((previous, last))
        if found is None:
            found = self._known[previous, last] = self._costs(previous, last)
        return found

    def of(self, computed: Collection[int]) -> float:
        """The cost of a whole schedule."""
        marks = (-1, *sorted(computed), self.steps)
        return sum(self.after(p, j)[k - j] for (p, j), (_, k) in pairwise(pairwise(marks)))

    def _costs(self, previous: int, last: int) -> list[float]:
        gram = self._gram
        anchors = [step for step in (previous, last) if step >= 0]
        held = np.arange(last + 1, self.steps)
        normal: Array = gram[anchors][:, anchors]
        errors = np.zeros((len(held), self.steps))
        errors[np.arange(len(held)), held] = 1.0
        errors[:, anchors] -= ridged(normal, gram[anchors][:, held]).T
        summed = np.cumsum(self._reach[held][:, None] * errors, axis=0)
        costs = np.einsum("ti,ti->t", summed @ gram, summed)
        costs[-1:] *= self._last
        return [0.0, 0.0, *np.maximum(costs, 0.0).tolist()]


def schedules(gaps: Gaps, widest: int = GAP) -> dict[int, tuple[int, ...]]:
    """The cheapest schedule for every number of computed steps that can be had.

    A state is the last two computed steps; `best` has the cheapest way to each with `count` steps computed, all gaps
    before the last of them paid.
    """
    best: dict[Pair, float] = {(-1, gaps.first): 0.0}
    came: dict[tuple[int, int, int], int] = {}
    found: dict[int, tuple[int, ...]] = {}
    for count in range(1, gaps.steps - gaps.first + 1):
        ends = {
            pair: cost + gaps.after(*pair)[gaps.steps - pair[1]]
            for pair, cost in best.items()
            if gaps.steps - pair[1] <= widest
        }
        if ends:
            found[count] = _traced(min(ends, key=ends.__getitem__), count, came)
        best = _extended(best, gaps, widest, count + 1, came)
    return found


def _extended(
    best: dict[Pair, float], gaps: Gaps, widest: int, count: int, came: dict[tuple[int, int, int], int]
) -> dict[Pair, float]:
    """The cheapest way to each pair with one more step computed."""
    longer: dict[Pair, float] = {}
    for (previous, last), cost in best.items():
        ahead = min(widest, gaps.steps - 1 - last)
        for width, gap in enumerate(gaps.after(previous, last)[1 : ahead + 1], start=1):
            pair = (last, last + width)
            if cost + gap < longer.get(pair, np.inf):
                longer[pair] = cost + gap
                came[count, *pair] = previous
    return longer


def _traced(pair: Pair, count: int, came: dict[tuple[int, int, int], int]) -> tuple[int, ...]:
    steps = [pair[1]]
    while count > 1:
        steps.append(pair[0])
        pair, count = (came[count, *pair], pair[0]), count - 1
    return tuple(reversed(steps))


def neighbours(
    computed: tuple[int, ...], steps: int, starts: Collection[int] = (0,), furthest: int = 3
) -> Iterator[tuple[int, ...]]:
    """Schedules in which one computed step is moved by up to `furthest` places; the first of each expert stays."""
    for step in (step for step in computed if step not in starts):
        for moved in (step + sign * distance for distance in range(1, furthest + 1) for sign in (-1, 1)):
            if 0 <= moved < steps and moved not in computed:
                yield tuple(sorted({*computed, moved} - {step}))
