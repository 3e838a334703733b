"""A profile is brought to the guidance and the branches of the generation at hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import holdover
from holdover.plan.error_model import Measurements
from holdover.plan.planner import mix_for_guidance
from holdover.profiles import Profile
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import quiet

from .profiled import calibrated

WAN = "WanPipeline[2.2]"


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
def test_the_mix_follows_the_guidance_scale(mix, measured, wanted, expected):
    assert mix_for_guidance(mix, measured, wanted) == pytest.approx(expected)


def merged(profile, mix):
    """The profile with its branches merged."""
    measurements = Measurements(np.array(profile.facts.noise), profile.grams, profile.growth, mix).merged
    return Profile(replace(profile.facts, branches=(), mix=(1.0,)), measurements.grams, profile.growth, profile.seams)


def planned(profile, **call):
    """A planned generation."""
    tiny = PIPELINES[WAN]
    pipe = tiny.build()
    with quiet(), holdover.enable(pipe, "plan", profile=profile, budget=5):
        return run(pipe, **tiny.call(steps=12, **call))


def test_branches_get_weights_of_their_own_if_all_of_them_run():
    profile = calibrated(WAN)
    assert not torch.equal(planned(profile), planned(merged(profile, profile.facts.mix)))


def test_a_generation_with_fewer_branches_than_were_measured_gets_one_set_of_weights():
    """Weights of a branch are for a mix with the others; alone it gets those measured for it alone."""
    profile = calibrated(WAN)
    alone = planned(profile, guidance=False)
    assert torch.equal(alone, planned(merged(profile, (1.0, 0.0)), guidance=False))
    assert not torch.equal(alone, planned(merged(profile, profile.facts.mix), guidance=False))
