"""The search finds the cheapest schedule of all, for every budget, and its costs are those of real tensors."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.rollout import least_squares
from holdover.plan.search import GAP, LAST, Gaps, neighbours, schedules

from .trajectories import WIDTH, falling, mean_square, outputs, smooth_kernel

relaxed = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10**6)


def gaps_of(steps: int, seed: int, first: int = 0) -> Gaps:
    reach = np.random.default_rng(seed).uniform(0.2, 2.0, steps)
    return Gaps(smooth_kernel(steps, seed).mean, reach, first)


def all_schedules(first: int, steps: int, count: int, widest: int) -> list[tuple[int, ...]]:
    chosen = [(first, *rest) for rest in combinations(range(first + 1, steps), count - 1)]
    return [s for s in chosen if max(b - a for a, b in pairwise((*s, steps))) <= widest]


@relaxed
@given(steps=st.integers(1, 12), seed=seeds, first=st.integers(0, 3), widest=st.sampled_from([2, 4, GAP]))
def test_dynamic_programming_equals_brute_force_for_every_budget(steps, seed, first, widest):
    first = min(first, steps - 1)
    gaps = gaps_of(steps, seed, first)
    found = schedules(gaps, widest)
    for count in range(1, steps - first + 1):
        possible = all_schedules(first, steps, count, widest)
        assert (count in found) == bool(possible)
        if possible:
            assert found[count] in possible
            assert gaps.of(found[count]) == pytest.approx(min(map(gaps.of, possible)), rel=1e-9, abs=1e-15)


@relaxed
@given(steps=st.integers(2, 30), seed=seeds, last_gap=st.sampled_from([1.0, LAST]), data=st.data())
def test_the_cost_of_a_schedule_is_the_summed_error_of_real_tensors(steps, seed, last_gap, data):
    computed = sorted({0, *data.draw(st.lists(st.integers(0, steps - 1)))})
    vectors, reach = outputs(falling(steps), seed), np.random.default_rng(seed).uniform(0.2, 2.0, steps)
    gram = vectors @ vectors.T / WIDTH
    total = 0.0
    for index, (last, following) in enumerate(pairwise((*computed, steps))):
        anchors = computed[max(index - 1, 0) : index + 1]
        gap = np.zeros(WIDTH)
        for step in range(last + 1, following):
            weights = least_squares(anchors, step, gram).values
            gap += reach[step] * (vectors[step] - np.asarray(weights) @ vectors[anchors])
        total += mean_square(gap) * (last_gap if following == steps else 1.0)
    assert Gaps(gram, reach, last=last_gap).of(computed) == pytest.approx(total, rel=1e-9, abs=1e-10)


def test_nothing_held_costs_nothing():
    assert gaps_of(20, 3).of(range(20)) == 0.0
    assert schedules(gaps_of(20, 3))[20] == tuple(range(20))


def test_a_gap_is_never_wider_than_allowed():
    found = schedules(gaps_of(50, 1), widest=8)
    assert min(found) == 7
    assert max(b - a for s in found.values() for a, b in pairwise((*s, 50))) <= 8


def test_budgets_that_cannot_be_had_are_left_out():
    assert min(schedules(gaps_of(50, 1))) == 5
    assert set(schedules(gaps_of(50, 1))) == set(range(5, 51))


@relaxed
@given(steps=st.integers(2, 30), data=st.data())
def test_neighbours_move_one_step_and_keep_the_first(steps, data):
    computed = tuple(sorted({0, *data.draw(st.lists(st.integers(0, steps - 1), max_size=8))}))
    moved = list(neighbours(computed, steps))
    for other in moved:
        assert other[0] == 0
        assert list(other) == sorted(set(other))
        assert len(other) == len(computed)
        assert max(other) < steps
        assert len(set(other) - set(computed)) == 1
    assert computed not in moved
    assert len(set(moved)) == len(moved)


def test_neighbours_keep_the_first_step_of_each_expert():
    assert set(neighbours((0, 4, 5), 8, (0, 4))) == {(0, 2, 4), (0, 3, 4), (0, 4, 6), (0, 4, 7)}
    assert list(neighbours((0, 4), 8, (0, 4))) == []
