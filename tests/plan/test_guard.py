"""The guard: silent on generations like those measured, alarmed on another model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdover
from holdover.engine.signals import AsyncScalar
from holdover.plan.method import Guard
from tiny.pipelines import PIPELINES, run

from .profiled import calibrated
from .trajectories import WIDTH, falling, measurements_of, outputs

FLUX = "FluxPipeline"
STEPS = 24
COUNT = 2


def profile():
    return calibrated(FLUX, STEPS, COUNT)


@pytest.fixture
def flux():
    tiny = PIPELINES[FLUX]
    return tiny, tiny.build()


def replace_weights(transformer):
    """Other weights, put in after the cache was enabled."""
    with torch.no_grad():
        for index, parameter in enumerate(transformer.parameters()):
            parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(index))


def test_a_calibration_of_enough_steps_measures_the_usual_ratios():
    usual, largest = profile().facts.surprise
    assert 0 < usual <= largest


@pytest.mark.parametrize("budget", [4, 6, 8, 12])
def test_nothing_is_added_on_the_generations_of_the_calibration(flux, budget):
    tiny, pipe = flux
    with holdover.enable(pipe, "plan", profile=profile(), budget=budget) as cache:
        for seed in range(COUNT):
            run(pipe, **tiny.call(steps=STEPS, seed=seed))
            assert cache.stats().last.computed == {"cond": budget}


def test_nothing_is_added_on_prompts_like_those_of_the_calibration(flux):
    tiny, pipe = flux
    with holdover.enable(pipe, "plan", profile=profile(), budget=8) as cache:
        for seed in range(10, 16):
            run(pipe, **tiny.call(steps=STEPS, seed=seed))
        assert {g.computed["cond"] for g in cache.stats().generations} == {8}


@pytest.mark.parametrize("budget", [8, 12])
def test_other_weights_get_more_steps_but_a_quarter_at_most_and_one_warning(flux, budget):
    tiny, pipe = flux
    with holdover.enable(pipe, "plan", profile=profile(), budget=budget) as cache:
        replace_weights(pipe.transformer)
        with pytest.warns(holdover.HoldoverWarning, match="times less predictable") as warned:
            first = run(pipe, **tiny.call(steps=STEPS))
            second = run(pipe, **tiny.call(steps=STEPS))
        generations = cache.stats().generations
    assert len(warned) == 1
    assert torch.equal(first, second)
    for generation in generations:
        assert budget < generation.computed["cond"] <= budget + budget // 4
        added = [v for v in generation.forwards if v.reason == "added: harder than expected"]
        assert len(added) == generation.computed["cond"] - budget


def test_all_branches_get_the_added_steps():
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "plan", profile=calibrated("QwenImagePipeline", 18, 1), budget=8) as cache:
        replace_weights(pipe.transformer)
        with pytest.warns(holdover.HoldoverWarning):
            run(pipe, **tiny.call(steps=18))
        generation = cache.stats().last
    assert generation.computed["cond"] > 8
    assert generation.trace("cond") == generation.trace("uncond")


def test_without_the_guard_the_plan_is_kept_and_nothing_is_warned(flux):
    tiny, pipe = flux
    with holdover.enable(pipe, "plan", profile=profile(), budget=8, guard=False) as cache:
        replace_weights(pipe.transformer)
        run(pipe, **tiny.call(steps=STEPS))
        assert cache.stats().last.computed == {"cond": 8}


def test_a_silent_guard_changes_nothing(flux):
    tiny, pipe = flux
    images = []
    for guard in (True, False, True):
        with holdover.enable(pipe, "plan", profile=profile(), budget=8, guard=guard):
            images.append(run(pipe, **tiny.call(steps=STEPS)))
    assert torch.equal(images[0], images[1])
    assert torch.equal(images[0], images[2])


def test_a_short_calibration_measures_the_usual_ratios_too():
    """Few-step models need a guard most: twelve steps must be enough for one."""
    assert len(calibrated(FLUX).facts.surprise) == 2


# Without a pipeline.


def watched(noise, vectors, computed, scale=1.0, usual=(1.0, 1.0)):
    """A guard that has observed the computed steps of a generation."""
    known = [outputs(noise, seed) for seed in (1, 2)]
    guard = Guard(measurements_of(noise, known), usual)
    for step in computed:
        guard.observe(step, torch.from_numpy(vectors[step] * scale)[None])
    return guard


def test_the_ratio_is_one_at_most_on_a_measured_generation():
    noise = falling(20)
    guard = watched(noise, outputs(noise, 1), range(0, 20, 3))
    assert not guard.is_alarmed()
    assert max(guard.ratios) <= 1.0 + 1e-4
    assert len(guard.ratios) == 5
    assert guard.mismatch() is None


def test_the_size_of_the_outputs_does_not_matter():
    noise = falling(20)
    small, large = (watched(noise, outputs(noise, 1), range(0, 20, 3), scale) for scale in (0.01, 100.0))
    small.is_alarmed()
    large.is_alarmed()
    assert small.ratios == pytest.approx(large.ratios, rel=1e-3)


def test_outputs_without_any_order_alarm():
    noise = falling(20)
    random = np.random.default_rng(0).normal(size=(20, WIDTH))
    guard = watched(noise, random, range(0, 20, 3))
    assert guard.is_alarmed()
    assert guard.mismatch() > 8
    assert not guard.is_alarmed()


def test_outputs_that_are_not_finite_alarm():
    noise = falling(20)
    broken = outputs(noise, 1)
    broken[6] = np.nan
    assert watched(noise, broken, (0, 3, 6)).is_alarmed()


def test_a_number_on_the_cpu_is_ready_at_once():
    late = AsyncScalar(torch.tensor(2.5))
    assert late.ready
    assert late.read() == 2.5
