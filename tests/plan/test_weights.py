"""Least-squares weights over outputs of which only inner products are known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.error_model import Weights, fit_output, least_squares, prediction_error, solve_ridge

from .trajectories import WIDTH, falling, mean_square, outputs, smooth_measurements

relaxed = settings(deadline=None, max_examples=30)
seeds = st.integers(0, 10**6)


def error_of(weights: Weights, step: int, gram: np.ndarray) -> float:
    """The mean squared error of a prediction."""
    error = prediction_error(weights, step, len(gram))
    return float(error @ gram @ error)


@relaxed
@given(steps=st.integers(3, 40), seed=seeds, data=st.data())
def test_the_error_from_inner_products_is_the_error_of_real_tensors(steps, seed, data):
    step = data.draw(st.integers(1, steps - 1))
    anchors = sorted(data.draw(st.sets(st.integers(0, step - 1), min_size=1, max_size=4)))
    values = data.draw(st.lists(st.floats(-3, 3), min_size=len(anchors), max_size=len(anchors)))
    vectors = outputs(falling(steps), seed)
    wrong = vectors[step] - np.asarray(values) @ vectors[anchors]
    found = error_of(Weights(tuple(anchors), tuple(values)), step, vectors @ vectors.T / WIDTH)
    assert found == pytest.approx(mean_square(wrong), rel=1e-9, abs=1e-9)


@relaxed
@given(steps=st.integers(6, 40), seed=seeds, data=st.data())
def test_no_other_weights_predict_better(steps, seed, data):
    step = data.draw(st.integers(2, steps - 1))
    anchors = sorted(data.draw(st.sets(st.integers(0, step - 1), min_size=1, max_size=4)))
    gram = smooth_measurements(steps, seed).mean_gram
    best = fit_output(anchors, step, gram)
    error = error_of(best, step, gram)
    random = np.random.default_rng(seed)
    slack = 1e-6 * gram[step, step]  # the effect of the ridge
    for size in (1e-3, 1e-1, 1.0):
        other = np.asarray(best.values) + size * random.normal(size=len(anchors))
        assert error <= error_of(Weights(best.anchors, tuple(other)), step, gram) + slack


def test_least_squares_finds_the_weights_that_made_the_target():
    gram = smooth_measurements(12, 5).mean_gram
    features = np.eye(12)[[0, 4, 9]]
    found = least_squares(features, np.array([0.5, -0.25, 2.0]) @ features, gram)
    assert found == pytest.approx([0.5, -0.25, 2.0], abs=1e-3)


def test_branches_are_tied_together():
    """However different the branches are, a strong tie gives them nearly the same weights."""
    normal = np.diag([4.0, 3.0, 2.0, 1.0])
    known = np.array([4.0, 0.0, 0.0, 1.0])
    loose, tied = solve_ridge(normal, known, branches=2, tie=0.0), solve_ridge(normal, known, branches=2, tie=1e6)
    assert loose == pytest.approx([1.0, 0.0, 0.0, 1.0], abs=1e-6)
    assert tied[:2] == pytest.approx(tied[2:], abs=1e-5)
