"""What a schedule is expected to lose is reckoned from a whole generation on paper."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan import paper, rollout
from holdover.plan.kernel import Kernel
from holdover.plan.paper import EXPECTED, Paper
from holdover.plan.response import euler
from holdover.plan.rollout import Course, Ranges

from .trajectories import falling, smooth_kernel

relaxed = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10**6)


def course_of(steps: int, seed: int) -> Course:
    """Three generations whose errors grow, each in its own way."""
    kernel, random = smooth_kernel(steps, seed), np.random.default_rng(seed)
    growth = random.exponential(2.0 / steps, (3, steps + 1)).cumsum(axis=1)
    return Course(Kernel(kernel.noise, kernel.grams, growth), euler(falling(steps)))


def schedules(steps: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, steps - 1)).map(lambda chosen: (0, *sorted(chosen)))


def step_by_step(course: Course, computed: tuple[int, ...], ranges: Ranges) -> float:
    """The same from the weights of every held step and the errors they leave."""
    noise, growth = np.append(course.kernel.noise, 0.0), np.exp(course.kernel.grown)
    errors = course.errors(course.weights(computed, ranges))
    total = errors[:, -1].copy()
    for a, b in zip(computed, (*computed[1:], course.steps), strict=True):
        total += ((1 - noise[b] / noise[a]) ** 2 + growth[:, a] - growth[:, b]) * errors[:, a]
    return float(np.percentile(total, EXPECTED))


def assert_walked(course: Course, computed: tuple[int, ...], ranges: Ranges) -> None:
    """On paper a gap is made good at once, in a generation step by step: the ridge, which then counts more often, is
    all that tells the two apart.
    """
    with pytest.MonkeyPatch.context() as patch:
        for module in (paper, rollout):
            patch.setattr(module, "RIDGE", 1e-10)
        expected = Paper(course, ranges).expected([computed])
        assert expected == pytest.approx([step_by_step(course, computed, ranges)], rel=1e-4, abs=1e-9)


@relaxed
@given(seed=seeds, data=st.data())
def test_a_schedule_loses_what_a_walk_through_every_step_says(seed, data):
    course, ranges = course_of(16, seed), ((0, 15),)
    computed = data.draw(schedules(16))
    assert_walked(course, computed, ranges)


@relaxed
@given(seed=seeds, data=st.data())
def test_two_experts_are_walked_through_one_after_the_other(seed, data):
    course, ranges = course_of(16, seed), ((0, 6), (7, 15))
    computed = tuple(sorted({*data.draw(schedules(16)), 7}))
    assert_walked(course, computed, ranges)


def test_schedules_are_judged_together_as_they_are_one_by_one():
    judge = Paper(course_of(20, 4), ((0, 19),))
    some = [(0, 1, 4, 9), (0,), (0, 5, 10, 15, 17), (0, 2, 7, 19), tuple(range(20))]
    alone = np.concatenate([judge.expected([one]) for one in some])
    assert judge.expected(some) == pytest.approx(alone)


def test_nothing_held_loses_nothing():
    assert Paper(course_of(12, 3), ((0, 11),)).expected([tuple(range(12))]) == [0.0]


def test_errors_that_grow_lose_more():
    course = course_of(20, 5)
    plain = Course(Kernel(course.kernel.noise, course.kernel.grams, np.zeros((3, 21))), course.response)
    held = [(0, 4, 9, 14)]
    assert Paper(course, ((0, 19),)).expected(held) > Paper(plain, ((0, 19),)).expected(held)
