"""The search finds the cheapest schedule for every number of computed steps; costs are those of real tensors."""

from __future__ import annotations

import math
from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.error_model import DEFAULT_OPTIONS, ErrorModel, PlannerOptions, fit_output
from holdover.plan.generation import euler_response
from holdover.plan.search import (
    CandidateSchedule,
    GapCosts,
    ScheduleSearch,
    cheapest_schedules,
    fixed_schedules,
    growing,
    neighbors,
    uniform,
)

from .trajectories import WIDTH, falling, mean_square, measurements_of, outputs, smooth_measurements

relaxed = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10**6)
LONGEST, FACTOR = DEFAULT_OPTIONS.longest_gap, DEFAULT_OPTIONS.last_gap_factor

# Schedules that need no measurements.


def assert_valid(schedule: tuple[int, ...], steps: int, count: int) -> None:
    assert len(schedule) == count
    assert schedule[0] == 0
    assert list(schedule) == sorted(set(schedule))
    assert schedule[-1] < steps


@pytest.mark.parametrize("steps", range(1, 61))
def test_every_fixed_schedule_is_valid(steps):
    for count in range(1, steps + 1):
        for _, schedule in fixed_schedules(steps, count):
            assert_valid(schedule, steps, count)
        for growth in (1.0, 3.0):
            assert_valid(growing(steps, count, growth), steps, count)


def test_with_every_step_computed_all_fixed_schedules_are_the_same():
    assert {schedule for _, schedule in fixed_schedules(17, 17)} == {tuple(range(17))}


def test_uniform_is_even():
    assert uniform(50, 10) == tuple(range(0, 50, 5))


def test_a_growing_window_grows():
    schedule = growing(50, 10)
    gaps = [b - a for a, b in pairwise(schedule)]
    assert gaps == sorted(gaps)
    assert schedule[-1] == 48


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("SCM fast", (0, 1, 2, 3, 4, 5, 7, 11, 16, 22, 27)),
        ("SCM ultra", (0, 1, 2, 3, 6, 12, 19, 27)),
    ],
)
def test_a_preset_at_its_own_size_is_unchanged(name, preset):
    assert dict(fixed_schedules(28, len(preset)))[name] == preset


@relaxed
@given(steps=st.integers(2, 30), data=st.data())
def test_neighbors_move_one_step_and_keep_the_first(steps, data):
    computed = tuple(sorted({0, *data.draw(st.lists(st.integers(0, steps - 1), max_size=8))}))
    moved = list(neighbors(computed, steps))
    for other in moved:
        assert other[0] == 0
        assert list(other) == sorted(set(other))
        assert len(other) == len(computed)
        assert max(other) < steps
        assert len(set(other) - set(computed)) == 1
    assert computed not in moved
    assert len(set(moved)) == len(moved)


def test_neighbors_keep_the_first_step_of_each_expert():
    assert set(neighbors((0, 4, 5), 8, (0, 4))) == {(0, 2, 4), (0, 3, 4), (0, 4, 6), (0, 4, 7)}
    assert list(neighbors((0, 4), 8, (0, 4))) == []


# Dynamic programming over gaps.


def costs_of(steps: int, seed: int, first: int = 0) -> GapCosts:
    reach = np.random.default_rng(seed).uniform(0.2, 2.0, steps)
    return GapCosts(smooth_measurements(steps, seed).mean_gram, reach, first, FACTOR)


def all_schedules(first: int, steps: int, count: int, longest: int) -> list[tuple[int, ...]]:
    chosen = [(first, *rest) for rest in combinations(range(first + 1, steps), count - 1)]
    return [s for s in chosen if max(b - a for a, b in pairwise((*s, steps))) <= longest]


@relaxed
@given(steps=st.integers(1, 12), seed=seeds, first=st.integers(0, 3), longest=st.sampled_from([2, 4, LONGEST]))
def test_dynamic_programming_equals_brute_force_for_every_budget(steps, seed, first, longest):
    first = min(first, steps - 1)
    costs = costs_of(steps, seed, first)
    found = cheapest_schedules(costs, longest)
    for count in range(1, steps - first + 1):
        possible = all_schedules(first, steps, count, longest)
        assert (count in found) == bool(possible)
        if possible:
            assert found[count] in possible
            assert costs.total(found[count]) == pytest.approx(min(map(costs.total, possible)), rel=1e-9, abs=1e-15)


@relaxed
@given(steps=st.integers(2, 30), seed=seeds, last_gap=st.sampled_from([1.0, FACTOR]), data=st.data())
def test_the_cost_of_a_schedule_is_the_summed_error_of_real_tensors(steps, seed, last_gap, data):
    computed = sorted({0, *data.draw(st.lists(st.integers(0, steps - 1)))})
    vectors, reach = outputs(falling(steps), seed), np.random.default_rng(seed).uniform(0.2, 2.0, steps)
    gram = vectors @ vectors.T / WIDTH
    total = 0.0
    for index, (last, following) in enumerate(pairwise((*computed, steps))):
        anchors = computed[max(index - 1, 0) : index + 1]
        gap = np.zeros(WIDTH)
        for step in range(last + 1, following):
            weights = fit_output(anchors, step, gram).values
            gap += reach[step] * (vectors[step] - np.asarray(weights) @ vectors[anchors])
        total += mean_square(gap) * (last_gap if following == steps else 1.0)
    found = GapCosts(gram, reach, last_gap_factor=last_gap).total(computed)
    assert found == pytest.approx(total, rel=1e-9, abs=1e-10)


def test_nothing_held_costs_nothing():
    assert costs_of(20, 3).total(range(20)) == 0.0
    assert cheapest_schedules(costs_of(20, 3), LONGEST)[20] == tuple(range(20))


def test_a_gap_is_never_longer_than_allowed():
    found = cheapest_schedules(costs_of(50, 1), 8)
    assert min(found) == 7
    assert max(b - a for s in found.values() for a, b in pairwise((*s, 50))) <= 8


def test_impossible_budgets_are_left_out():
    assert min(cheapest_schedules(costs_of(50, 1), LONGEST)) == 5
    assert set(cheapest_schedules(costs_of(50, 1), LONGEST)) == set(range(5, 51))


# The frontier: the best schedule for every budget.


def search(steps, seed=0, ranges=None):
    return ScheduleSearch(ErrorModel(smooth_measurements(steps, seed), euler_response(falling(steps)), ranges))


@pytest.mark.parametrize("steps", [1, 2, 4, 13, 28, 50])
def test_the_frontier_has_every_budget_and_is_never_worse_than_a_fixed_schedule(steps):
    found = search(steps)
    assert list(found.frontier) == list(range(1, steps + 1))
    for count, candidate in found.frontier.items():
        assert len(candidate.computed) == count
        again = found.evaluate(candidate.computed, candidate.origin)
        assert (candidate.cost, candidate.error) == pytest.approx((again.cost, again.error))
        for name, schedule in fixed_schedules(steps, count):
            assert candidate.cost <= found.evaluate(schedule, name).cost
    assert (found.frontier[steps].cost, found.frontier[steps].error) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_more_computed_steps_never_cost_more(seed):
    costs = [candidate.cost for candidate in search(28, seed).frontier.values()]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("steps", [16, 28, 50])
def test_more_computed_steps_never_cost_more_on_rough_trajectories_either_while_a_fifth_is_held(steps):
    """Where all but a few steps are computed, two held errors may cancel that would not have done so alone."""
    noise = falling(steps)
    measurements = measurements_of(noise, [rough(noise, seed) for seed in range(4)])
    frontier = ScheduleSearch(ErrorModel(measurements, euler_response(noise))).frontier
    costs = [candidate.cost for count, candidate in frontier.items() if count <= 0.8 * steps]
    assert costs == sorted(costs, reverse=True)


def rough(noise, seed):
    """Six waves of one phase, the fast ones nearly as large as the slow."""
    sizes = np.array([3, 2, 1, 0.5, 0.3, 0.1])[:, None]
    waves = np.stack([np.cos(1.3 * k * np.pi * noise + 0.1 * k) for k in range(6)], axis=1)
    return waves @ (np.random.default_rng(seed).normal(size=(6, WIDTH)) * sizes)


def test_two_experts_share_the_budget_and_each_starts_computed():
    ranges = ((0, 7), (8, 19))
    found = search(20, ranges=ranges)
    assert list(found.frontier) == list(range(2, 21))
    for count, candidate in found.frontier.items():
        assert len(candidate.computed) == count
        assert {0, 8} <= set(candidate.computed)
        assert candidate.cost == pytest.approx(found.evaluate(candidate.computed, "").cost)
    for share in range(1, 8):
        first, second = search(20, ranges=ranges[:1]).frontier, search(20, ranges=ranges[1:]).frontier
        assert found.frontier[8].cost <= first[share].cost + second[8 - share].cost


def test_a_generation_that_starts_late_plans_the_steps_that_run():
    found = search(20, ranges=((6, 19),))
    assert list(found.frontier) == list(range(1, 15))
    assert all(candidate.computed[0] == 6 for candidate in found.frontier.values())
    computed = found.frontier[5].computed
    assert set(found.model.fit_weights(computed)) == set(range(6, 20)) - set(computed)


def test_every_budget_of_50_steps_has_weights_for_every_held_step():
    found = search(50)
    assert list(found.frontier) == list(range(1, 51))
    for candidate in found.frontier.values():
        assert set(found.model.fit_weights(candidate.computed)) == set(range(50)) - set(candidate.computed)


def test_quality_in_decibels():
    assert CandidateSchedule((0,), "", cost=0.5, error=0.01).psnr(3.0) == pytest.approx(23.0)
    assert CandidateSchedule((0,), "", cost=0.5, error=0.0).psnr(3.0) == math.inf


def test_errors_that_grow_move_computed_steps_to_where_the_errors_arise():
    measurements = smooth_measurements(30, 2)
    early = np.zeros((3, 31))
    early[:, 15:] = 6.0
    growing_errors = type(measurements)(measurements.noise, measurements.grams, early)
    plain, careful = (
        ScheduleSearch(ErrorModel(m, euler_response(measurements.noise))).frontier[9].computed
        for m in (measurements, growing_errors)
    )
    assert sum(step < 15 for step in careful) > sum(step < 15 for step in plain)


def test_first_steps_that_the_options_name_are_computed_in_every_schedule():
    model = search(20).model
    options = PlannerOptions(first_steps=3)
    found = ScheduleSearch(ErrorModel(model.measurements, model.response, model.ranges, options)).frontier
    assert all({0, 1, 2} <= set(found[count].computed) for count in range(4, 21))
    assert [len(found[count].computed) for count in found] == list(found)
