"""Measured inner products, on their own grid and on others."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.kernel import Kernel, interpolation

from .trajectories import WIDTH, falling, kernel_of, mean_square, outputs, smooth_kernel

relaxed = settings(deadline=None, max_examples=40)
grids = st.lists(st.integers(1, 1000), min_size=4, max_size=30, unique=True).map(
    lambda values: np.array(sorted(values, reverse=True)) / 1000
)


@relaxed
@given(known=grids, data=st.data())
def test_interpolation_is_exact_on_cubics(known, data):
    lowest, highest = float(known[-1]), float(known[0])
    wanted = np.array(data.draw(st.lists(st.floats(lowest, highest), min_size=1, max_size=20)))
    cubic = np.polynomial.Polynomial([0.3, -1.0, 2.0, 0.7])
    moved = interpolation(known, wanted)
    slack = 1e-9 * np.abs(moved).sum(axis=1).max()
    assert moved @ cubic(known) == pytest.approx(cubic(wanted), abs=max(slack, 1e-9))


@relaxed
@given(known=grids)
def test_interpolation_to_the_same_grid_changes_nothing(known):
    assert interpolation(known, known) == pytest.approx(np.eye(len(known)), abs=1e-12)


def test_outside_the_known_range_the_nearest_value_stands():
    known = np.array([0.9, 0.7, 0.4, 0.2])
    assert interpolation(known, np.array([1.0, 0.0])) == pytest.approx(np.eye(4)[[0, 3]])


def test_a_noise_level_that_comes_twice_is_taken_once():
    """Heun's grid names every level but the first twice."""
    known = np.array([1.0, 0.8, 0.8, 0.6, 0.6, 0.4, 0.4, 0.2])
    moved = interpolation(known, np.array([0.7, 0.5]))
    assert np.isfinite(moved).all()
    assert moved @ known == pytest.approx([0.7, 0.5])


def test_the_same_grid_gives_the_same_kernel():
    kernel = smooth_kernel(12, 3)
    assert kernel.on(kernel.noise.copy()) is kernel


@pytest.mark.parametrize("steps", [20, 28, 70])
def test_on_another_grid_the_inner_products_are_those_measured_there(steps):
    fine, other = falling(50), falling(steps)
    moved = kernel_of(fine, [outputs(fine, 4, modes=4)]).on(other)
    native = kernel_of(other, [outputs(other, 4, modes=4)])
    inside = other >= fine[-1]
    apart = (moved.grams - native.grams)[0][np.ix_(inside, inside)]
    assert np.abs(apart).max() < 1e-4 * np.abs(native.grams).max()
    assert moved.growth.shape == (1, steps + 1)


def test_growth_is_moved_with_the_noise():
    noise = falling(10)
    level = np.append(noise, 0.0)
    kernel = Kernel(noise, smooth_kernel(10, 0).grams[:2], np.stack([3 * (1 - level), 5 * (1 - level)]))
    moved = kernel.on(falling(25))
    expected = 1 - np.append(falling(25), 0.0)
    assert moved.growth == pytest.approx(np.stack([3 * expected, 5 * expected]))


@relaxed
@given(seed=st.integers(0, 10**6), steps=st.integers(1, 30), count=st.integers(1, 6))
def test_errors_never_shrink_and_early_ones_grow_at_least_as_much_as_late_ones(seed, steps, count):
    growth = np.random.default_rng(seed).normal(size=(count, steps + 1)).cumsum(axis=1)
    factors = Kernel(falling(steps), np.ones((count, steps, steps)), growth).amplification()
    assert (factors >= 1).all()
    assert (np.diff(factors) <= 0).all()


def test_amplification_is_what_three_generations_in_four_stay_below():
    growth = np.zeros((4, 3))
    growth[:, 2] = np.log([1.0, 4.0, 16.0, 64.0])
    factors = Kernel(falling(2), np.ones((4, 2, 2)), growth).amplification()
    assert factors == pytest.approx(np.exp(0.5 * np.percentile(growth[:, 2], 75)))


def test_squared_lengths_are_those_of_real_vectors():
    noise = falling(9)
    generations = [outputs(noise, seed) for seed in (1, 2)]
    vector = np.random.default_rng(0).normal(size=9)
    lengths = [mean_square(vector @ v) for v in generations]
    assert kernel_of(noise, generations).squared(vector) == pytest.approx(lengths)
    assert generations[0].shape[1] == WIDTH
