"""The frontier: for every budget a schedule that nothing known beats, in less than a second."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest

from holdover.plan.planner import Choice, Planner
from holdover.plan.response import euler
from holdover.plan.rollout import Course
from holdover.plan.schedules import known

from .trajectories import WIDTH, falling, kernel_of, smooth_kernel


def planner(steps, seed=0, ranges=None):
    course = Course(smooth_kernel(steps, seed), euler(falling(steps)))
    return Planner(course, ranges or ((0, steps - 1),))


@pytest.mark.parametrize("steps", [1, 2, 4, 13, 28, 50])
def test_the_frontier_has_every_budget_and_is_never_worse_than_what_is_known(steps):
    made = planner(steps)
    assert list(made.frontier) == list(range(1, steps + 1))
    for count, choice in made.frontier.items():
        assert len(choice.computed) == count
        again = made.judged(choice.computed, choice.origin)
        assert (choice.cost, choice.error) == pytest.approx((again.cost, again.error))
        for name, schedule in known(steps, count):
            assert choice.cost <= made.judged(schedule, name).cost
    assert (made.frontier[steps].cost, made.frontier[steps].error) == (0.0, 0.0)


@pytest.mark.parametrize("seed", range(5))
def test_more_computed_steps_never_cost_more(seed):
    costs = [choice.cost for choice in planner(28, seed).frontier.values()]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize("steps", [16, 28, 50])
def test_more_computed_steps_never_cost_more_on_rough_trajectories_either_while_a_fifth_is_held(steps):
    """Where all but a few steps are computed, two held errors may cancel that would not have done so alone."""
    noise = falling(steps)
    kernel = kernel_of(noise, [rough(noise, seed) for seed in range(4)])
    frontier = Planner(Course(kernel, euler(noise)), ((0, steps - 1),)).frontier
    costs = [choice.cost for count, choice in frontier.items() if count <= 0.8 * steps]
    assert costs == sorted(costs, reverse=True)


def rough(noise, seed):
    """Six waves of one phase, the fast ones nearly as large as the slow."""
    sizes = np.array([3, 2, 1, 0.5, 0.3, 0.1])[:, None]
    waves = np.stack([np.cos(1.3 * k * np.pi * noise + 0.1 * k) for k in range(6)], axis=1)
    return waves @ (np.random.default_rng(seed).normal(size=(6, WIDTH)) * sizes)


def test_two_experts_share_the_budget_and_each_begins_computed():
    ranges = ((0, 7), (8, 19))
    made = planner(20, ranges=ranges)
    assert list(made.frontier) == list(range(2, 21))
    for count, choice in made.frontier.items():
        assert len(choice.computed) == count
        assert {0, 8} <= set(choice.computed)
        assert choice.cost == pytest.approx(made.judged(choice.computed, "").cost)
    for share in range(1, 8):
        first, second = planner(20, ranges=ranges[:1]).frontier, planner(20, ranges=ranges[1:]).frontier
        assert made.frontier[8].cost <= first[share].cost + second[8 - share].cost


def test_a_generation_that_begins_late_plans_the_steps_that_run():
    made = planner(20, ranges=((6, 19),))
    assert list(made.frontier) == list(range(1, 15))
    assert all(choice.computed[0] == 6 for choice in made.frontier.values())
    assert set(made.weights(made.frontier[5].computed)) == set(range(6, 20)) - set(made.frontier[5].computed)


def test_all_budgets_of_50_steps_are_planned_in_a_second():
    made = planner(50)
    start = time.process_time()
    for choice in made.frontier.values():
        made.weights(choice.computed)
    assert time.process_time() - start < 1.0


def test_quality_in_decibels():
    assert Choice((0,), "", cost=0.5, error=0.01).psnr(3.0) == pytest.approx(23.0)
    assert Choice((0,), "", cost=0.5, error=0.0).psnr(3.0) == math.inf


def test_errors_that_grow_move_computed_steps_to_where_they_are_made():
    kernel = smooth_kernel(30, 2)
    early = np.zeros((3, 31))
    early[:, 15:] = 6.0
    grown = type(kernel)(kernel.noise, kernel.grams, early)
    plain = Planner(Course(kernel, euler(kernel.noise)), ((0, 29),)).frontier[9].computed
    careful = Planner(Course(grown, euler(kernel.noise)), ((0, 29),)).frontier[9].computed
    assert sum(step < 15 for step in careful) > sum(step < 15 for step in plain)


def test_alternatives_are_schedules_of_the_budget_and_begin_with_the_plan():
    made = planner(20, ranges=((0, 7), (8, 19)))
    found = made.alternatives(6)
    assert found[0] == made.frontier[6].computed
    assert len(set(found)) == len(found) > 1
    assert all(len(steps) == 6 and {0, 8} <= set(steps) for steps in found)
