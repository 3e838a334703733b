"""Which steps to compute: schedules by dynamic programming, exact for every number of computed steps in one sweep.

A *gap* is a run of held steps between two computed ones. Its cost is the error that its held steps leave at the end,
each predicted from the two computed steps before it. Errors of neighboring steps point the same way, so they are summed
as vectors:

    c = g' G g,    g = sum_t A_t (1_t - sum_j w_j 1_j)

over the held steps t of the gap, with the weights w_j of the two anchors j and A_t = `ErrorModel.reach`, how much of an
error at step t is found at the end. Later held steps correct part of the error. After the last gap there are none, so
its cost counts `last_gap_factor` times. Prior work on schedules by dynamic programming: DPCache, arXiv:2602.22654.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise, product

import numpy as np

from ..profiles import PlannerOptions
from .error_model import Array, ErrorModel, solve_ridge

WINDOW_GROWTH = 1.6  # computed step k of K of a growing window lies at (k / (K - 1)) ** WINDOW_GROWTH of the way

# The steps of 28 that cache-dit 1.5 computes under its SCM presets.
_SCM = {
    "slow": (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 14, 15, 16, 19, 20, 23, 27),
    "medium": (0, 1, 2, 3, 4, 5, 7, 8, 12, 13, 17, 18, 22, 23, 27),
    "fast": (0, 1, 2, 3, 4, 5, 7, 11, 16, 22, 27),
    "ultra": (0, 1, 2, 3, 6, 12, 19, 27),
}
Pair = tuple[int, int]


def uniform(steps: int, count: int) -> tuple[int, ...]:
    """`count` of `steps` steps, evenly spaced, from the first."""
    return _round_to_steps([k * steps / count for k in range(count)], steps)


def growing(steps: int, count: int, growth: float = WINDOW_GROWTH) -> tuple[int, ...]:
    """`count` of `steps` steps: dense at the start, then with growing gaps, up to the last step but one."""
    end = max(steps - 2, 0)
    return _round_to_steps([end * (k / max(count - 1, 1)) ** growth for k in range(count)], steps)


def cautious(steps: int) -> tuple[int, ...]:
    """The first half of the steps, the last, and every second one in between: no two held steps follow each other."""
    half = math.ceil(steps / 2)
    return tuple(step for step in range(steps) if step <= half or (step - half) % 2 == 0 or step == steps - 1)


def fixed_schedules(steps: int, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Schedules with `count` computed steps that need no measurements, by name."""
    yield "uniform", uniform(steps, count)
    for growth in (1.3, WINDOW_GROWTH, 2.0):
        yield f"growing window {growth:g}", growing(steps, count, growth)
    for name, preset in _SCM.items():
        places = np.interp(np.linspace(0, len(preset) - 1, count), range(len(preset)), preset)
        yield f"SCM {name}", _round_to_steps([place * (steps - 1) / 27 for place in places], steps)


def _round_to_steps(places: list[float], steps: int) -> tuple[int, ...]:
    """The steps nearest to increasing places, made distinct; the first is 0."""
    taken = [0]
    for place in places[1:]:
        taken.append(max(round(place), taken[-1] + 1))
    for back, index in enumerate(range(len(taken) - 1, -1, -1)):
        taken[index] = min(taken[index], steps - 1 - back)
    return tuple(taken)


def neighbors(
    computed: tuple[int, ...], steps: int, starts: Collection[int] = (0,), furthest: int = 3
) -> Iterator[tuple[int, ...]]:
    """Schedules with one computed step moved by up to `furthest`; the first step of each expert is not moved."""
    for step in (step for step in computed if step not in starts):
        for moved in (step + sign * distance for distance in range(1, furthest + 1) for sign in (-1, 1)):
            if 0 <= moved < steps and moved not in computed:
                yield tuple(sorted({*computed, moved} - {step}))


class GapCosts:
    """The cost of a gap by the two computed steps before it and its width, for the steps `first` to the end."""

    def __init__(self, gram: Array, reach: Array, first: int = 0, last_gap_factor: float = 1.0) -> None:
        self._gram, self._reach, self._last_gap_factor = gram, reach, last_gap_factor
        self.first, self.steps = first, len(reach)
        self._cache: dict[Pair, list[float]] = {}

    def after(self, previous: int, last: int) -> list[float]:
        """Costs of the gap after computed steps `previous` (-1: none) and `last`, by the distance to the next one."""
        if (previous, last) in self._cache:
            return self._cache[previous, last]
        gram = self._gram
        anchors = [step for step in (previous, last) if step >= 0]
        held = np.arange(last + 1, self.steps)
        errors = np.zeros((len(held), self.steps))
        errors[np.arange(len(held)), held] = 1.0
        errors[:, anchors] -= solve_ridge(gram[np.ix_(anchors, anchors)], gram[anchors][:, held]).T
        summed = np.cumsum(self._reach[held][:, None] * errors, axis=0)
        costs = np.einsum("ti,ti->t", summed @ gram, summed)
        costs[-1:] *= self._last_gap_factor
        found = self._cache[previous, last] = [0.0, 0.0, *np.maximum(costs, 0.0).tolist()]
        return found

    def total(self, computed: Collection[int]) -> float:
        """The cost of a whole schedule."""
        marks = (-1, *sorted(computed), self.steps)
        return sum(self.after(p, j)[k - j] for (p, j), (_, k) in pairwise(pairwise(marks)))


def cheapest_schedules(costs: GapCosts, longest_gap: int, first_steps: int = 1) -> dict[int, tuple[int, ...]]:
    """The cheapest schedule for every possible number of computed steps, by dynamic programming.

    A state is the pair of the last two computed steps. `best` has the cheapest way to each state with `count` computed
    steps: its cost, with all gaps before the last computed step, and its computed steps. The first `first_steps` steps
    are computed in any schedule.
    """
    forced = tuple(range(costs.first, min(costs.first + first_steps, costs.steps)))
    start: Pair = (-1, *forced)[-2:]  # type: ignore[assignment]
    best: dict[Pair, tuple[float, tuple[int, ...]]] = {start: (0.0, forced)}
    found: dict[int, tuple[int, ...]] = {}
    for count in range(len(forced), costs.steps - costs.first + 1):
        ends = {
            steps: cost + costs.after(*pair)[costs.steps - pair[1]]
            for pair, (cost, steps) in best.items()
            if costs.steps - pair[1] <= longest_gap
        }
        if ends:
            found[count] = min(ends, key=ends.__getitem__)
        longer: dict[Pair, tuple[float, tuple[int, ...]]] = {}
        for (previous, last), (cost, steps) in best.items():
            furthest = min(longest_gap, costs.steps - 1 - last)
            for width, gap in enumerate(costs.after(previous, last)[1 : furthest + 1], start=1):
                pair = (last, last + width)
                if cost + gap < longer.get(pair, (math.inf,))[0]:
                    longer[pair] = cost + gap, (*steps, last + width)
        best = longer
    return found


@dataclass(frozen=True)
class CandidateSchedule:
    """A schedule and its origin, with the cost it is chosen by and the error it is expected to leave.

    `error` is the squared error of the final latent that nine generations in ten are expected to stay below.
    """

    computed: tuple[int, ...]
    origin: str
    cost: float = 0.0
    error: float = 0.0

    def psnr(self, offset: float) -> float:
        """The expected PSNR in dB; `offset` is the measured PSNR of an image whose latent has squared error 1."""
        return math.inf if self.error <= 0 else offset - 10 * math.log10(self.error)


class ScheduleSearch:
    """Finds schedules for one model on one grid under one scheduler."""

    def __init__(self, model: ErrorModel) -> None:
        self.model = model

    @cached_property
    def frontier(self) -> dict[int, CandidateSchedule]:
        """The cheapest schedule for every number of computed steps."""
        found = _cheapest(self._costs, self.model.options)
        return dict(zip(found, self._with_errors(list(found.values())), strict=True))

    def evaluate(self, computed: tuple[int, ...], origin: str) -> CandidateSchedule:
        """A given schedule with its cost and its expected error."""
        parts = [[step for step in computed if costs.first <= step < costs.steps] for costs in self._costs]
        cost = sum(costs.total(part) for costs, part in zip(self._costs, parts, strict=True))
        return self._with_errors([CandidateSchedule(computed, origin, cost)])[0]

    def _with_errors(self, candidates: Sequence[CandidateSchedule]) -> list[CandidateSchedule]:
        errors = self.model.expected_errors([candidate.computed for candidate in candidates])
        return [replace(candidate, error=float(error)) for candidate, error in zip(candidates, errors, strict=True)]

    @cached_property
    def _costs(self) -> list[GapCosts]:
        """The gap costs of each range; only the gap at the end of the last range has no later steps to correct it."""
        last_gap_factor = self.model.options.last_gap_factor
        gram, reach, ranges = self.model.measurements.merged.mean_gram, self.model.reach(), self.model.ranges
        factors = [1.0] * (len(ranges) - 1) + [last_gap_factor]
        return [
            GapCosts(gram[: end + 1, : end + 1], reach[: end + 1], first, factor)
            for (first, end), factor in zip(ranges, factors, strict=True)
        ]


def _cheapest(ranges: Sequence[GapCosts], options: PlannerOptions) -> dict[int, CandidateSchedule]:
    """The cheapest schedule for every number of computed steps, divided between the ranges at the lowest cost."""
    best: dict[int, CandidateSchedule] = {0: CandidateSchedule((), "")}
    for costs in ranges:
        joined: dict[int, CandidateSchedule] = {}
        for (a, first), (b, second) in product(best.items(), _cheapest_of_range(costs, options).items()):
            cost = first.cost + second.cost
            if a + b not in joined or cost < joined[a + b].cost:
                joined[a + b] = CandidateSchedule(first.computed + second.computed, second.origin, cost)
        best = joined
    return dict(sorted(best.items()))


def _cheapest_of_range(costs: GapCosts, options: PlannerOptions) -> dict[int, CandidateSchedule]:
    """For every number of computed steps, the cheapest of the schedule found and the fixed ones.

    Fixed schedules without the first steps that must be computed are left out, unless nothing else has so few steps.
    """
    length = costs.steps - costs.first
    found = cheapest_schedules(costs, options.longest_gap, options.first_steps)
    best = {}
    for count in range(1, length + 1):
        schedules = [(name, tuple(costs.first + s for s in steps)) for name, steps in fixed_schedules(length, count)]
        if count in found:
            schedules.insert(0, ("dynamic programming", found[count]))
        candidates = [CandidateSchedule(steps, name, costs.total(steps)) for name, steps in schedules]
        forced = set(range(costs.first, costs.first + min(options.first_steps, count)))
        allowed = [candidate for candidate in candidates if forced <= set(candidate.computed)]
        best[count] = min(allowed or candidates, key=lambda candidate: candidate.cost)
    return best
