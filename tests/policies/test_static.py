"""The policy that computes every step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.grid import Grid
from holdover.policies.base import schedule
from holdover.policies.static import ASKED, AlwaysCompute

relaxed = settings(deadline=None)


@relaxed
@given(first=st.integers(0, 20), length=st.integers(1, 40), after=st.integers(0, 5), needs_signal=st.booleans())
def test_every_step_that_runs_is_computed(first: int, length: int, after: int, needs_signal: bool) -> None:
    grid = Grid(first + length + after, first=first, last=first + length - 1)
    decisions = schedule(AlwaysCompute(needs_signal), grid)
    assert decisions == [ASKED] * length
    assert all(decision.compute for decision in decisions)


@relaxed
@given(step=st.integers(0, 100), signal=st.none() | st.floats(allow_nan=False))
def test_the_anchor_is_the_step_just_computed(step: int, signal: float | None) -> None:
    policy = AlwaysCompute()
    state = policy.start()
    assert state.anchor is None
    policy.decide(step, signal, state)
    assert state.anchor == step


def test_the_signal_is_asked_for_only_by_those_who_measure_it() -> None:
    assert AlwaysCompute().needs_signal is False
    assert AlwaysCompute(needs_signal=True).needs_signal is True


def test_states_are_made_anew() -> None:
    policy = AlwaysCompute()
    first, second = policy.start(), policy.start()
    policy.decide(3, None, first)
    assert second.anchor is None
