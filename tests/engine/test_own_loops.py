"""Loops that set a scheduler's timesteps and never call its `step`: inversion, flow editing."""

from __future__ import annotations

import copy

import pytest
import torch

import holdover
from holdover.engine.branches import MAX_BRANCHES
from tiny.pipelines import PIPELINES, run

STEPS = 8
TINY = PIPELINES["FluxPipeline"]
METHODS = {
    "mag_cache": {"mag_ratios": [1.0] * STEPS, "mag_max_skip_steps": 1, "mag_threshold": 1e9},
    "plan": {"schedule": tuple(range(0, STEPS, 2)), "predictor": "hold"},
}
NAMES = pytest.mark.parametrize("name", ["cond", None])


@pytest.fixture(scope="module")
def flux():
    """A pipeline, and the arguments of one forward of its transformer."""
    pipe, seen = TINY.build(), []
    hook = pipe.transformer.register_forward_pre_hook(lambda m, a, k: seen.append(k), with_kwargs=True)
    run(pipe, **TINY.call(steps=1))
    hook.remove()
    return pipe, {**seen[0], "return_dict": False}


@torch.no_grad()
def loop(pipe, inputs, timesteps, name, repetitions=1):
    """Update the latents by Euler steps of one's own; no timesteps: those of the scheduler, backwards."""
    pipe.scheduler.set_timesteps(len(timesteps or DOWN), mu=1.0)
    if timesteps:
        pipe.scheduler.set_begin_index(0)
    timesteps = timesteps or (pipe.scheduler.timesteps.flip(0) / 1000).tolist()
    latents = inputs["hidden_states"]
    for t in timesteps:
        now = {**inputs, "hidden_states": latents, "timestep": torch.full((1,), float(t))}
        for _ in range(repetitions):
            if name is None:
                velocity = pipe.transformer(**now)[0]
            else:
                with pipe.transformer.cache_context(name):
                    velocity = pipe.transformer(**now)[0]
        latents = latents - velocity / len(timesteps)
    return latents


DOWN = [1 - i / STEPS for i in range(STEPS)]
UP = [i / STEPS for i in range(STEPS)]


@NAMES
@pytest.mark.parametrize("timesteps", [DOWN, UP, None], ids=["editing", "inversion", "backwards"])
@pytest.mark.parametrize("method", METHODS)
def test_the_timestep_tells_the_step(flux, method, timesteps, name):
    pipe, inputs = flux
    with holdover.enable(pipe, method, **METHODS[method]) as cache:
        first = loop(pipe, inputs, timesteps, name)
        run(pipe, **TINY.call(steps=STEPS))
        assert torch.equal(loop(pipe, inputs, timesteps, name), first)
        generations = cache.stats().generations
    assert [len(generation.forwards) for generation in generations] == [STEPS] * 3
    for generation in (generations[0], generations[-1]):
        assert generation.steps == STEPS
        assert [record.step for record in generation.forwards] == list(range(STEPS))
        assert generation.trace(generation.branches[0]) == "Ch" * (STEPS // 2)


@torch.no_grad()
def test_parts_of_a_long_video_have_the_scheduler_s_steps(flux):
    """SkyReelsV2's diffusion forcing steps copies of the scheduler, in one loop for each part of the video."""
    pipe, inputs = flux
    with holdover.enable(pipe, "plan", **METHODS["plan"]) as cache:
        pipe.scheduler.set_timesteps(STEPS, mu=1.0)
        copies = [copy.deepcopy(pipe.scheduler) for _ in range(2)]
        for scheduler in copies:
            scheduler.set_timesteps(STEPS, mu=1.0)
            latents = inputs["hidden_states"]
            for t in scheduler.timesteps:
                with pipe.transformer.cache_context("cond"):
                    velocity = pipe.transformer(**{**inputs, "hidden_states": latents, "timestep": t.expand(1) / 1000})
                latents = scheduler.step(velocity[0], t, latents, return_dict=False)[0]
        assert [generation.steps for generation in cache.stats().generations] == [STEPS] * 2
        assert [g.trace("cond") for g in cache.stats().generations] == ["Ch" * (STEPS // 2)] * 2
        with pytest.warns(holdover.HoldoverWarning, match="plan needs the number of steps"):
            pipe.transformer(**{**inputs, "timestep": torch.full((1,), 0.9)})  # none of the scheduler's
        assert cache.stats().last.forwards[0].reason == "the number of steps is not known"


@NAMES
def test_nothing_held_is_bit_identical(flux, name):
    pipe, inputs = flux
    plain = loop(pipe, inputs, DOWN, name)
    with holdover.enable(pipe, "mag_cache", **{**METHODS["mag_cache"], "mag_threshold": 0.0}):
        assert torch.equal(loop(pipe, inputs, DOWN, name), plain)


def test_several_forwards_of_one_name_at_a_step_are_branches_of_their_own(flux):
    pipe, inputs = flux
    with holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"]) as cache:
        loop(pipe, inputs, DOWN, "cond", repetitions=2)
        generation = cache.stats().last
    assert generation.branches == ("cond", "cond#2")
    assert {generation.trace(branch) for branch in generation.branches} == {"Ch" * (STEPS // 2)}


def test_a_loop_after_repeated_forwards_is_a_generation_of_its_own(flux):
    """Forwards repeated at one step of a scheduler do not count as the first step of what runs without it."""
    pipe, inputs = flux

    def again(pipe, step, timestep, kwargs):
        if step == 0:
            with pipe.transformer.cache_context("extra"):
                for _ in range(2):
                    pipe.transformer(**{**inputs, "timestep": torch.full((1,), 0.9)})
        return {}

    with holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"]) as cache:
        run(pipe, **TINY.call(steps=STEPS), callback_on_step_end=again)
        with torch.no_grad():
            pipe.transformer(**{**inputs, "timestep": torch.full((1,), 0.5)})
        assert cache.stats().count == 2
        assert [record.step for record in cache.stats().last.forwards] == [0]


def test_only_so_many_branches_are_kept(flux):
    pipe, inputs = flux
    with holdover.enable(pipe, "mag_cache", **METHODS["mag_cache"]) as cache:
        loop(pipe, inputs, [1.0], "cond", repetitions=MAX_BRANCHES + 3)
        assert len(cache._engine._generation.states) == MAX_BRANCHES
        assert len(cache.stats().last.branches) == MAX_BRANCHES + 3
