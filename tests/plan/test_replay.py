"""Replayed generations are those of the pipeline, and weights are fitted and trained on them."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

import holdover
from holdover.plan.calls import Caller, make_batches
from holdover.plan.error_model import DEFAULT_OPTIONS
from holdover.plan.polish import score
from holdover.plan.recorded import ReplayError, find_latent, find_mix_of_parts
from holdover.plan.replay import Replay
from holdover.plan.training import TrainingState, train
from holdover.profiles import MeasuredPlan
from holdover.profiles.files import decode, encode
from tiny.pipelines import PIPELINES
from tiny.pipelines_image import quiet

from .profiled import keywords

replay_module = import_module("holdover.plan.replay")
STEPS, COMPUTED = 6, (0, 3, 4)
NAMES = (
    "FluxKontextPipeline",
    "StableDiffusion3Pipeline",
    "QwenImagePipeline",
    "Lumina2Pipeline",
    "CogVideoXPipeline",
    "Cosmos2TextToImagePipeline",
    "WanImageToVideoPipeline[2.2]",
)
MORE = {"CogVideoXPipeline": {"use_dynamic_cfg": True}}
EVERYWHERE = replace(DEFAULT_OPTIONS, fitted_below=1.0)


@cache
def replayed(name: str, euler: bool = False):
    tiny = PIPELINES[name]
    pipe, call = tiny.build(), keywords(tiny) | MORE.get(name, {})
    pipe.scheduler = FlowMatchEulerDiscreteScheduler() if euler else pipe.scheduler
    with quiet():
        profile = holdover.calibrate(pipe, [call] * 2, STEPS, effort="quick", progress=False)
        caller = Caller.like(profile, pipe, {})
        replay = Replay(caller, profile, make_batches([call] * 2, 1, 0))

    def final_latent(plan):
        """The final latent of the first batch when the pipeline runs a plan."""
        latents = []
        told = {"callback_on_step_end": lambda pipe, step, timestep, values: latents.append(values["latents"]) or {}}
        planned = profile.with_facts(schedules=(plan,), options=replay.problem.options)
        settings = {"profile": planned, "schedule": plan.computed}
        with quiet(), holdover.enable(pipe, "plan", **settings) as cache:
            Caller.like(profile, pipe, told)([call], [0])
            computed = {forward.step for forward in cache.stats().last.forwards if forward.computed}
        assert computed == set(plan.computed)
        return latents[-1]

    return replay, lambda: replay.check(caller, profile, ([call], [0])), final_latent


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_plan_ends_where_that_of_the_pipeline_ends(name, monkeypatch):
    """Kontext has more tokens, Stable Diffusion 3 a doubled batch, Cosmos a preconditioning, Qwen-Image rescales norms,

    Lumina 2 does and passes on the negative, CogVideoX changes its guidance from step to step, and Wan has two experts.
    """
    monkeypatch.setattr(replay_module, "_SAME_END", 0.02)
    replay, check, _ = replayed(name)
    with quiet():
        check()
    replay.batches[0].latents[-1] += 1.0
    with quiet(), pytest.raises(ReplayError, match="more than the latent"):
        check()
    replay.batches[0].latents[-1] -= 1.0


def test_rounding_is_not_taken_for_a_plan_that_ends_elsewhere():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    pipe.transformer.to(torch.bfloat16)
    call = {k: v.bfloat16() if isinstance(v, torch.Tensor) else v for k, v in keywords(tiny).items()}
    with quiet():
        profile = holdover.calibrate(pipe, [call], 12, effort="quick", progress=False)
        caller, batch = Caller.like(profile, pipe, {}), ([call], [0])
        replay = Replay(caller, profile, [batch])
        replay.check(caller, profile, batch)
        replay.batches[0].latents[-1] *= 1.1
        with pytest.raises(ReplayError, match="more than the latent"):
            replay.check(caller, profile, batch)


@pytest.mark.parametrize("differences", [False, True])
def test_trained_weights_are_better_where_they_were_trained_and_never_worse_than_the_start(differences):
    replay, _, _ = replayed("FluxKontextPipeline")
    weights = replay.fit(COMPUTED, EVERYWHERE)

    def judge(tried, factors):
        return score(list(-10 * np.log10(replay.run(COMPUTED, tried, factors))))

    parameters = [p.requires_grad for module in replay.modules for p in module.parameters()]
    reached, *trained = train(replay, COMPUTED, weights, judge, 3 if differences else 8, differences)
    assert reached > judge(weights, {})
    assert reached == pytest.approx(judge(*trained), abs=1e-3)
    assert [p.requires_grad for module in replay.modules for p in module.parameters()] == parameters
    never = train(replay, COMPUTED, weights, lambda tried, _: 0.0 if tried is weights else -1.0, 2)
    assert never == (0.0, weights, {})


def test_a_training_that_is_continued_ends_where_one_in_one_go_does():
    replay, _, _ = replayed("FluxKontextPipeline")
    weights, seen, again = replay.fit(COMPUTED, EVERYWHERE), [], []
    scores = iter([1.0, 4.0, 2.0, 3.0, 5.0] * 2)

    def judge(*_):
        return next(scores)

    train(replay, COMPUTED, weights, judge, 4, report=lambda *report: seen.append(report))
    stopped = seen[2][0]
    assert (stopped.iteration, stopped.best, stopped.stale) == (2, 4.0, 1)
    kept = decode(TrainingState, json.loads(json.dumps(encode(stopped))), "a file")
    assert kept == stopped
    scores = iter([3.0, 5.0])
    train(replay, COMPUTED, weights, judge, 4, report=lambda *report: again.append(report), state=kept)
    assert again == seen[3:]
    assert again[-1][0].parameters != stopped.parameters


def test_gradients_do_not_go_through_cudnn_attention_and_its_setting_is_restored():
    replay, _, _ = replayed("FluxKontextPipeline")
    weights, seen = replay.fit(COMPUTED, EVERYWHERE), []
    watched = [
        module.register_forward_pre_hook(lambda *_: seen.append(torch.backends.cuda.cudnn_sdp_enabled()))
        for module in replay.modules
    ]
    try:
        assert torch.backends.cuda.cudnn_sdp_enabled()
        with pytest.raises(ZeroDivisionError):
            train(replay, COMPUTED, weights, lambda *_: 0.0, 1, report=lambda state, *_: 1 / (1 - state.iteration))
        assert torch.backends.cuda.cudnn_sdp_enabled()
        assert seen[-1] is False
    finally:
        for hook in watched:
            hook.remove()


def test_noise_levels_are_trained_with_the_weights_and_from_where_they_are():
    replay, _, _ = replayed("FluxKontextPipeline")
    weights, seen = replay.fit(COMPUTED, EVERYWHERE), []
    keep = {"report": lambda state, score, tried, factors: seen.append(factors)}
    train(replay, COMPUTED, weights, lambda *_: 0.0, 2, factors={3: 1.5}, **keep)
    assert seen[0] == {3: 1.5}
    assert seen[-1].keys() == {3, 4}  # before the first held step there is nothing to correct
    assert seen[-1][3] == pytest.approx(1.5, rel=0.01)
    assert 0 < abs(seen[-1][4] - 1) < 0.01
    train(replay, COMPUTED, weights, lambda *_: 0.0, 2, factors={3: 1.5}, noise_levels=False, **keep)
    assert seen[-1] == {3: 1.5}


@torch.no_grad()
@pytest.mark.parametrize(
    ("name", "euler"),
    [("FluxKontextPipeline", False), ("StableDiffusion3Pipeline", False), ("WanImageToVideoPipeline[2.2]", True)],
)
def test_a_plan_with_noise_levels_ends_where_that_of_the_pipeline_ends(name, euler):
    """Stable Diffusion 3 has a doubled batch, and Wan has two experts."""
    replay, _, final_latent = replayed(name, euler)
    computed = tuple(sorted({*COMPUTED, *(first for first, _ in replay.spec.ranges)}))
    weights, factors = replay.fit(computed, EVERYWHERE), {step: 1.1 - step / 40 for step in computed}
    plan = MeasuredPlan(
        tuple(replay.spec.noise.tolist()),
        replay.spec.scheduler,
        computed,
        tuple(value for _, held in sorted(weights.items()) for value in held.values),
        "polished",
        0.0,
        replay.problem.branches,
        replay.spec.guidance,
    )
    ends, batch = [], replay.batches[0]
    for told in ({}, factors):
        changed = replace(plan, timestep_factors=tuple(told.values()))
        actual = final_latent(changed).to(batch.latents) - batch.latents[-1]
        ends.append(replay.final_difference(batch, computed, replay.tables(computed, weights), told))
        assert float((actual - ends[-1]).norm()) < 0.02 * float(actual.norm())
    assert float((ends[0] - ends[-1]).norm()) > 0.05 * float(ends[0].norm())


def test_integer_timesteps_have_no_noise_levels():
    replay, _, _ = replayed("CogVideoXPipeline")
    assert not replay.has_noise_levels
    assert replayed("StableDiffusion3Pipeline")[0].has_noise_levels
    computed, seen = (0, 3), []
    weights = replay.fit(computed, EVERYWHERE)
    train(replay, computed, weights, lambda *_: 0.0, 1, True, report=lambda *plan: seen.append(plan[-1]))
    assert seen == [{}, {}]


def test_what_cannot_be_replayed_is_refused():
    latent = torch.randn(1, 4, 8)
    with pytest.raises(ReplayError, match="not among the inputs"):
        find_latent("hidden_states", (torch.randn(1, 4, 8),), {}, latent)
    with pytest.raises(ReplayError, match="no mix"):
        find_mix_of_parts(torch.randn(2, 3, 1, 40), torch.randn(3, 1, 40))
    key, scale = find_latent("hidden_states", (), {"hidden_states": torch.cat([0.5 * latent] * 2)}, latent)
    assert (key, scale) == ("hidden_states", pytest.approx(0.5))
