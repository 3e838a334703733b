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


def mixed_of(branches, outputs):
    """What is found of outputs by branch, (steps, batch, values), and of what the scheduler got."""
    with Branched("device") as branched, Shelf("device") as shelf:
        for name, tensors in branches.items():
            for step, tensor in enumerate(tensors):
                branched.add(Computed(None, name, step, Grid(len(tensors)), None, (), (tensor,)))
        for output in outputs:
            shelf.put(output)
        return branched.mixed(shelf)


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
