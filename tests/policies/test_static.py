"""Schedules that are given: every step, or those of a plan."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.grid import Grid
from holdover.policies.base import (
    ALWAYS,
    BETWEEN,
    FIRST,
    NOTHING_HELD,
    SCHEDULED,
    AlwaysCompute,
    Scheduled,
    schedule,
)

relaxed = settings(deadline=None)


@relaxed
@given(first=st.integers(0, 20), length=st.integers(1, 40), after=st.integers(0, 5), needs_signal=st.booleans())
def test_every_step_that_runs_is_computed(first: int, length: int, after: int, needs_signal: bool) -> None:
    grid = Grid(first + length + after, first=first, last=first + length - 1)
    decisions = schedule(AlwaysCompute(needs_signal), grid)
    assert decisions == [ALWAYS] * length
    assert all(decision.compute for decision in decisions)


@relaxed
@given(step=st.integers(0, 100), signal=st.none() | st.floats(allow_nan=False))
def test_the_anchor_is_the_step_just_computed(step: int, signal: float | None) -> None:
    policy = AlwaysCompute()
    state = policy.start()
    assert state.anchor is None
    policy.decide(step, signal, state)
    assert state.anchor == step


def test_a_signal_is_needed_only_where_it_is_measured() -> None:
    assert AlwaysCompute().needs_signal is False
    assert AlwaysCompute(needs_signal=True).needs_signal is True


def test_each_start_makes_a_new_state() -> None:
    policy = AlwaysCompute()
    first, second = policy.start(), policy.start()
    policy.decide(3, None, first)
    assert second.anchor is None


@relaxed
@given(first=st.integers(0, 5), length=st.integers(1, 40), data=st.data())
def test_a_schedule_is_kept_to_the_step(first: int, length: int, data: st.DataObject) -> None:
    grid = Grid(first + length, first=first)
    computed = frozenset({first, *data.draw(st.sets(st.integers(first, first + length - 1)))})
    decisions = schedule(Scheduled(computed), grid)
    assert {first + i for i, decision in enumerate(decisions) if decision.compute} == computed
    assert decisions[0] is FIRST
    assert set(decisions[1:]) <= {SCHEDULED, BETWEEN}


def test_a_scheduled_step_is_computed_where_nothing_is_held() -> None:
    """What was held does not fit any more: the engine has set the anchor to None."""
    policy = Scheduled(frozenset({0, 6}))
    state = policy.start()
    policy.decide(0, None, state)
    state.anchor = None
    assert policy.decide(3, None, state) is NOTHING_HELD
    assert state.anchor == 3
    assert policy.decide(4, None, state) is BETWEEN


def test_a_branch_that_begins_late_begins_computed() -> None:
    policy = Scheduled(frozenset({0, 6}))
    assert policy.decide(3, None, policy.start()) is NOTHING_HELD
