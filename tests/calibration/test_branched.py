"""Branches are told apart where the scheduler's output is a mix of theirs, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import holdover
from holdover.calibration.branched import Branched, Mixed, together
from holdover.calibration.shelf import Shelf
from holdover.grid import Grid
from holdover.plan.kernel import Kernel
from holdover.plan.making import remixed
from holdover.profiles import Profile
from holdover.runtime.method import Computed
from plan.profiled import calibrated
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import quiet

WAN = "WanPipeline[2.2]"


@pytest.fixture
def noise():
    return torch.Generator().manual_seed(0)


def mixed_of(branches, outputs, latents=None):
    """What is found of outputs by branch, (steps, batch, values), and of what the scheduler got."""
    with Branched("device") as branched, Shelf("device") as shelf, Shelf("device") as seen:
        for latent in torch.randn(len(outputs) + 1, *outputs[0].shape) if latents is None else latents:
            seen.put(latent)
        for name, tensors in branches.items():
            for step, tensor in enumerate(tensors):
                branched.add(Computed(None, name, step, Grid(len(tensors)), None, (), (tensor,)))
        for output in outputs:
            shelf.put(output)
        return branched.mixed(shelf, seen)


def drawn(noise, steps=5, batch=2, values=40):
    return torch.randn(steps, batch, values, generator=noise)


def test_a_mix_is_found(noise):
    cond, uncond = drawn(noise), drawn(noise)
    found = mixed_of({"cond": cond, "uncond": uncond}, 3.5 * cond - 2.5 * uncond)
    assert found.branches == ("cond", "uncond")
    assert found.mix == pytest.approx((3.5, -2.5), abs=1e-5)
    assert found.grams.shape == (2, 10, 10)


def test_a_mix_in_bfloat16_is_found(noise):
    cond, uncond = drawn(noise, values=4000).bfloat16(), drawn(noise, values=4000).bfloat16()
    found = mixed_of({"cond": cond, "uncond": uncond}, uncond + 3.5 * (cond - uncond))
    assert found.mix == pytest.approx((3.5, -2.5), abs=1e-2)


@pytest.mark.parametrize(
    "outputs",
    [
        lambda c, u: (3 * c - 2 * u) * (c.norm() / (3 * c - 2 * u).norm(dim=2, keepdim=True)),  # rescaled norms
        lambda c, u: torch.cat([3 * c[:2] - 2 * u[:2], c[2:]]),  # guidance at some steps only
        lambda c, u: (3 * c - 2 * u)[..., :20],  # half of the channels
        lambda c, u: torch.randn(c.shape, generator=torch.Generator().manual_seed(9)),
    ],
)
def test_what_is_no_mix_is_kept_as_the_scheduler_got_it(noise, outputs):
    cond, uncond = drawn(noise), drawn(noise)
    got = outputs(cond, uncond)
    found = mixed_of({"cond": cond, "uncond": uncond}, got)
    assert (found.branches, found.mix) == ((), (1.0,))
    flat = got.double().transpose(0, 1)
    assert found.grams == pytest.approx((flat @ flat.transpose(1, 2) / got.shape[-1]).numpy(), rel=1e-6)


def test_one_branch_is_no_mix(noise):
    only = drawn(noise)
    assert mixed_of({"cond": only}, only).branches == ()


def test_a_branch_that_runs_at_some_steps_only_is_not_told_apart(noise):
    cond, uncond = drawn(noise), drawn(noise)
    assert mixed_of({"cond": cond, "uncond": uncond[:3]}, 3 * cond - 2 * uncond).branches == ()


SCALE, CARRY = torch.tensor([[0.1, 0.3, 0.5, 0.8, 1.0], [-0.4, 0.2, 0.1, 0.5, 0.7]])[..., None, None]


def test_a_mix_that_is_scaled_and_has_some_of_the_latent_is_found(noise):
    cond, uncond, latents = drawn(noise), drawn(noise), drawn(noise, steps=6)
    found = mixed_of({"cond": cond, "uncond": uncond}, SCALE * (4 * cond - 3 * uncond) + CARRY * latents[:5], latents)
    assert found.branches == ("cond", "uncond")
    assert found.mix == pytest.approx((4.0, -3.0), abs=1e-3)
    assert found.intake.scale == pytest.approx(SCALE.flatten().numpy(), abs=1e-4)
    assert found.intake.carry == pytest.approx(CARRY.flatten().numpy(), abs=1e-4)
    assert found.grams.shape == (2, 10, 10)
    assert together([found, found]).intake is found.intake
    with pytest.raises(holdover.HoldoverError, match="from call to call"):
        together([found, Mixed(found.grams)])


def test_so_it_is_with_one_branch(noise):
    only, latents = drawn(noise), drawn(noise, steps=6)
    found = mixed_of({"cond": only}, SCALE * only + CARRY * latents[:5], latents)
    assert (found.branches, found.mix) == ((), (1.0,))
    assert found.intake.carry == pytest.approx(CARRY.flatten().numpy(), abs=1e-4)
    own = torch.einsum("tbv,sbv->bts", only.double(), only.double()) / only.shape[-1]
    assert found.grams == pytest.approx(own.numpy(), rel=1e-6, abs=1e-6)


def test_so_it_is_in_bfloat16_where_short_steps_are_mostly_rounding(noise):
    """As Cosmos does it: the picture that is made out is rounded, and its distance from the latent divided by sigma."""
    sigmas = torch.tensor([80.0, 12.0, 2.0, 0.3, 0.002])[:, None, None]
    cond, uncond, start = (drawn(noise, values=20_000).bfloat16().float() for _ in range(3))
    latents = torch.cat([start * (1 + sigmas), start[:1]])
    latents[5] = latents[4] * 1.001
    denoised = [((latents[:5] - sigmas * each) / (1 + sigmas)).bfloat16().float() for each in (cond, uncond)]
    got = (latents[:5] - (8 * denoised[0] - 7 * denoised[1])) / sigmas
    found = mixed_of({"cond": cond, "uncond": uncond}, got, latents)
    assert found.mix == pytest.approx((8.0, -7.0), rel=1e-2)
    assert found.intake.scale[:4] == pytest.approx(1 / (1 + sigmas.flatten()[:4].numpy()), rel=1e-2)
    assert found.intake.carry[:4] == pytest.approx(1 / (1 + sigmas.flatten()[:4].numpy()), rel=1e-2)


def test_what_is_neither_is_as_the_scheduler_got_it(noise):
    cond, latents, foreign = drawn(noise), drawn(noise, steps=6), drawn(noise)
    got = SCALE * cond + CARRY * foreign
    found = mixed_of({"cond": cond}, got, latents)
    assert (found.branches, found.intake) == ((), None)
    own = torch.einsum("tbv,sbv->bts", got.double(), got.double()) / got.shape[-1]
    assert found.grams == pytest.approx(own.numpy(), rel=1e-6, abs=1e-6)


def test_a_pipeline_that_preconditions_is_planned_for_as_what_it_is():
    """Cosmos: the scheduler gets (F + x) / (1 + sigma). Fitted to that, weights are wrong for F, which is held."""
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


def test_most_pipelines_hand_outputs_on_as_they_are():
    for name in ("FluxPipeline", "QwenImagePipeline", WAN):
        assert calibrated(name).facts.scale == ()


def test_runs_that_mix_differently_are_merged(noise):
    cond, uncond = drawn(noise), drawn(noise)
    one = mixed_of({"cond": cond, "uncond": uncond}, 3 * cond - 2 * uncond)
    other = mixed_of({"cond": cond, "uncond": uncond}, 5 * cond - 4 * uncond)
    assert together([one, one]).branches == ("cond", "uncond")
    both = together([one, other])
    assert both.branches == ()
    assert both.grams.shape == (4, 5, 5)
    plain = together([one, Mixed(both.grams[:2])])
    assert (plain.branches, plain.grams.shape) == ((), (4, 5, 5))


def test_a_pipeline_with_guidance_is_measured_by_branch():
    facts = calibrated(WAN).facts
    assert facts.branches == ("cond", "uncond")
    assert facts.mix == pytest.approx((facts.guidance, 1 - facts.guidance), abs=1e-3)


@pytest.mark.parametrize(
    ("mix", "measured", "wanted", "expected"),
    [
        ((3.0, -2.0), 3.0, 6.0, (6.0, -5.0)),
        ((-2.0, 3.0), 3.0, 1.5, (-0.5, 1.5)),
        ((4.0, -3.0), 3.0, 6.0, (7.0, -6.0)),
        ((-3.0, 4.0), 3.0, 2.0, (-2.0, 3.0)),
        ((0.5, 0.25), 3.0, 6.0, (0.5, 0.25)),
        ((3.0, -2.0), None, 6.0, (3.0, -2.0)),
        ((3.0, -2.0), 3.0, None, (3.0, -2.0)),
        ((1.0,), 3.0, 6.0, (1.0,)),
    ],
)
def test_guidance_that_was_not_measured_is_mixed_anew(mix, measured, wanted, expected):
    assert remixed(mix, measured, wanted) == pytest.approx(expected)


def merged(profile, mix):
    """The same profile with its branches merged."""
    kernel = Kernel(np.array(profile.facts.noise), profile.grams, profile.growth, mix).merged
    return Profile(replace(profile.facts, branches=(), mix=(1.0,)), kernel.grams, profile.growth, profile.seams)


def planned(profile, **call):
    """A planned generation."""
    tiny = PIPELINES[WAN]
    pipe = tiny.build()
    with quiet(), holdover.enable(pipe, "plan", profile=profile, budget=5, guard=False):
        return run(pipe, **tiny.call(steps=12, **call))


def test_branches_get_weights_of_their_own_where_all_of_them_run():
    profile = calibrated(WAN)
    assert not torch.equal(planned(profile), planned(merged(profile, profile.facts.mix)))


def test_a_generation_with_fewer_branches_than_were_measured_gets_one_set_of_weights():
    """Weights of a branch are for a mix with the others: alone it is held by what was measured of it alone."""
    profile = calibrated(WAN)
    alone = planned(profile, guidance=False)
    assert torch.equal(alone, planned(merged(profile, (1.0, 0.0)), guidance=False))
    assert not torch.equal(alone, planned(merged(profile, profile.facts.mix), guidance=False))


def test_a_profile_whose_mix_does_not_fit_its_branches_is_refused():
    profile = calibrated(WAN)
    with pytest.raises(holdover.ProfileError, match="mix does not fit"):
        profile.with_facts(mix=(1.0, 2.0, 3.0))
    with pytest.raises(holdover.ProfileError, match="Gram matrices do not fit"):
        profile.with_facts(mix=(1.0,), branches=())
