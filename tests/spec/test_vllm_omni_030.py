"""Names of vLLM-Omni 0.30 beyond its pages, and its recorded results (`python -m benchmarks.vllm_omni_parity`)."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.vllm_omni_parity import Ours, run_case

import holdover
from holdover.data import DiffusionCacheConfig
from holdover.engine.backend import find_cache
from holdover.errors import ConfigError, EnableError
from holdover.magcache import (
    Flux2MagCacheStrategy,
    FluxMagCacheStrategy,
    MagCacheConfig,
    MagCacheStrategy,
    MagCacheStrategyRegistry,
    get_strategy,
)
from holdover.profiles import shipped
from holdover.teacache import TeaCacheBackend, TeaCacheConfig, apply_teacache_hook
from holdover.teacache.backend import CUSTOM_TEACACHE_ENABLERS
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

RECORDED = json.loads(Path(__file__).with_name("vllm_omni.json").read_text())["cases"]
FLUX = "FluxTransformer2DModel"


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [case for case in RECORDED if case["kind"] == kind]


def differing(kind: str) -> list[dict[str, Any]]:
    """The recorded cases that holdover decides or computes differently."""
    ours, found = Ours(), []
    for case in of_kind(kind):
        asked = {name: value for name, value in case.items() if name != "result"}
        if (result := run_case(asked, ours)) != case["result"]:
            found.append(case | {"ours": result})
    return found


@pytest.mark.parametrize("kind", ["nearest_interp", "mag_decisions", "polynomial", "residual"])
def test_same_as_recorded(kind: str) -> None:
    assert len(of_kind(kind)) >= 4
    assert differing(kind) == []


def test_compute_calibration_metrics_as_recorded() -> None:
    """To the rounding of float32: other processors add in another order."""
    for case in of_kind("calibration_metrics"):
        ours = Ours().calibration_metrics(case["seed"], case["shape"])
        assert ours == pytest.approx([float.fromhex(value) for value in case["result"]], rel=1e-6)


def test_tea_decisions_as_recorded() -> None:
    """With the polynomial as it is and a last step that may be held, as a DiffusionCacheConfig sets them."""
    for case in of_kind("tea_decisions"):
        asked = {name: case[name] for name in ("name", "threshold", "scale", "steps")}
        assert Ours().tea_decisions(**asked) == case["result"], case


# MagCacheConfig


def test_MagCacheConfig_short_names() -> None:
    short = MagCacheConfig(threshold=0.1, max_skip_steps=3, retention_ratio=0.2, num_inference_steps=12)
    long = MagCacheConfig(mag_threshold=0.1, mag_max_skip_steps=3, mag_retention_ratio=0.2, num_inference_steps=12)
    assert short == long
    assert (short.threshold, short.max_skip_steps, short.retention_ratio) == (0.1, 3, 0.2)
    assert short.replaced(mag_threshold=0.3).threshold == 0.3
    with pytest.raises(ConfigError, match="threshold and mag_threshold are the same setting"):
        MagCacheConfig(threshold=0.1, mag_threshold=0.1)
    with pytest.raises(ConfigError, match=r"MagCacheConfig\.mag_max_skip_steps must be at least 0"):
        MagCacheConfig(max_skip_steps=-1)


def test_MagCacheConfig_transformer_type() -> None:
    """The class whose strategy and ratios are used."""
    pipe = PIPELINES["SanaPipeline"].build()
    with pytest.raises(ConfigError, match="No magnitude ratios ship for SanaTransformer2DModel"):
        holdover.enable(pipe, MagCacheConfig())
    with holdover.enable(pipe, MagCacheConfig(transformer_type=FLUX)) as cache:
        assert cache.stats().notes == ("transformer: ratios mc.flux1-dev",)

    class Ratios(MagCacheStrategy):
        @property
        def mag_ratios(self) -> torch.Tensor:
            return torch.full((6,), 1.01)

    MagCacheStrategyRegistry.register("MyKind", Ratios())
    try:
        with holdover.enable(pipe, MagCacheConfig(transformer_type="MyKind")) as cache:
            assert cache.stats().notes == ("transformer: ratios Ratios",)
    finally:
        MagCacheStrategyRegistry.unregister("MyKind")
    with pytest.raises(ConfigError, match="No magnitude ratios ship for MyKind"):
        holdover.enable(pipe, MagCacheConfig(transformer_type="MyKind"))


# Strategies


def test_MagCacheStrategyRegistry() -> None:
    strategy = MagCacheStrategy()
    assert MagCacheStrategyRegistry.get_if_exists("MyTransformer") is None
    with pytest.raises(ValueError, match="No MagCache strategy is registered for 'MyTransformer'"):
        MagCacheStrategyRegistry.get("MyTransformer")
    MagCacheStrategyRegistry.register("MyTransformer", strategy)
    try:
        assert MagCacheStrategyRegistry.get("MyTransformer") is strategy
        assert MagCacheStrategyRegistry.get_if_exists("MyTransformer") is strategy
        assert get_strategy("MyTransformer") is strategy
    finally:
        MagCacheStrategyRegistry.unregister("MyTransformer")
    assert MagCacheStrategyRegistry.get_if_exists("MyTransformer") is None


def test_get_strategy() -> None:
    """FLUX.1 and FLUX.2 have strategies from the start; a registered one comes before them."""
    assert type(get_strategy(FLUX)) is FluxMagCacheStrategy
    assert type(get_strategy("Flux2Transformer2DModel")) is Flux2MagCacheStrategy
    with pytest.raises(ConfigError, match="Did you mean 'FluxTransformer2DModel'"):
        get_strategy("FluxTransformer2D")
    mine = MagCacheStrategy()
    MagCacheStrategyRegistry.register(FLUX, mine)
    try:
        assert get_strategy(FLUX) is mine
    finally:
        MagCacheStrategyRegistry.unregister(FLUX)
    assert type(get_strategy(FLUX)) is FluxMagCacheStrategy


@pytest.mark.parametrize("name", ["FluxPipeline", "Flux2Pipeline"])
def test_Flux2MagCacheStrategy(name: str) -> None:
    """A shipped strategy, registered by hand or not: the model is held by what tracing finds."""
    tiny = PIPELINES[name]
    pipe = tiny.build()
    kind = type(pipe.transformer).__name__
    strategy = get_strategy(kind)
    settings = {"mag_ratios": strategy.mag_ratios, "mag_threshold": 10.0}
    with holdover.enable(pipe, "mag_cache", **settings) as cache:
        expected = run(pipe, **tiny.call(steps=6))
        assert cache.stats().held > 0
    MagCacheStrategyRegistry.register(kind, strategy)
    try:
        with holdover.enable(pipe, "mag_cache", mag_threshold=10.0) as cache:
            assert torch.equal(run(pipe, **tiny.call(steps=6)), expected)
            assert type(strategy).__name__ in cache.stats().notes[0]
    finally:
        MagCacheStrategyRegistry.unregister(kind)


def test_Flux2MagCacheStrategy_of_one_sequence() -> None:
    """Single-stream blocks return text and image in one sequence; vLLM-Omni would then hold nothing at all."""
    strategy, image, joint = Flux2MagCacheStrategy(), torch.randn(1, 6, 4), torch.randn(1, 9, 4)
    residual = strategy.compute_residual(joint, image)
    assert torch.equal(residual, joint[:, 3:] - image)
    assert torch.equal(strategy.apply_residual(image, residual), image + residual)
    held = strategy.apply_residual(torch.zeros(1, 9, 4), residual)
    assert torch.equal(held[:, 3:], residual)
    assert not held[:, :3].any()
    single, dual = (
        type(name, (torch.nn.Module,), {}) for name in ("Flux2SingleTransformerBlock", "Flux2TransformerBlock")
    )
    assert strategy.register_block_metadata(single).return_encoder_hidden_states_index is None
    assert strategy.register_block_metadata(dual).return_hidden_states_index == 1


def test_nearest_interp() -> None:
    ratios = FluxMagCacheStrategy.FLUX_MAG_RATIOS
    assert torch.equal(FluxMagCacheStrategy.nearest_interp(ratios, 28), ratios)
    assert torch.equal(FluxMagCacheStrategy().nearest_interp(ratios, 1), ratios[-1:])


def test_compute_calibration_metrics() -> None:
    """A strategy that overrides it is what a calibration measures with."""
    strategy = MagCacheStrategy()
    first, second = torch.randn(1, 9, 4), torch.randn(1, 9, 4)
    assert strategy.compute_calibration_metrics(first, None) == (1.0, 0.0, 0.0)
    ratio, std, distance = strategy.compute_calibration_metrics(second, first)
    ratios = second.norm(dim=-1) / first.norm(dim=-1)
    assert (ratio, std) == pytest.approx((float(ratios.mean()), float(ratios.std())), rel=1e-5)
    assert distance == pytest.approx(float((1 - torch.cosine_similarity(first, second, dim=-1)).mean()), abs=1e-6)
    both = strategy.compute_calibration_metrics((second[:, :2], second[:, 2:]), (first[:, :2], first[:, 2:]))
    assert both == pytest.approx((ratio, std, distance), rel=1e-5)
    one_token = strategy.compute_calibration_metrics(second[:, :1], first[:, :1])
    assert one_token[1] == 0.0

    class Mine(MagCacheStrategy):
        def compute_calibration_metrics(self, current: Any, previous: Any) -> tuple[float, float, float]:
            return 1.5, 0.25, 0.125

    tiny = PIPELINES["FluxPipeline"]
    pipe = tiny.build()
    MagCacheStrategyRegistry.register(FLUX, Mine())
    try:
        with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
            run(pipe, **tiny.call(steps=4))
            measured = cache.calibration().branch("cond")
    finally:
        MagCacheStrategyRegistry.unregister(FLUX)
    assert (measured.ratios, measured.stds) == ((1.0, 1.5, 1.5, 1.5), (0.0, 0.25, 0.25, 0.25))
    assert measured.cosine_distances == (0.0, 0.125, 0.125, 0.125)


# TeaCache


@pytest.mark.parametrize("name", ["Bagel", "SenseNovaU1ForCausalLM", "HunyuanImage3Pipeline"])
def test_coefficients(name: str) -> None:
    """Constants of models that only vLLM-Omni has, with their source; `transformer_type` selects them."""
    profile = next(p for p in shipped("tea_cache") if p.transformer_class == name)
    assert "wheel 0.30.0" in dict(profile.source)["repo"]
    tiny = MODELS[FLUX]
    net = tiny.build()
    backend = TeaCacheBackend(TeaCacheConfig(rel_l1_thresh=0.4, transformer_type=name))
    backend.enable(net)
    assert f"profile vllm.{name}" in backend.stats().notes[0]
    with torch.no_grad():
        for step in range(4):
            net(**with_timestep(tiny, tiny.inputs(), 1 - step / 4))
    assert len(backend.stats().last.trace("1")) == 4
    backend.disable()


def test_rel_l1_thresh_none_is_the_default_of_the_model() -> None:
    assert TeaCacheConfig(rel_l1_thresh=None).threshold == 0.2
    assert TeaCacheConfig(rel_l1_thresh=None, transformer_type="MiniMaxH3DiTModel").threshold == 0.17
    assert TeaCacheConfig(rel_l1_thresh=0.3, transformer_type="MiniMaxH3DiTModel").threshold == 0.3
    tiny = PIPELINES["FluxPipeline"]
    pipe, traces = tiny.build(), []
    for threshold in (None, 0.2):
        backend = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=threshold, coefficients=[1.0, 0.0]))
        backend.enable(pipe)
        run(pipe, **tiny.call(steps=8))
        traces.append(backend.stats().last.trace("cond"))
        backend.disable()
    assert traces[0] == traces[1]
    assert "h" in traces[0]


class BagelPipeline(torch.nn.Module):
    """Has its transformer under another name, as vLLM-Omni's has; the loop is that of any pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.bagel = MODELS[FLUX].build()

    def forward(self, steps: int) -> torch.Tensor:
        tiny = MODELS[FLUX]
        with torch.no_grad():
            outputs = [self.bagel(**with_timestep(tiny, tiny.inputs(), 1 - i / steps))[0] for i in range(steps)]
        return torch.stack(outputs)


def enable_custom(pipeline: Any, config: Any) -> None:
    """An enabler as a user writes it."""
    apply_teacache_hook(pipeline.bagel, TeaCacheConfig(rel_l1_thresh=config.rel_l1_thresh, coefficients=[1.0, 0.0]))


@pytest.mark.parametrize("enabler", [None, enable_custom], ids=["shipped", "custom"])
def test_CUSTOM_TEACACHE_ENABLERS(enabler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    if enabler is not None:
        monkeypatch.setitem(CUSTOM_TEACACHE_ENABLERS, "BagelPipeline", enabler)
    pipeline = BagelPipeline()
    plain = pipeline(6)
    backend = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=1e9))
    backend.enable(pipeline)
    assert backend.is_enabled()
    backend.refresh(pipeline, 6)
    held = pipeline(6)
    assert torch.equal(held[0], plain[0])
    assert not torch.equal(held, plain)
    assert backend.stats().held > 0
    assert ("profile vllm.Bagel" in backend.stats().notes[0]) == (enabler is None)
    backend.disable()
    assert not backend.is_enabled()
    assert torch.equal(pipeline(6), plain)


def test_CUSTOM_TEACACHE_ENABLERS_all_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An enabler that fails half-way leaves nothing behind; one that does nothing is an error."""

    def fail(pipeline: Any, config: Any) -> None:
        enable_custom(pipeline, config)
        raise RuntimeError("half-way")

    pipeline, backend = BagelPipeline(), TeaCacheBackend(DiffusionCacheConfig())
    monkeypatch.setitem(CUSTOM_TEACACHE_ENABLERS, "BagelPipeline", fail)
    with pytest.raises(RuntimeError, match="half-way"):
        backend.enable(pipeline)
    assert find_cache(pipeline.bagel) is None
    monkeypatch.setitem(CUSTOM_TEACACHE_ENABLERS, "BagelPipeline", lambda pipeline, config: None)
    with pytest.raises(EnableError, match="enabler of BagelPipeline put caches on 0 transformers"):
        backend.enable(pipeline)
    assert not backend.is_enabled()
