"""The rules of EasyCache, SeaCache, the first-block cache, TaylorSeer and Spectrum, without a model."""

from __future__ import annotations

import math
from typing import Any

import pytest

from holdover.grid import Grid
from holdover.policies.base import NOTHING_HELD, schedule
from holdover.policies.easy_cache import EasyCachePolicy
from holdover.policies.first_block import FirstBlockPolicy
from holdover.policies.interval import IntervalPolicy
from holdover.policies.sea_cache import UNSCALED, SeaCachePolicy

GRID = Grid(12)


def trace(policy: Any, changes: list[float | None], first: int = 0) -> str:
    state = policy.start()
    decisions = (policy.decide(first + i, change, state) for i, change in enumerate(changes))
    return "".join("C" if decision.compute else "h" for decision in decisions)


def test_easy_cache_adds_up_what_it_expects_and_starts_again() -> None:
    assert trace(EasyCachePolicy(1.0, 3, GRID), [None, None, *[0.4] * 10]) == "CCChhChhChhC"
    assert trace(EasyCachePolicy(1.0, 0, GRID), [None, None, *[0.4] * 10]) == "CChhChhChhCC"
    assert trace(EasyCachePolicy(0.0, 0, GRID), [0.0] * 12) == "C" * 12


@pytest.mark.parametrize("unknown", [math.nan, math.inf])
def test_easy_cache_computes_where_the_expectation_is_no_number(unknown: float) -> None:
    """The input did not change between computed steps: the gain is infinite."""
    assert trace(EasyCachePolicy(1.0, 2, GRID), [None, None, 0.1, unknown, *[0.1] * 8]) == "CChChhhhhhhC"


def test_sea_cache_is_tea_cache_s_rule_with_a_limit() -> None:
    changes = [None, *[0.2] * 11]
    assert trace(SeaCachePolicy(0.5, UNSCALED, GRID), changes) == "ChhChhChhChC"
    assert trace(SeaCachePolicy(9.0, UNSCALED, GRID, max_held=2), changes) == "ChhChhChhChC"
    assert trace(SeaCachePolicy(9.0, UNSCALED, GRID, max_held=1), changes) == "ChChChChChCC"
    assert trace(SeaCachePolicy(9.0, UNSCALED, GRID, 4), changes) == "CCCChhhhhhhC"
    assert trace(SeaCachePolicy(3.0, UNSCALED, GRID), [None, 2.0, 2.0, *[0.0] * 9]) == "ChChhhhhhhhC"  # not clamped


def test_first_block_compares_and_does_not_add_up() -> None:
    assert trace(FirstBlockPolicy(0.5, 0, GRID), [None, 0.1, 0.4, 0.5, *[0.4] * 8]) == "ChhChhhhhhhh"
    assert trace(FirstBlockPolicy(0.5, 3, GRID), [None, *[0.1] * 11]) == "CCChhhhhhhhh"
    assert trace(FirstBlockPolicy(0.5, 0, GRID), [None, math.nan, *[0.1] * 10]) == "CChhhhhhhhhh"


def test_an_interval_counts_from_the_last_computed_step() -> None:
    policy = IntervalPolicy(2, 3, 0.0, GRID)
    state = policy.start()
    made = [policy.decide(step, None, state) for step in (0, 1, 2)]
    state.anchor = None  # the engine dropped what was held
    made += [policy.decide(step, None, state) for step in (3, 4, 5, 6)]
    assert "".join("C" if decision.compute else "h" for decision in made) == "CChChhC"
    assert made[3] is NOTHING_HELD


def test_an_interval_starts_at_the_first_step_that_runs() -> None:
    late = Grid(12, first=4)
    made = "".join("C" if decision.compute else "h" for decision in schedule(IntervalPolicy(2, 3, 0.0, late), late))
    assert made == "CChhChhC"


@pytest.mark.parametrize(
    "policy",
    [EasyCachePolicy(1.0, 0, GRID), SeaCachePolicy(1.0, UNSCALED, GRID), FirstBlockPolicy(1.0, 0, GRID)],
    ids=lambda policy: type(policy).__name__,
)
def test_nothing_is_held_where_nothing_is_stored(policy: Any) -> None:
    state = policy.start()
    for step in (0, 1, 2):
        policy.decide(step, 0.0, state)
    state.anchor = None
    assert policy.decide(3, 0.0, state) is NOTHING_HELD
    assert state.anchor == 3
