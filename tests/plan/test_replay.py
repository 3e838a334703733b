"""Replayed generations are those of the pipeline, and weights are fitted and trained on them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from importlib import import_module

import numpy as np
import pytest
import torch

import holdover
from holdover.plan.calls import Caller, make_batches
from holdover.plan.error_model import DEFAULT_OPTIONS
from holdover.plan.polish import score
from holdover.plan.replay import Replay, ReplayError, find_latent, find_mix_of_parts
from holdover.plan.training import train
from tiny.pipelines import PIPELINES
from tiny.pipelines_image import quiet

from .profiled import keywords

replay_module = import_module("holdover.plan.replay")
STEPS, COMPUTED = 6, (0, 3, 4)
NAMES = (
    "FluxKontextPipeline",
    "StableDiffusion3Pipeline",
    "QwenImagePipeline",
    "CogVideoXPipeline",
    "Cosmos2TextToImagePipeline",
    "WanImageToVideoPipeline[2.2]",
)
MORE = {"CogVideoXPipeline": {"use_dynamic_cfg": True}}
EVERYWHERE = replace(DEFAULT_OPTIONS, fitted_below=1.0)


@cache
def replayed(name: str):
    tiny = PIPELINES[name]
    pipe, call = tiny.build(), keywords(tiny) | MORE.get(name, {})
    with quiet():
        profile = holdover.calibrate(pipe, [call] * 2, STEPS, effort="quick", progress=False)
        caller = Caller.like(profile, pipe, {})
        replay = Replay(caller, profile, make_batches([call] * 2, 1, 0))
    return replay, lambda: replay.check(caller, profile, ([call], [0]))


@pytest.mark.parametrize("name", NAMES)
def test_a_replayed_plan_ends_where_that_of_the_pipeline_ends(name, monkeypatch):
    """Kontext has more tokens, Stable Diffusion 3 a doubled batch, Cosmos a preconditioning, Qwen-Image rescales norms,

    CogVideoX changes its guidance from step to step, and Wan has two experts.
    """
    monkeypatch.setattr(replay_module, "_SAME_END", 0.02)
    replay, check = replayed(name)
    with quiet():
        check()
    replay.batches[0].latents[-1] += 1.0
    with quiet(), pytest.raises(ReplayError, match="more than the latent"):
        check()
    replay.batches[0].latents[-1] -= 1.0


@pytest.mark.parametrize("differences", [False, True])
def test_trained_weights_are_better_where_they_were_trained_and_never_worse_than_the_start(differences):
    replay, _ = replayed("FluxKontextPipeline")
    weights = replay.fit(COMPUTED, EVERYWHERE)

    def judge(tried):
        return score(list(-10 * np.log10(replay.run(COMPUTED, tried))))

    parameters = [p.requires_grad for module in replay.modules for p in module.parameters()]
    reached, trained = train(replay, COMPUTED, weights, judge, 3 if differences else 8, differences)
    assert reached > judge(weights)
    assert reached == pytest.approx(judge(trained), abs=1e-3)
    assert [p.requires_grad for module in replay.modules for p in module.parameters()] == parameters
    assert train(replay, COMPUTED, weights, lambda tried: 0.0 if tried is weights else -1.0, 2) == (0.0, weights)


def test_what_cannot_be_replayed_is_refused():
    latent = torch.randn(1, 4, 8)
    with pytest.raises(ReplayError, match="not among the inputs"):
        find_latent("hidden_states", (torch.randn(1, 4, 8),), {}, latent)
    with pytest.raises(ReplayError, match="no mix"):
        find_mix_of_parts(torch.randn(2, 3, 1, 40), torch.randn(3, 1, 40))
    key, scale = find_latent("hidden_states", (), {"hidden_states": torch.cat([0.5 * latent] * 2)}, latent)
    assert (key, scale) == ("hidden_states", pytest.approx(0.5))
