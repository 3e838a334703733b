"""Predictors: weights over the last computed steps, for any spacing of the steps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.predictors import Hold, Newton, newton_weights

relaxed = settings(deadline=None)
anchors = st.lists(st.integers(0, 60), min_size=1, max_size=8, unique=True).map(sorted)
nodes = st.lists(st.integers(0, 100), min_size=1, max_size=5, unique=True).map(lambda v: [x / 100 for x in v])
points = st.floats(-0.5, 1.5)


# Hold


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


# Newton


@relaxed
@given(nodes=nodes, point=points)
def test_weights_sum_to_one(nodes: list[float], point: float) -> None:
    weights = newton_weights(nodes, point)
    assert sum(weights) == pytest.approx(1.0, abs=1e-12 * (1 + sum(map(abs, weights))))


@relaxed
@given(nodes=nodes, point=points, values=st.lists(st.floats(-5, 5), min_size=5, max_size=5))
def test_exact_on_polynomials_of_their_order_for_any_spacing(
    nodes: list[float], point: float, values: list[float]
) -> None:
    polynomial = np.polynomial.Polynomial(values[: len(nodes)])
    weights = newton_weights(nodes, point)
    found = sum(w * polynomial(x) for w, x in zip(weights, nodes, strict=True))
    assert found == pytest.approx(polynomial(point), abs=1e-11 * (1 + sum(map(abs, weights))))


@relaxed
@given(nodes=nodes, index=st.integers(0, 4))
def test_at_a_node_its_own_value_stands(nodes: list[float], index: int) -> None:
    index %= len(nodes)
    assert newton_weights(nodes, nodes[index]) == tuple(float(i == index) for i in range(len(nodes)))


@relaxed
@given(
    depth=st.integers(1, 4),
    places=st.lists(st.integers(0, 1000), min_size=8, max_size=8, unique=True),
    data=st.data(),
)
def test_the_predictor_uses_its_depth_and_ignores_older_steps(
    depth: int, places: list[int], data: st.DataObject
) -> None:
    levels = tuple(sorted((p / 1000 for p in places), reverse=True))
    step = data.draw(st.integers(1, 7))
    anchors = sorted(data.draw(st.sets(st.integers(0, step - 1), min_size=1)))
    weights = Newton(depth, levels).weights(step, anchors)
    assert len(weights) == len(anchors)
    near = anchors[-depth:]
    assert weights[-len(near) :] == newton_weights([levels[a] for a in near], levels[step])
    assert not any(weights[: -len(near)])


def test_one_node_is_holding() -> None:
    assert Newton(1, (1.0, 0.5, 0.1)).weights(2, [0, 1]) == (0.0, 1.0)
    assert newton_weights([0.3], 9.0) == (1.0,)


def test_two_nodes_are_a_straight_line() -> None:
    assert newton_weights([1.0, 0.5], 0.25) == pytest.approx((-0.5, 1.5))
