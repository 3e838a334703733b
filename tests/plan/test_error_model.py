"""The simulated error of a plan is the error of real tensors, on the measured grid and on others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan import error_model
from holdover.plan.error_model import (
    DEFAULT_OPTIONS,
    DEPTH,
    EXPECTED_PERCENTILE,
    ErrorModel,
    Measurements,
    PlannerOptions,
    Ranges,
    Weights,
    interpolation_matrix,
)
from holdover.plan.generation import euler_response

from .trajectories import (
    WIDTH,
    branched_measurements,
    falling,
    mean_square,
    measurements_of,
    multistep,
    outputs,
    smooth_measurements,
)

relaxed = settings(deadline=None, max_examples=40)
few = settings(deadline=None, max_examples=12)
seeds = st.integers(0, 10**6)
grids = st.lists(st.integers(1, 1000), min_size=4, max_size=30, unique=True).map(
    lambda values: np.array(sorted(values, reverse=True)) / 1000
)

# Measurements on their own grid and on others.


@relaxed
@given(known=grids, data=st.data())
def test_interpolation_is_exact_on_cubics(known, data):
    lowest, highest = float(known[-1]), float(known[0])
    wanted = np.array(data.draw(st.lists(st.floats(lowest, highest), min_size=1, max_size=20)))
    cubic = np.polynomial.Polynomial([0.3, -1.0, 2.0, 0.7])
    moved = interpolation_matrix(known, wanted)
    slack = 1e-9 * np.abs(moved).sum(axis=1).max()
    assert moved @ cubic(known) == pytest.approx(cubic(wanted), abs=max(slack, 1e-9))


@relaxed
@given(known=grids)
def test_interpolation_to_the_same_grid_changes_nothing(known):
    assert interpolation_matrix(known, known) == pytest.approx(np.eye(len(known)), abs=1e-12)


def test_outside_the_known_range_the_nearest_value_is_used():
    known = np.array([0.9, 0.7, 0.4, 0.2])
    assert interpolation_matrix(known, np.array([1.0, 0.0])) == pytest.approx(np.eye(4)[[0, 3]])


def test_a_noise_level_that_occurs_twice_is_used_once():
    """Heun's grid has every level but the first twice."""
    known = np.array([1.0, 0.8, 0.8, 0.6, 0.6, 0.4, 0.4, 0.2])
    moved = interpolation_matrix(known, np.array([0.7, 0.5]))
    assert np.isfinite(moved).all()
    assert moved @ known == pytest.approx([0.7, 0.5])


def test_the_same_grid_gives_the_same_measurements():
    measurements = smooth_measurements(12, 3)
    assert measurements.at(measurements.noise.copy()) is measurements


@pytest.mark.parametrize("steps", [20, 28, 70])
def test_on_another_grid_the_inner_products_are_those_measured_there(steps):
    fine, other = falling(50), falling(steps)
    moved = measurements_of(fine, [outputs(fine, 4, modes=4)]).at(other)
    native = measurements_of(other, [outputs(other, 4, modes=4)])
    inside = other >= fine[-1]
    difference = (moved.grams - native.grams)[0][np.ix_(inside, inside)]
    assert np.abs(difference).max() < 1e-4 * np.abs(native.grams).max()
    assert moved.growth.shape == (1, steps + 1)


def test_growth_is_interpolated_in_the_noise_level():
    noise = falling(10)
    level = np.append(noise, 0.0)
    growth = np.stack([3 * (1 - level), 5 * (1 - level)])
    moved = Measurements(noise, smooth_measurements(10, 0).grams[:2], growth).at(falling(25))
    expected = 1 - np.append(falling(25), 0.0)
    assert moved.growth == pytest.approx(np.stack([3 * expected, 5 * expected]))


@relaxed
@given(seed=seeds, steps=st.integers(1, 30), count=st.integers(1, 6))
def test_errors_never_shrink_and_early_ones_grow_at_least_as_much_as_late_ones(seed, steps, count):
    growth = np.random.default_rng(seed).normal(size=(count, steps + 1)).cumsum(axis=1)
    factors = Measurements(falling(steps), np.ones((count, steps, steps)), growth).amplification(75.0)
    assert (factors >= 1).all()
    assert (np.diff(factors) <= 0).all()


def test_no_percentile_means_that_errors_do_not_grow():
    growth = np.random.default_rng(0).normal(size=(4, 3))
    assert (Measurements(falling(2), np.ones((4, 2, 2)), growth).amplification(None) == 1.0).all()


def test_amplification_is_what_three_generations_in_four_stay_below():
    growth = np.zeros((4, 3))
    growth[:, 2] = np.log([1.0, 4.0, 16.0, 64.0])
    factors = Measurements(falling(2), np.ones((4, 2, 2)), growth).amplification(75.0)
    assert factors == pytest.approx(np.exp(0.5 * np.percentile(growth[:, 2], 75)))


def test_squared_norms_are_those_of_real_vectors():
    noise = falling(9)
    generations = [outputs(noise, seed) for seed in (1, 2)]
    vector = np.random.default_rng(0).normal(size=9)
    lengths = [mean_square(vector @ v) for v in generations]
    assert measurements_of(noise, generations).squared_norm(vector) == pytest.approx(lengths)
    assert generations[0].shape[1] == WIDTH


# A simulated generation with held steps.


def outputs_with(vectors, table):
    """The outputs of a generation with the held steps of a table of weights."""
    made = np.zeros_like(vectors)
    for step in range(len(vectors)):
        held = table.get(step)
        made[step] = vectors[step] if held is None else np.asarray(held.values) @ made[list(held.anchors)]
    return made


def latents_with(vectors, response, table):
    """The latents of that generation; the initial latent is zero."""
    return response @ outputs_with(vectors, table)


@pytest.mark.parametrize("grid", ["euler", "multistep"])
@settings(deadline=None, max_examples=10)
@given(seed=seeds, data=st.data())
def test_simulated_errors_are_those_of_a_real_rollout(grid, seed, data):
    noise, response = (falling(14), euler_response(falling(14))) if grid == "euler" else multistep(14)
    computed = {0, *data.draw(st.sets(st.integers(0, 13), max_size=7))}
    generations = [outputs(noise, seed + i) for i in range(3)]
    model = ErrorModel(measurements_of(noise, generations), response)
    table = model.fit_weights(computed)
    assert set(table) == set(range(14)) - computed
    for errors, vectors in zip(model.latent_errors(table), generations, strict=True):
        difference = latents_with(vectors, response, table) - response @ vectors
        assert errors == pytest.approx([mean_square(row) for row in difference], rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("grid", ["euler", "multistep"])
def test_each_held_step_steers_back_as_well_as_it_can(grid):
    """No other weights bring the next latent closer to the uncached one, less what is left to the model."""
    noise, response = (falling(14), euler_response(falling(14))) if grid == "euler" else multistep(14)
    vectors = outputs(noise, 7)
    table = ErrorModel(measurements_of(noise, [vectors]), response).fit_weights({0, 2, 5, 9})
    random = np.random.default_rng(0)
    for step, held in table.items():
        before = {s: w for s, w in table.items() if s < step}
        visible = slice(0, held.anchors[-1])  # to the last computed step
        errors = (outputs_with(vectors, table) - vectors)[visible]
        left = (1 - DEFAULT_OPTIONS.corrected_share) * response[step + 1, visible] @ errors
        target = response[step + 1] @ vectors + left

        def missed(weights, before=before, step=step, target=target):
            return mean_square(latents_with(vectors, response, {**before, step: weights})[step + 1] - target)

        for size in (1e-3, 1e-1):
            values = np.asarray(held.values) + size * random.normal(size=len(held.values))
            assert missed(held) <= missed(Weights(held.anchors, tuple(values))) + 1e-9


def test_errors_visible_to_a_computed_step_are_corrected_in_part():
    """Step 3 is the first held step after a computed one: it alone can correct the error of step 1."""
    vectors, response = outputs(falling(14), 7), euler_response(falling(14))
    measurements = measurements_of(falling(14), [vectors])

    def missed(options: PlannerOptions) -> np.ndarray:
        table = ErrorModel(measurements, response, options=options).fit_weights({0, 2})
        return (latents_with(vectors, response, table) - response @ vectors)[4]

    assert mean_square(missed(PlannerOptions(corrected_share=1.0))) < mean_square(missed(DEFAULT_OPTIONS))
    assert 0.0 < DEFAULT_OPTIONS.corrected_share < 1.0


def test_held_steps_are_predicted_from_the_last_computed_steps_of_their_own_range():
    model = ErrorModel(smooth_measurements(12, 1), euler_response(falling(12)), ((0, 5), (6, 11)))
    table = model.fit_weights({0, 1, 2, 3, 4, 6, 9})
    assert {step: weights.anchors for step, weights in table.items()} == {
        5: (1, 2, 3, 4),
        7: (6,),
        8: (6,),
        10: (6, 9),
        11: (6, 9),
    }
    assert DEPTH == 4


def test_nothing_held_has_no_error():
    assert not ErrorModel(smooth_measurements(12, 1), euler_response(falling(12))).latent_errors({}).any()


# Several branches.

GUIDED = (3.0, -2.0)


def two_branches(noise, seed):
    """Outputs of a conditional and an unconditional branch, which have much in common."""
    common = outputs(noise, seed)
    return [common + 0.3 * outputs(noise, seed + 1), common + 0.3 * outputs(noise, seed + 2)]


def merged(model: ErrorModel) -> ErrorModel:
    """The error model with the branches of a step merged: one set of weights for all of them."""
    return ErrorModel(model.measurements.merged, model.response, model.ranges)


def guided_latents(branches, response, table, shares=GUIDED):
    """The latents of a generation in which each branch has its own weights, mixed for the scheduler."""
    mixed = 0.0
    for index, (vectors, share) in enumerate(zip(branches, shares, strict=True)):
        made = np.zeros_like(vectors)
        for step in range(len(vectors)):
            held = table.get(step)
            made[step] = vectors[step] if held is None else np.asarray(held.of(index)) @ made[list(held.anchors)]
        mixed = mixed + np.reshape(share, (-1, 1)) * made
    return response @ mixed


@settings(deadline=None, max_examples=10)
@given(seed=seeds, data=st.data())
def test_simulated_errors_are_those_of_a_real_rollout_of_several_branches(seed, data):
    noise, response = falling(14), euler_response(falling(14))
    computed = {0, *data.draw(st.sets(st.integers(0, 13), max_size=7))}
    generations = [two_branches(noise, seed + 10 * i) for i in range(3)]
    model = ErrorModel(branched_measurements(noise, generations, GUIDED), response)
    table = model.fit_weights(computed)
    for errors, branches in zip(model.latent_errors(table), generations, strict=True):
        uncached = response @ (GUIDED[0] * branches[0] + GUIDED[1] * branches[1])
        difference = guided_latents(branches, response, table) - uncached
        assert errors == pytest.approx([mean_square(row) for row in difference], rel=1e-9, abs=1e-9)


def test_a_mix_that_changes_from_step_to_step_is_simulated_and_fitted_with_the_mix_of_the_held_step():
    noise, response = falling(14), euler_response(falling(14))
    scales = 1 + 6 * np.random.default_rng(0).random(14)
    shares, generations = np.stack([scales, 1 - scales]), [two_branches(noise, 10 * i) for i in range(3)]
    by_branch = branched_measurements(noise, generations, tuple(shares.flatten().tolist()))
    model = ErrorModel(replace(by_branch, tied=True), response)
    table, as_given = model.fit_weights({0, 1, 4, 8, 11}), by_branch.outputs @ by_branch.grams @ by_branch.outputs.T
    assert {len(weights.values) for weights in table.values()} == {2, 3, 4}
    for errors, branches in zip(model.latent_errors(table), generations, strict=True):
        uncached = response @ sum(share[:, None] * made for share, made in zip(shares, branches, strict=True))
        difference = guided_latents(branches, response, table, shares) - uncached
        assert errors == pytest.approx([mean_square(row) for row in difference], rel=1e-9, abs=1e-9)
    unaware = ErrorModel(Measurements(noise, as_given, by_branch.growth), response).fit_weights({0, 1, 4, 8, 11})
    assert model.latent_errors(table)[:, -1].mean() < 0.5 * model.latent_errors(unaware)[:, -1].mean()


def test_branches_with_weights_of_their_own_have_a_smaller_error():
    noise, response = falling(20), euler_response(falling(20))
    generations = [two_branches(noise, 10 * i) for i in range(4)]
    model = ErrorModel(branched_measurements(noise, generations, GUIDED), response)
    computed = {0, 1, 3, 7, 12}
    own, shared = model.fit_weights(computed), merged(model).fit_weights(computed)
    assert {len(w.values) for w in own.values()} == {4, 6, 8}
    assert {len(w.values) for w in shared.values()} == {2, 3, 4}
    assert model.latent_errors(own)[:, -1].mean() < model.latent_errors(shared)[:, -1].mean()


def test_shared_weights_have_the_same_error_with_separate_and_with_merged_branches():
    noise, response = falling(14), euler_response(falling(14))
    model = ErrorModel(branched_measurements(noise, [two_branches(noise, 4)], GUIDED), response)
    table = merged(model).fit_weights({0, 2, 5, 9})
    assert model.latent_errors(table) == pytest.approx(merged(model).latent_errors(table), rel=1e-9)


# The expected error of a schedule.


def growing_errors(steps: int, seed: int, ranges: Ranges | None = None) -> ErrorModel:
    """Three generations whose errors grow, each in its own way."""
    measurements, random = smooth_measurements(steps, seed), np.random.default_rng(seed)
    growth = random.exponential(2.0 / steps, (3, steps + 1)).cumsum(axis=1)
    grown = Measurements(measurements.noise, measurements.grams, growth)
    return ErrorModel(grown, euler_response(falling(steps)), ranges)


def schedules(steps: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.sets(st.integers(1, steps - 1)).map(lambda chosen: (0, *sorted(chosen)))


def expected_step_by_step(model: ErrorModel, computed: tuple[int, ...]) -> float:
    """The expected error from the weights of every held step and the errors they leave."""
    noise, growth = np.append(model.measurements.noise, 0.0), np.exp(model.measurements.growth_to_end)
    errors = model.latent_errors(model.fit_weights(computed))
    total = errors[:, -1].copy()
    for a, b in zip(computed, (*computed[1:], model.steps), strict=True):
        total += ((1 - noise[b] / noise[a]) ** 2 + growth[:, a] - growth[:, b]) * errors[:, a]
    return float(np.percentile(total, EXPECTED_PERCENTILE))


def assert_expected(model: ErrorModel, computed: tuple[int, ...]) -> None:
    """The expected error corrects a gap at once, `fit_weights` step by step: only the effect of the ridge, which the
    latter applies more often, may differ.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(error_model, "RIDGE", 1e-10)
        expected = model.expected_errors([computed])
        assert expected == pytest.approx([expected_step_by_step(model, computed)], rel=1e-4, abs=1e-9)


@few
@given(seed=seeds, data=st.data())
def test_the_expected_error_is_that_of_a_simulation_step_by_step(seed, data):
    assert_expected(growing_errors(16, seed), data.draw(schedules(16)))


@few
@given(seed=seeds, data=st.data())
def test_two_experts_are_simulated_one_after_the_other(seed, data):
    computed = tuple(sorted({*data.draw(schedules(16)), 7}))
    assert_expected(growing_errors(16, seed, ((0, 6), (7, 15))), computed)


def test_schedules_are_simulated_together_as_they_are_one_by_one():
    model = growing_errors(20, 4)
    some = [(0, 1, 4, 9), (0,), (0, 5, 10, 15, 17), (0, 2, 7, 19), tuple(range(20))]
    alone = np.concatenate([model.expected_errors([one]) for one in some])
    assert model.expected_errors(some) == pytest.approx(alone)


def test_nothing_held_is_expected_to_leave_no_error():
    assert growing_errors(12, 3).expected_errors([tuple(range(12))]) == [0.0]


def test_errors_that_grow_are_expected_to_be_larger():
    model = growing_errors(20, 5)
    constant = Measurements(model.measurements.noise, model.measurements.grams, np.zeros((3, 21)))
    held = [(0, 4, 9, 14)]
    assert model.expected_errors(held) > ErrorModel(constant, model.response).expected_errors(held)
