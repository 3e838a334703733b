"""Predictors: weights over the last computed steps."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.predictors.linear import Hold

relaxed = settings(deadline=None)
anchors = st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True).map(sorted)


@relaxed
@given(anchors=anchors, ahead=st.integers(1, 20))
def test_hold_gives_one_weight_for_each_computed_step(anchors: list[int], ahead: int) -> None:
    assert len(Hold().weights(anchors[-1] + ahead, anchors)) == len(anchors)


@relaxed
@given(anchors=anchors, ahead=st.integers(1, 20), values=st.lists(st.floats(-9, 9), min_size=8, max_size=8))
def test_hold_predicts_the_last_computed_value(anchors: list[int], ahead: int, values: list[float]) -> None:
    weights = Hold().weights(anchors[-1] + ahead, anchors)
    held = values[: len(anchors)]
    assert sum(w * v for w, v in zip(weights, held, strict=True)) == held[-1]


@relaxed
@given(anchors=anchors, ahead=st.integers(1, 20))
def test_hold_is_exact_on_what_does_not_change(anchors: list[int], ahead: int) -> None:
    assert sum(Hold().weights(anchors[-1] + ahead, anchors)) == 1.0


@pytest.mark.parametrize("step", [1, 2, 30])
def test_hold_does_not_look_how_far_ahead(step: int) -> None:
    assert Hold().weights(step, [0]) == (1.0,)


def test_hold_remembers_one_step() -> None:
    assert Hold.depth == Hold().depth == 1
