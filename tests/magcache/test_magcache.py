"""MagCache on real pipelines: profiles, branches, calibration, strategies."""

from __future__ import annotations

import logging
from itertools import pairwise

import pytest
import torch
from diffusers import MagCacheConfig as Theirs

import holdover
from holdover.magcache import (
    FluxMagCacheStrategy,
    MagCacheStrategy,
    TransformerBlockMetadata,
    register_strategy,
    unregister_strategy,
)
from holdover.profiles import load
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

WITH_PROFILE = [
    "FluxPipeline",
    "FluxKontextPipeline",
    "Flux2Pipeline",
    "QwenImagePipeline",
    "QwenImageEditPipeline",
    "WanPipeline",
    "WanPipeline[2.2]",
    "WanImageToVideoPipeline",
    "WanVACEPipeline",
    "HunyuanVideoPipeline",
    "ChromaPipeline",
]


@pytest.mark.parametrize("name", WITH_PROFILE)
def test_published_ratios_are_found_and_hold(name):
    tiny = PIPELINES[name]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=12))
    with holdover.enable(pipe, "mag_cache", mag_threshold=0.0):
        assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)
    with holdover.enable(pipe, "mag_cache", mag_threshold=1e9, mag_max_skip_steps=3) as cache:
        held = run(pipe, **tiny.call(steps=12))
        assert cache.stats().held > 0
        assert "ratios" in cache.stats().notes[0]
    assert torch.isfinite(held).all()


def test_a_model_without_ratios_says_how_to_measure_them():
    pipe = PIPELINES["SanaPipeline"].build()
    with pytest.raises(holdover.ConfigError, match="calibrate=True"):
        holdover.enable(pipe, "mag_cache")


def test_ratios_by_branch():
    tiny = PIPELINES["FluxPipeline[true_cfg]"]
    pipe = tiny.build()
    ratios = {"cond": [1.001] * 12, "uncond": [1.2] * 12}
    with holdover.enable(pipe, "mag_cache", mag_ratios=ratios, mag_threshold=0.1, mag_max_skip_steps=3) as cache:
        run(pipe, **tiny.call(steps=12))
        generation = cache.stats().last
    assert generation.trace("cond") == "ChhhChhhChhh"
    assert generation.trace("uncond") == "C" * 12


def measured_by_hand(pipe, tiny, steps):
    """The residual of the image stream at each step, from hooks on the first and the last block."""
    inputs, residuals = [], []
    transformer = pipe.transformer
    head = transformer.transformer_blocks[0].register_forward_pre_hook(
        lambda m, a, k: inputs.append(k["hidden_states"]), with_kwargs=True
    )
    tail = transformer.single_transformer_blocks[-1].register_forward_hook(
        lambda m, a, k, out: residuals.append(out[1] - inputs[-1]), with_kwargs=True
    )
    run(pipe, **tiny.call(steps=steps))
    head.remove()
    tail.remove()
    return residuals


@pytest.mark.parametrize("name", ["calibrate", "mag_calibrate"])
def test_calibration_measures_what_the_paper_defines(name, tmp_path, caplog):
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    plain = run(pipe, **tiny.call(steps=8))
    path = str(tmp_path / "ratios.json")
    caplog.set_level(logging.INFO, logger="holdover")
    with holdover.enable(pipe, "mag_cache", **{name: True}, calibration_path=path) as cache:
        assert torch.equal(run(pipe, **tiny.call(steps=8)), plain)
        assert cache.stats().held == 0
        profile = cache.calibration()
    residuals = measured_by_hand(pipe, tiny, 8)
    ratios, stds, cosines = [1.0], [0.0], [0.0]
    for before, now in pairwise(residuals):
        ratio = now.norm(dim=-1) / before.norm(dim=-1)
        ratios.append(float(ratio.mean()))
        stds.append(float(ratio.std()))
        cosines.append(1 - float(torch.cosine_similarity(now, before, dim=-1).mean()))
    measured = profile.branch("cond")
    assert measured.ratios == pytest.approx(ratios, rel=1e-5)
    assert measured.stds == pytest.approx(stds, rel=1e-4, abs=1e-7)
    assert measured.cosine_distances == pytest.approx(cosines, rel=1e-3, abs=1e-6)
    assert profile.num_inference_steps == len(profile.noise) == 8
    assert load(path) == profile
    for word in ("norm_ratios", "norm_stds", "cos_dises"):
        assert word in caplog.text


def test_calibration_of_several_generations_is_their_mean_and_serves_other_step_counts(tmp_path):
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    singles = []
    for seed in (0, 1):
        with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
            run(pipe, **tiny.call(steps=10, seed=seed))
            singles.append(cache.calibration())
    path = str(tmp_path / "qwen.json")
    with holdover.enable(pipe, "mag_cache", calibrate=True, calibration_path=path) as cache:
        for seed in (0, 1):
            run(pipe, **tiny.call(steps=10, seed=seed))
        both = cache.calibration()
    for branch in ("cond", "uncond"):
        mean = [(a + b) / 2 for a, b in zip(*(s.ratios(branch) for s in singles), strict=True)]
        assert both.ratios(branch) == pytest.approx(mean)
    with holdover.enable(pipe, "mag_cache", profile=path, mag_threshold=1e9) as cache:
        run(pipe, **tiny.call(steps=17))
        assert cache.stats().held > 0


def test_calibration_before_a_generation_is_an_error():
    pipe = PIPELINES["FluxPipeline"].build()
    with holdover.enable(pipe, "mag_cache", calibrate=True) as cache, pytest.raises(holdover.NotEnabledError):
        cache.calibration()
    with holdover.enable(pipe, "mag_cache") as cache, pytest.raises(holdover.NotEnabledError):
        cache.calibration()


@pytest.mark.parametrize("steps", [20, 28, 50])
def test_nearest_interpolation_reproduces_the_published_schedule(steps):
    """diffusers' own MagCache, on the same model, computes the same steps."""
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    ratios = FluxMagCacheStrategy.FLUX_MAG_RATIOS
    common = {"max_skip_steps": 3, "retention_ratio": 0.2, "threshold": 0.06}
    pipe.transformer.enable_cache(Theirs(num_inference_steps=steps, mag_ratios=ratios, **common))
    calls = []
    pipe.transformer.transformer_blocks[0].attn.register_forward_hook(lambda *_: calls.append(1))
    reference = run(pipe, **tiny.call(steps=steps))
    ours = tiny.build()
    settings = {f"mag_{name}": value for name, value in common.items()}
    with holdover.enable(ours, "mag_cache", mag_ratios=ratios, interpolation="nearest", **settings) as cache:
        result = run(ours, **tiny.call(steps=steps))
        assert cache.stats().computed == len(calls)
    assert torch.allclose(result, reference, rtol=1e-4, atol=1e-5)


def test_upstream_never_holds_step_11_of_28_on_flux():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    with holdover.enable(pipe, "mag_cache", mag_threshold=1e9, mag_max_skip_steps=28) as cache:
        run(pipe, **tiny.call(steps=28))
        forwards = cache.stats().last.forwards
    assert forwards[11].computed
    assert forwards[11].reason == "a step this model never holds"
    assert [v.step for v in forwards if v.computed] == [0, 1, 2, 11]


class DualStream(MagCacheStrategy):
    """A strategy that says by hand what the trace finds by itself, and counts how often it is asked."""

    def __init__(self):
        self.calls = []

    @property
    def mag_ratios(self):
        return torch.full((12,), 1.01)

    def compute_residual(self, output, head_input):
        self.calls.append("compute_residual")
        hidden = output[1] if isinstance(output, tuple) else output
        return hidden - head_input

    def apply_residual_tuple(self, hidden_states, encoder_hidden_states, residual):
        self.calls.append("apply_residual_tuple")
        return hidden_states + residual, encoder_hidden_states

    def register_block_metadata(self, block_class):
        return TransformerBlockMetadata(return_hidden_states_index=1, return_encoder_hidden_states_index=0)


def test_a_strategy_that_overrides_the_residual_is_followed():
    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    settings = {"mag_threshold": 0.5, "mag_max_skip_steps": 2}
    with holdover.enable(pipe, "mag_cache", mag_ratios=[1.01] * 12, **settings):
        expected = run(pipe, **tiny.call(steps=12))
    strategy = DualStream()
    register_strategy("FluxTransformer2DModel", strategy)
    try:
        with holdover.enable(pipe, "mag_cache", **settings) as cache:
            result = run(pipe, **tiny.call(steps=12))
            assert cache.stats().last.trace("cond") == "ChhChhChhChh"
    finally:
        unregister_strategy("FluxTransformer2DModel")
    assert strategy.calls.count("compute_residual") == 4
    assert strategy.calls.count("apply_residual_tuple") == 9  # eight held steps and the replay check
    assert torch.allclose(result, expected, rtol=1e-5, atol=1e-6)


def test_a_strategy_that_is_wrong_is_refused():
    class Wrong(DualStream):
        def apply_residual_tuple(self, hidden_states, encoder_hidden_states, residual):
            return hidden_states + 0.5 * residual, encoder_hidden_states

    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    register_strategy("FluxTransformer2DModel", Wrong())
    try:
        with holdover.enable(pipe, "mag_cache"), pytest.raises(holdover.UnsupportedModelError, match="does not replay"):
            run(pipe, **tiny.call(steps=4))
    finally:
        unregister_strategy("FluxTransformer2DModel")


STREAMS = {"HunyuanVideoTransformer3DModel": 2, "ChromaTransformer2DModel": 3, "QwenImageTransformer2DModel": 2}


@pytest.mark.parametrize("name", STREAMS)
def test_one_residual_a_stream_is_held_and_no_more(name):
    tiny = MODELS[name]
    model = tiny.build()
    inputs = tiny.inputs()
    with torch.no_grad(), holdover.enable(model, "mag_cache", mag_ratios=[1.0] * 4) as cache:
        model(**inputs)
        stack = cache.reports()["transformer"].stack
        assert cache.stats().last.peak_bytes > 0
    assert len(stack.group_names) == len(stack.segments) == STREAMS[name]
