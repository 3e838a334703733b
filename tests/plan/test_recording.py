"""Branches are kept separate where the scheduler's input is a mix of their outputs, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import holdover
from holdover import Profile
from holdover.plan.error_model import Measurements
from holdover.plan.recording import BranchMix, find_mix, merge_runs
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import quiet

from .profiled import calibrated, keywords

WAN = "WanPipeline[2.2]"


@pytest.fixture
def noise():
    return torch.Generator().manual_seed(0)


def mix_of(branches, outputs, latents=None):
    """The mix that is found for outputs by branch, (steps, batch, values), and for what the scheduler got."""
    if latents is None:
        latents = torch.randn(len(outputs) + 1, *outputs[0].shape)
    return find_mix(branches, outputs, latents)


def random(noise, steps=5, batch=2, values=40):
    return torch.randn(steps, batch, values, generator=noise)


def test_a_mix_is_found(noise):
    cond, uncond = random(noise), random(noise)
    found = mix_of({"cond": cond, "uncond": uncond}, 3.5 * cond - 2.5 * uncond)
    assert found.branches == ("cond", "uncond")
    assert found.mix == pytest.approx((3.5, -2.5), abs=1e-5)
    assert found.grams.shape == (2, 10, 10)


def test_a_mix_in_bfloat16_is_found(noise):
    cond, uncond = random(noise, values=4000).bfloat16(), random(noise, values=4000).bfloat16()
    found = mix_of({"cond": cond, "uncond": uncond}, uncond + 3.5 * (cond - uncond))
    assert found.mix == pytest.approx((3.5, -2.5), abs=1e-2)


@pytest.mark.parametrize(
    "outputs",
    [
        lambda c, u: (3 * c - 2 * u) * (c.norm() / (3 * c - 2 * u).norm(dim=2, keepdim=True)),  # rescaled norms
        lambda c, u: (3 * c - 2 * u)[..., :20],  # half of the channels
        lambda c, u: torch.randn(c.shape, generator=torch.Generator().manual_seed(9)),
    ],
)
def test_what_is_not_a_mix_is_kept_as_the_scheduler_got_it(noise, outputs):
    cond, uncond = random(noise), random(noise)
    got = outputs(cond, uncond)
    found = mix_of({"cond": cond, "uncond": uncond}, got)
    assert (found.branches, found.mix) == ((), (1.0,))
    flat = got.double().transpose(0, 1)
    assert found.grams == pytest.approx((flat @ flat.transpose(1, 2) / got.shape[-1]).numpy(), rel=1e-6)


SCALES = torch.tensor([6.0, 1.0, 1.0, 2.6, 5.5])[:, None, None]  # guidance at some steps only is such a mix too


@pytest.mark.parametrize("doubled", [False, True])
def test_a_mix_that_changes_from_step_to_step_is_found(noise, doubled):
    cond, uncond = random(noise), random(noise)
    branches = {"both": torch.cat([uncond, cond], dim=1)} if doubled else {"uncond": uncond, "cond": cond}
    found = mix_of(branches, SCALES * cond + (1 - SCALES) * uncond)
    assert (found.branches, found.parts, found.grams.shape) == ((), 2, (2, 10, 10))
    assert found.mix == pytest.approx(torch.cat([1 - SCALES, SCALES]).flatten().tolist(), abs=1e-5)
    same = merge_runs([found, found])
    assert (same.mix, same.grams.shape) == (pytest.approx(found.mix), (4, 10, 10))
    changed = mix_of(branches, 3 * cond - 2 * uncond)
    assert merge_runs([found, changed]).grams.shape == (4, 5, 5)
    assert changed.parts == 1


def test_guidance_that_changes_from_step_to_step_is_planned_for():
    """CogVideoX's dynamic guidance: planned as one output, its jumps look like changes of the model's output."""
    tiny = PIPELINES["CogVideoXPipeline"]
    pipe, call = tiny.build(), keywords(tiny) | {"use_dynamic_cfg": True}
    with quiet():
        profile = holdover.calibrate(pipe, [call] * 2, 12, effort="quick", progress=False)
    facts, off = profile.facts, {}
    assert (facts.branches, len(facts.mix), profile.grams.shape) == ((), 24, (2, 24, 24))
    measured = Measurements(np.array(facts.noise), profile.grams, profile.growth, facts.mix, tied=True)
    as_given = measured.outputs @ profile.grams @ measured.outputs.T
    as_one = Profile(replace(facts, mix=(1.0,)), as_given, profile.growth, profile.seams)
    plain = run(pipe, **tiny.call(steps=12), use_dynamic_cfg=True)
    for name, used in (("by step", profile), ("as one", as_one)):
        with quiet(), holdover.enable(pipe, "plan", profile=used, budget=7):
            off[name] = (run(pipe, **tiny.call(steps=12), use_dynamic_cfg=True) - plain).norm()
    assert off["by step"] < 0.8 * off["as one"]
    with quiet(), holdover.enable(pipe, "plan", profile=profile, budget=5):
        fewer = run(pipe, **tiny.call(steps=9), use_dynamic_cfg=True)
    assert torch.isfinite(fewer).all()


def test_one_branch_is_not_a_mix(noise):
    only = random(noise)
    assert mix_of({"cond": only}, only).branches == ()


def test_a_branch_that_runs_at_some_steps_only_is_not_kept_separate(noise):
    cond, uncond = random(noise), random(noise)
    assert mix_of({"cond": cond, "uncond": uncond[:3]}, 3 * cond - 2 * uncond).branches == ()


SCALE, CARRY = torch.tensor([[0.1, 0.3, 0.5, 0.8, 1.0], [-0.4, 0.2, 0.1, 0.5, 0.7]])[..., None, None]


def test_a_scaled_mix_with_a_share_of_the_latent_is_found(noise):
    cond, uncond, latents = random(noise), random(noise), random(noise, steps=6)
    found = mix_of({"cond": cond, "uncond": uncond}, SCALE * (4 * cond - 3 * uncond) + CARRY * latents[:5], latents)
    assert found.branches == ("cond", "uncond")
    assert found.mix == pytest.approx((4.0, -3.0), abs=1e-3)
    assert found.preconditioning.scale == pytest.approx(SCALE.flatten().numpy(), abs=1e-4)
    assert found.preconditioning.carry == pytest.approx(CARRY.flatten().numpy(), abs=1e-4)
    assert found.grams.shape == (2, 10, 10)
    assert merge_runs([found, found]).preconditioning is found.preconditioning
    with pytest.raises(holdover.HoldoverError, match="from call to call"):
        merge_runs([found, BranchMix(found.grams)])


def test_preconditioning_of_one_branch_is_found(noise):
    only, latents = random(noise), random(noise, steps=6)
    found = mix_of({"cond": only}, SCALE * only + CARRY * latents[:5], latents)
    assert (found.branches, found.mix) == ((), (1.0,))
    assert found.preconditioning.carry == pytest.approx(CARRY.flatten().numpy(), abs=1e-4)
    own = torch.einsum("tbv,sbv->bts", only.double(), only.double()) / only.shape[-1]
    assert found.grams == pytest.approx(own.numpy(), rel=1e-6, abs=1e-6)


def test_preconditioning_is_found_in_bfloat16_where_short_steps_are_mostly_rounding(noise):
    """As in Cosmos: the denoised image is rounded, and its distance from the latent divided by sigma."""
    sigmas = torch.tensor([80.0, 12.0, 2.0, 0.3, 0.002])[:, None, None]
    cond, uncond, start = (random(noise, values=20_000).bfloat16().float() for _ in range(3))
    latents = torch.cat([start * (1 + sigmas), start[:1]])
    latents[5] = latents[4] * 1.001
    denoised = [((latents[:5] - sigmas * each) / (1 + sigmas)).bfloat16().float() for each in (cond, uncond)]
    got = (latents[:5] - (8 * denoised[0] - 7 * denoised[1])) / sigmas
    found = mix_of({"cond": cond, "uncond": uncond}, got, latents)
    assert found.mix == pytest.approx((8.0, -7.0), rel=1e-2)
    assert found.preconditioning.scale[:4] == pytest.approx(1 / (1 + sigmas.flatten()[:4].numpy()), rel=1e-2)
    assert found.preconditioning.carry[:4] == pytest.approx(1 / (1 + sigmas.flatten()[:4].numpy()), rel=1e-2)


def test_what_is_neither_is_kept_as_the_scheduler_got_it(noise):
    cond, latents, foreign = random(noise), random(noise, steps=6), random(noise)
    got = SCALE * cond + CARRY * foreign
    found = mix_of({"cond": cond}, got, latents)
    assert (found.branches, found.preconditioning) == ((), None)
    own = torch.einsum("tbv,sbv->bts", got.double(), got.double()) / got.shape[-1]
    assert found.grams == pytest.approx(own.numpy(), rel=1e-6, abs=1e-6)


def test_a_pipeline_that_preconditions_is_planned_with_its_own_response():
    """Cosmos: the scheduler gets (F + x) / (1 + sigma). Weights fitted to that are wrong for F, which is held."""
    name = "Cosmos2TextToImagePipeline"
    tiny, profile = PIPELINES[name], calibrated(name)
    sigmas = np.array(profile.facts.noise)
    assert profile.facts.scale == pytest.approx(1 / (1 + sigmas), rel=1e-3)
    assert profile.facts.carry == pytest.approx(1 / (1 + sigmas), rel=1e-3)
    guidance = profile.facts.guidance
    assert profile.facts.mix == pytest.approx((1 + guidance, -guidance), rel=1e-3)
    pipe = tiny.build()
    plain, off = run(pipe, **tiny.call(steps=12)), {}
    for predictor in ("auto", "hold", "newton"):
        with quiet(), holdover.enable(pipe, "plan", profile=profile, budget=6, predictor=predictor):
            off[predictor] = (run(pipe, **tiny.call(steps=12)) - plain).norm()
    assert off["auto"] < 0.5 * min(off["hold"], off["newton"])


def test_most_pipelines_pass_outputs_on_unchanged():
    for name in ("FluxPipeline", "QwenImagePipeline", WAN):
        assert calibrated(name).facts.scale == ()


def test_runs_that_mix_differently_are_merged(noise):
    cond, uncond = random(noise), random(noise)
    one = mix_of({"cond": cond, "uncond": uncond}, 3 * cond - 2 * uncond)
    other = mix_of({"cond": cond, "uncond": uncond}, 5 * cond - 4 * uncond)
    assert merge_runs([one, one]).branches == ("cond", "uncond")
    both = merge_runs([one, other])
    assert both.branches == ()
    assert both.grams.shape == (4, 5, 5)
    plain = merge_runs([one, BranchMix(both.grams[:2])])
    assert (plain.branches, plain.grams.shape) == ((), (4, 5, 5))


def test_a_pipeline_with_guidance_is_measured_by_branch():
    facts = calibrated(WAN).facts
    assert facts.branches == ("cond", "uncond")
    assert facts.mix == pytest.approx((facts.guidance, 1 - facts.guidance), abs=1e-3)


def test_a_profile_whose_mix_does_not_fit_its_branches_is_refused():
    profile = calibrated(WAN)
    with pytest.raises(holdover.ProfileError, match="mix does not fit"):
        profile.with_facts(mix=(1.0, 2.0, 3.0))
    with pytest.raises(holdover.ProfileError, match="Gram matrices do not fit"):
        profile.with_facts(mix=(1.0,), branches=())
