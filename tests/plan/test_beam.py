"""The beam judges a schedule by a whole generation on paper, and finds what trying every schedule finds."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.beam import HARD, ORDINARY, SPARSE, Beam
from holdover.plan.kernel import Kernel
from holdover.plan.response import euler
from holdover.plan.rollout import Course
from holdover.plan.search import GAP

from .trajectories import falling, outputs, smooth_kernel

relaxed = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10**6)


def grown(steps: int, seed: int) -> Kernel:
    """Three generations whose errors grow, most at the start, each in its own way."""
    kernel, random = smooth_kernel(steps, seed), np.random.default_rng(seed)
    return Kernel(kernel.noise, kernel.grams, random.exponential(2.0 / steps, (3, steps + 1)).cumsum(axis=1))


def course_of(steps: int, seed: int) -> Course:
    return Course(grown(steps, seed), euler(falling(steps)))


def schedules(steps: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, steps - 1)).map(lambda chosen: (0, *sorted(chosen)))


def on_paper(course: Course, computed: tuple[int, ...], ranges) -> tuple[float, float]:
    """The cost and the error of nine in ten, from a walk through every step."""
    noise, growth = np.append(course.kernel.noise, 0.0), np.exp(course.kernel.grown)
    errors = course.errors(course.weights(computed, ranges))
    answered, more = np.zeros((2, len(errors)))
    for a, b in zip(computed, (*computed[1:], course.steps), strict=True):
        answered += (1 - noise[b] / noise[a]) ** 2 * errors[:, a]
        more += (growth[:, a] - growth[:, b]) * errors[:, a]
    mean = (errors[:, -1] + answered + ORDINARY * more).mean()
    hard = np.percentile(errors[:, -1] + answered + more, HARD)
    return float(np.sqrt(mean * hard)), float(hard)


@relaxed
@given(seed=seeds, data=st.data())
def test_a_schedule_costs_what_a_walk_through_every_step_says(seed, data):
    course, ranges = course_of(16, seed), ((0, 15),)
    computed = data.draw(schedules(16))
    costs, errors = Beam(course, ranges).judged([computed])
    assert (costs[0], errors[0]) == pytest.approx(on_paper(course, computed, ranges), rel=1e-3, abs=1e-9)


@relaxed
@given(seed=seeds, data=st.data())
def test_two_experts_are_walked_through_one_after_the_other(seed, data):
    course, ranges = course_of(16, seed), ((0, 6), (7, 15))
    computed = tuple(sorted({*data.draw(schedules(16)), 7}))
    costs, errors = Beam(course, ranges).judged([computed])
    assert (costs[0], errors[0]) == pytest.approx(on_paper(course, computed, ranges), rel=1e-3, abs=1e-9)


def test_schedules_are_judged_together_as_they_are_one_by_one():
    beam = Beam(course_of(20, 4), ((0, 19),))
    some = [(0, 1, 4, 9), (0,), (0, 5, 10, 15, 17), (0, 2, 7, 19), tuple(range(20))]
    together, alone = beam.judged(some), [beam.judged([one]) for one in some]
    assert together[0] == pytest.approx(np.concatenate([cost for cost, _ in alone]))
    assert together[1] == pytest.approx(np.concatenate([error for _, error in alone]))


@relaxed
@given(seed=seeds, steps=st.integers(1, 9))
def test_keeping_every_way_equals_brute_force_for_every_budget(seed, steps):
    beam = Beam(course_of(steps, seed), ((0, steps - 1),))
    found = beam.schedules(width=10**6)
    assert list(found) == list(range(1, steps + 1))
    for count, schedule in found.items():
        every = [(0, *rest) for rest in combinations(range(1, steps), count - 1)]
        assert beam.judged([schedule])[0][0] == pytest.approx(beam.judged(every)[0].min(), rel=1e-9, abs=1e-15)


@pytest.mark.parametrize("seed", range(6))
def test_a_few_ways_come_near_to_all_of_them(seed):
    beam = Beam(course_of(10, seed), ((0, 9),))
    near, best = beam.schedules(), beam.schedules(width=10**6)
    for count in range(2, 9):
        assert beam.judged([near[count]])[0][0] <= 1.3 * beam.judged([best[count]])[0][0]


def test_each_expert_begins_computed_and_every_budget_can_be_had():
    found = Beam(course_of(40, 1), ((4, 17), (20, 39))).schedules()
    assert list(found) == list(range(2, 35))
    for count, schedule in found.items():
        assert len(schedule) == count
        assert {4, 20} <= set(schedule) <= {*range(4, 18), *range(20, 40)}
        assert list(schedule) == sorted(schedule)


def test_only_sparse_schedules_have_wide_gaps():
    found = Beam(course_of(60, 2), ((0, 59),)).schedules()
    widest = {count: max(np.diff([*schedule, 60])) for count, schedule in found.items()}
    assert widest[2] > GAP
    assert all(np.diff([*s[SPARSE - 1 :], 60]).max() <= GAP for s in found.values() if len(s) >= SPARSE)


def test_nothing_held_costs_nothing():
    costs, errors = Beam(course_of(12, 3), ((0, 11),)).judged([tuple(range(12))])
    assert (costs[0], errors[0]) == (0.0, 0.0)


def test_a_generation_that_errors_hurt_more_counts_more():
    """Of two generations, errors of one grow a hundredfold on the way: steps are computed where that one needs them."""
    noise = falling(20)
    early, late = outputs(noise, 1).copy(), outputs(noise, 2).copy()
    early[8:], late[:12] = early[8], late[12]
    growth = np.zeros((2, 21))
    growth[0] = np.linspace(0, np.log(100), 21)
    grams = np.stack([v @ v.T for v in (early, late)])
    plain = Beam(Course(Kernel(noise, grams, np.zeros((2, 21))), euler(noise)), ((0, 19),)).schedules()[6]
    careful = Beam(Course(Kernel(noise, grams, growth), euler(noise)), ((0, 19),)).schedules()[6]
    assert sum(step < 9 for step in careful) > sum(step < 9 for step in plain)
