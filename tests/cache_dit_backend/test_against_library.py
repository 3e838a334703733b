"""Against plain cache-dit: with the same settings the same steps are computed and the outputs are equal bit for bit."""

from __future__ import annotations

import cache_dit
import pytest
import torch
from cache_dit import DMDCalibratorConfig, FoCaCalibratorConfig

import holdover
from cache_dit_backend.against_library import library, trace
from tiny.pipelines import PIPELINES, run

STEPS = 12
THRESHOLDS = {"FluxPipeline": 0.3, "QwenImagePipeline": 0.3, "WanPipeline": 0.06}
BASE = {"Fn_compute_blocks": 1, "Bn_compute_blocks": 0, "max_warmup_steps": 2, "max_continuous_cached_steps": 3}


def mask(policy: str, how: str) -> dict:
    found = cache_dit.steps_mask(mask_policy=policy, total_steps=STEPS)
    return {"steps_computation_mask": found, "steps_computation_policy": how}


# Our settings, and the library's where they have other names.
CASES = {
    "dbcache": ({}, {}),
    "last block": ({"Bn_compute_blocks": 1}, {"Bn_compute_blocks": 1}),
    "two first blocks": ({"Fn_compute_blocks": 2}, {"Fn_compute_blocks": 2}),
    "at most two": ({"max_cached_steps": 2}, {"max_cached_steps": 2}),
    "no limit in a row": ({"max_continuous_cached_steps": -1}, {"max_continuous_cached_steps": -1}),
    "taylorseer": ({"enable_taylorseer": True}, {"taylorseer": 1}),
    "taylorseer 2": ({"enable_taylorseer": True, "taylorseer_order": 2}, {"taylorseer": 2}),
    "taylorseer by its other name": ({"calibrator": "taylorseer", "taylorseer_order": 2}, {"taylorseer": 2}),
    "foca": ({"calibrator": "foca"}, {"calibrator": FoCaCalibratorConfig()}),
    "dmd": (
        {"calibrator": "dmd", "max_warmup_steps": 5},
        {"calibrator": DMDCalibratorConfig(), "max_warmup_steps": 5},
    ),
    "dmd with settings": (
        {"calibrator": "dmd", "max_warmup_steps": 6, "dmd_history": 5, "dmd_rank": 2, "dmd_ridge": 1e-4},
        {
            "calibrator": DMDCalibratorConfig(dmd_history=5, dmd_rank=2, dmd_ridge=1e-4),
            "max_warmup_steps": 6,
        },
    ),
    "warm-up in intervals": (
        {"max_warmup_steps": 6, "warmup_interval": 3},
        {"max_warmup_steps": 6, "warmup_interval": 3},
    ),
    "scm static": ({"scm_steps_mask_policy": "fast", "scm_steps_policy": "static"}, mask("fast", "static")),
    "scm dynamic": ({"scm_steps_mask_policy": "ultra"}, mask("ultra", "dynamic")),
    "all of it": (
        {"enable_taylorseer": True, "scm_steps_mask_policy": "ultra", "scm_steps_policy": "static"},
        {"taylorseer": 1, **mask("ultra", "static")},
    ),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_the_same_steps_and_the_same_output(name: str, case: str) -> None:
    tiny, (ours, theirs) = PIPELINES[name], CASES[case]
    base = {**BASE, "residual_diff_threshold": THRESHOLDS[name]}
    pipe = tiny.build()
    with library(pipe, **{**base, **theirs}):
        expected = run(pipe, **tiny.call(steps=STEPS))
        traces = {branch: trace(pipe, STEPS, branch) for branch in ("cond", "uncond")}
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **{**base, **ours}) as cache:
        output = run(pipe, **tiny.call(steps=STEPS))
        generation = cache.stats().last
    for branch in generation.branches:
        assert generation.trace(branch) == traces[branch]
        assert {"C", "h"} == set(traces[branch])
    assert torch.equal(output, expected)


@pytest.mark.parametrize("policy", ["once", "repeat"])
def test_starting_over_at_a_step(policy: str) -> None:
    """On FLUX, which has one branch: with two, the library counts forwards instead of steps."""
    tiny = PIPELINES["FluxPipeline"]
    settings = {
        **BASE,
        "residual_diff_threshold": 0.5,
        "force_refresh_step_hint": 4,
        "force_refresh_step_policy": policy,
    }
    pipe = tiny.build()
    with library(pipe, **settings):
        expected = run(pipe, **tiny.call(steps=STEPS))
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", **settings) as cache:
        output = run(pipe, **tiny.call(steps=STEPS))
        found = cache.stats().last.trace("cond")
    assert found == {"once": "CChhCChhhChh", "repeat": "CChhCChhCChh"}[policy]
    assert torch.equal(output, expected)
