"""What is told from the outputs of a generation: the PSNR of its images, and that the weights are not the measured."""

from __future__ import annotations

import pickle
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

import holdover
from holdover.engine.signals import AsyncScalar
from holdover.metrics import each, psnr
from holdover.plan.estimate import FEWEST_PROMPTS, OutputMonitor, OutputTable, fit_estimate, rank_correlation
from holdover.plan.generation import euler_response
from holdover.profiles import Profile
from tiny.pipelines import PIPELINES, run

from .profiled import calibrated
from .trajectories import falling, mean_square, measurements_of, outputs
from .tuned import STEPS as PROMPTED_STEPS
from .tuned import generate, measured, pipeline

FLUX = "FluxPipeline"
STEPS = 24
PROMPTS = [f"{color} {thing}" for color in ("red", "green", "blue", "old") for thing in "abcdefghij"]


def profile():
    return calibrated(FLUX, STEPS, 2)


@pytest.fixture
def flux():
    tiny = PIPELINES[FLUX]
    return tiny, tiny.build()


def replace_weights(transformer):
    """Other weights, put in after the cache was enabled."""
    with torch.no_grad():
        for index, parameter in enumerate(transformer.parameters()):
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(index))


# Other weights than those that were measured.


def test_a_calibration_measures_the_usual_ratios():
    for one in (profile(), calibrated(FLUX)):  # of 24 steps and of 12
        usual, largest = one.facts.surprise
        assert 0 < usual <= largest


@pytest.mark.parametrize("budget", [4, 8, 12])
def test_nothing_is_said_of_the_measured_weights(flux, budget):
    tiny, pipe = flux
    with holdover.enable(pipe, "plan", profile=profile(), budget=budget) as cache:  # a warning would be an error
        for seed in (0, 1, 10, 11):
            run(pipe, **tiny.call(steps=STEPS, seed=seed))
            assert cache.stats().last.computed == {"cond": budget}


@pytest.mark.parametrize("name", [FLUX, "QwenImagePipeline"])
def test_other_weights_get_one_warning_and_the_same_schedule(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    with holdover.enable(pipe, "plan", profile=calibrated(name, STEPS), budget=8) as cache:
        replace_weights(pipe.transformer)
        with pytest.warns(holdover.HoldoverWarning, match="times less predictable") as warned:
            first = run(pipe, **tiny.call(steps=STEPS))
            second = run(pipe, **tiny.call(steps=STEPS))
        generations = cache.stats().generations
    assert len(warned) == 1
    assert torch.equal(first, second)
    assert all(count == 8 for generation in generations for count in generation.computed.values())


def watch(noise, vectors, computed, scale=1.0, looks_back=False, known=None):
    """A monitor that has observed a generation."""
    known = measurements_of(noise, [outputs(noise, seed) for seed in (1, 2)] if known is None else known)
    table = OutputTable(known, euler_response(noise)[-1], ((0, len(noise) - 1),))
    monitor = OutputMonitor(table, looks_back=looks_back)
    for step, vector in enumerate(vectors):
        monitor.observe(step, torch.from_numpy(vector * scale)[None], step in computed)
    return monitor


def test_the_ratio_is_one_at_most_on_a_measured_generation():
    noise = falling(20)
    monitor = watch(noise, outputs(noise, 1), range(0, 20, 3))
    assert len(monitor.ratios) == 5
    assert max(monitor.ratios) <= 1.0 + 1e-4
    assert monitor.mismatch(usual=1.0) is None


def test_the_size_of_the_outputs_does_not_matter():
    noise = falling(20)
    small, large = (watch(noise, outputs(noise, 1), range(0, 20, 3), scale) for scale in (0.01, 100.0))
    assert small.ratios == pytest.approx(large.ratios, rel=1e-3)


def test_outputs_without_any_order_are_of_another_model():
    noise = falling(20)
    monitor = watch(noise, np.random.default_rng(0).normal(size=(20, 40)), range(0, 20, 3))
    assert monitor.mismatch(usual=1.0) > 8
    assert monitor.mismatch(usual=1e6) is None


def test_a_number_on_the_cpu_is_ready_at_once():
    late = AsyncScalar(torch.tensor(2.5))
    assert late.ready
    assert late.read() == 2.5


# What is seen in a generation.


def test_where_interpolation_is_exact_the_error_in_hindsight_is_the_error():
    """Outputs of two modes follow from any two of them; held steps repeat the last computed output."""
    noise, computed = falling(20), range(0, 20, 3)
    exact = outputs(noise, 1, modes=2)
    held = np.stack([exact[step - step % 3] for step in range(20)])
    seen = np.exp(watch(noise, held, computed, looks_back=True, known=[exact]).features()[0])
    hindsight, forecasts = seen[0::2], seen[1::2]
    effect = euler_response(noise)[-1]
    assert hindsight == pytest.approx(
        [mean_square(effect[:b] @ (held - exact)[:b]) for b in computed[1:]], rel=1e-3, abs=1e-9
    )
    assert max(forecasts) < 1e-6 * max(hindsight)


def test_held_steps_are_watched_where_something_follows_from_them_only():
    noise, computed = falling(20), range(0, 20, 3)
    short, long = (watch(noise, outputs(noise, 1), computed, looks_back=looks).features() for looks in (False, True))
    assert (short.shape, long.shape) == ((1, 5), (1, 11))


# The regression.


def drawn(count, slopes, noise, seed=0):
    random = np.random.default_rng(seed)
    features = random.normal(size=(count, len(slopes)))
    return features, 40 + features @ slopes + random.normal(scale=noise, size=count)


def test_what_follows_from_the_features_is_found():
    slopes = np.array([3.0, -2.0, 0.5])
    found = fit_estimate("plan", *drawn(200, slopes, noise=0.5))
    assert found.coefficients == pytest.approx(slopes, abs=0.15)
    assert found.intercept == pytest.approx(40, abs=0.15)
    assert found.error == pytest.approx(0.5, abs=0.1)
    assert found.rank_correlation > 0.95
    assert (found.plan, found.prompts) == ("plan", 200)


def test_the_error_is_that_of_prompts_that_were_left_out():
    """With as many features as images anything can be fitted; left out, nothing is told."""
    features, psnr = drawn(FEWEST_PROMPTS, np.zeros(FEWEST_PROMPTS - 4), noise=5.0)
    found = fit_estimate("plan", features, psnr)
    fitted = found.intercept + features @ np.array(found.coefficients)
    assert np.sqrt(np.mean((fitted - psnr) ** 2)) < 0.5 * found.error
    assert found.rank_correlation < 0.5


def test_few_prompts_tell_nothing():
    features, psnr = drawn(FEWEST_PROMPTS - 1, np.ones(2), noise=0.1)
    assert fit_estimate("plan", features, psnr) is None


def test_ranks_correlate_as_in_scipy():
    random = np.random.default_rng(0)
    a, b = random.normal(size=(2, 50))
    assert rank_correlation(a, a + b) == pytest.approx(spearmanr(a, a + b)[0])
    assert rank_correlation(a, np.ones(50)) == 0


# On the model.


@cache
def tuned() -> holdover.TuningResult:
    sure = {"share": 0.5, "confidence": 0.9, "batch_size": 4, "progress": False}
    return holdover.tune(pipeline(), measured(), PROMPTS, "psnr>=40", **sure)


def with_correlation(correlation):
    """The tuned profile, as if its estimate ordered images so well."""
    (estimate,) = tuned().profile.facts.estimates
    return tuned().profile.with_facts(estimates=(replace(estimate, rank_correlation=correlation),))


def test_tuning_fits_an_estimate_that_the_profile_keeps(tmp_path):
    found = tuned()
    (estimate,) = found.profile.facts.estimates
    assert estimate.prompts == len(PROMPTS)
    assert estimate.error > 0
    assert "error of" in str(estimate)
    assert Profile.load(found.profile.save(tmp_path / "tuned.safetensors")) == found.profile


def test_the_psnr_of_an_image_is_told_and_nothing_else_changes():
    (estimate,) = tuned().profile.facts.estimates
    uncached, told, images = [], [], []
    for seed in range(6):
        uncached.append(generate(PROMPTS[seed], seed))
    for kept in (with_correlation(0.9), tuned().profile.with_facts(estimates=())):
        with holdover.enable(pipeline(), "plan", profile=kept, target="psnr>=40") as cache:
            images.append([generate(PROMPTS[seed], seed) for seed in range(6)])
            told.append([one.expected for one in cache.stats().generations])
            text = str(cache.stats().last)
    for with_estimate, without in zip(*images, strict=True):
        assert torch.equal(with_estimate, without)
    actual = [float(each(psnr, image, plain)) for image, plain in zip(images[0], uncached, strict=True)]
    errors = [one.psnr[0] - value for one, value in zip(told[0], actual, strict=True)]
    assert np.sqrt(np.mean(np.square(errors))) < 4 * estimate.error
    assert str(told[0][0]).startswith("expected PSNR ")
    assert all(not one.psnr and "holdover.tune" in one.reason for one in told[1])
    assert "expected PSNR" not in text


def test_each_image_of_a_batch_has_its_own():
    with holdover.enable(pipeline(), "plan", profile=with_correlation(0.9), target="psnr>=40") as cache:
        generate(PROMPTS[0], 5)
        generate(PROMPTS[1], 6)
        alone = [generation.expected.psnr[0] for generation in cache.stats().generations]
        noise = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        pipeline()(PROMPTS[:2], num_inference_steps=PROMPTED_STEPS, generator=noise, output_type="pt")
        last = cache.stats().last
        assert last.expected.psnr == pytest.approx(alone, abs=0.05)
        assert "expected PSNR" in str(last)
        assert pickle.loads(pickle.dumps(last)).expected == last.expected
        assert last.as_dict()["expected"]["psnr"] == last.expected.psnr


def test_a_poor_estimate_is_not_told():
    with holdover.enable(pipeline(), "plan", profile=with_correlation(0.6), target="psnr>=40") as cache:
        generate()
        expected = cache.stats().last.expected
    assert expected.psnr == ()
    assert "rank correlation 0.60" in str(expected)
    assert "too little" in expected.reason


def test_an_interrupted_generation_has_none():
    def stop(pipe, step, timestep, kwargs):
        pipe._interrupt = step == 4
        return kwargs

    with holdover.enable(pipeline(), "plan", profile=with_correlation(0.9), target="psnr>=40") as cache:
        pipeline()("red a", num_inference_steps=PROMPTED_STEPS, output_type="latent", callback_on_step_end=stop)
        generate()
        first, second = (generation.expected for generation in cache.stats().generations)
    assert "not run to its end" in first.reason
    assert second.psnr


def test_other_methods_have_none():
    with holdover.enable(pipeline(), "easy_cache") as cache:
        generate()
        assert cache.stats().last.expected is None
