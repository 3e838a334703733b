"""Two caches on one transformer give wrong images: those of diffusers and cache-dit are refused, before and after."""

from __future__ import annotations

import pytest
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    MagCacheConfig,
    PyramidAttentionBroadcastConfig,
    TaylorSeerCacheConfig,
)
from diffusers.hooks import HookRegistry, ModelHook, SeaCacheConfig, apply_first_block_cache

import holdover
from tiny.pipelines import PIPELINES, run

STEPS = 6
TINY = PIPELINES["FluxPipeline"]
MAG = {"mag_ratios": [1.0] * STEPS, "mag_threshold": 0.0}
CONFIGS = {
    "TaylorSeer": lambda pipe: TaylorSeerCacheConfig(cache_interval=3, disable_cache_before_step=1),
    "MagCache": lambda pipe: MagCacheConfig(mag_ratios=[1.0] * STEPS, num_inference_steps=STEPS),
    "FirstBlock": lambda pipe: FirstBlockCacheConfig(threshold=0.2),
    "SeaCache": lambda pipe: SeaCacheConfig(),
    "PyramidAttentionBroadcast": lambda pipe: PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=2, current_timestep_callback=lambda: pipe.current_timestep
    ),
    "FasterCache": lambda pipe: FasterCacheConfig(
        spatial_attention_block_skip_range=2,
        is_guidance_distilled=True,
        current_timestep_callback=lambda: pipe.current_timestep,
    ),
}


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_cache_of_diffusers_is_refused_and_noticed(kind):
    pipe = TINY.build()
    plain = run(pipe, **TINY.call(steps=STEPS))
    pipe.transformer.enable_cache(CONFIGS[kind](pipe))
    with pytest.raises(holdover.EnableError, match="disable_cache"):
        holdover.enable(pipe, "mag_cache", **MAG)
    pipe.transformer.disable_cache()
    with holdover.enable(pipe, "mag_cache", **MAG):
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)
        pipe.transformer.enable_cache(CONFIGS[kind](pipe))
        with pytest.raises(holdover.EnableError, match="disable_cache"):
            run(pipe, **TINY.call(steps=STEPS))
        pipe.transformer.disable_cache()
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)


def test_hooks_without_a_config_are_noticed_too():
    pipe = TINY.build()
    apply_first_block_cache(pipe.transformer, FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(holdover.EnableError, match="FBCHeadBlockHook"):
        holdover.enable(pipe, "mag_cache", **MAG)


@pytest.mark.parametrize("method", ["mag_cache", "cache_dit"])
def test_a_cache_of_cache_dit_is_refused_and_noticed(method):
    cache_dit = pytest.importorskip("cache_dit")
    settings = MAG if method == "mag_cache" else {"residual_diff_threshold": 0.0}
    pipe = TINY.build()
    plain = run(pipe, **TINY.call(steps=STEPS))

    def enable_other():
        cache_dit.enable_cache(pipe, cache_config=cache_dit.DBCacheConfig(Fn_compute_blocks=1))

    enable_other()
    with pytest.raises(holdover.EnableError, match=r"cache_dit\.disable_cache\(pipe\)"):
        holdover.enable(pipe, method, **settings)
    cache_dit.disable_cache(pipe)
    with holdover.enable(pipe, method, **settings):
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)
        enable_other()
        with pytest.raises(holdover.EnableError, match=r"cache_dit\.disable_cache\(pipe\)"):
            run(pipe, **TINY.call(steps=STEPS))
        cache_dit.disable_cache(pipe)
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)
    assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)


def test_hooks_that_are_no_cache_are_left_alone():
    class Counting(ModelHook):
        _is_stateful = True
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

        def reset_state(self, module):
            return module

    pipe, hook = TINY.build(), Counting()
    plain = run(pipe, **TINY.call(steps=STEPS))
    HookRegistry.check_if_exists_or_initialize(pipe.transformer.transformer_blocks[0]).register_hook(hook, "counting")
    with holdover.enable(pipe, "mag_cache", **MAG):
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), plain)
    assert hook.calls == STEPS + 2  # one traces the blocks, one is the plain forward to compare with


def test_the_plain_pipeline_may_be_counted_with_a_cache_of_diffusers_on():
    pipe = TINY.build()
    pipe.transformer.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    cached = run(pipe, **TINY.call(steps=STEPS))
    with holdover.enable(pipe, "none") as cache:
        assert torch.equal(run(pipe, **TINY.call(steps=STEPS)), cached)
        assert cache.stats().computed == STEPS
