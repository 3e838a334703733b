"""Schedules that are known without measuring anything are valid, whatever is asked for."""

from __future__ import annotations

from itertools import pairwise

import pytest

from holdover.plan.schedules import growing, known, uniform


def assert_valid(schedule: tuple[int, ...], steps: int, count: int) -> None:
    assert len(schedule) == count
    assert schedule[0] == 0
    assert list(schedule) == sorted(set(schedule))
    assert schedule[-1] < steps


@pytest.mark.parametrize("steps", range(1, 61))
def test_every_known_schedule_is_valid(steps):
    for count in range(1, steps + 1):
        for _, schedule in known(steps, count):
            assert_valid(schedule, steps, count)
        for growth in (1.0, 3.0):
            assert_valid(growing(steps, count, growth), steps, count)


def test_every_step_computed_is_the_same_by_any_name():
    assert {schedule for _, schedule in known(17, 17)} == {tuple(range(17))}


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
def test_a_preset_at_its_own_size_is_itself(name, preset):
    assert dict(known(28, len(preset)))[name] == preset
