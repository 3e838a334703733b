"""Every item of the documented page of the package, used as the page describes it: backends, CacheContext, TeaCache.

The prompt-embedding cache of the same page has a file of its own, test_prompt_embed_cache.py.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from abc import ABC
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import nn

import holdover
from holdover.base import CacheBackend, DiffusionCacheConfig
from holdover.context import CacheContext
from holdover.errors import ConfigError, NotEnabledError
from holdover.policies.teacache import TeaCacheState
from holdover.teacache import (
    TeaCacheBackend,
    TeaCacheConfig,
    apply_teacache_hook,
    register_extractor,
    unregister_extractor,
)
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

FLUX = MODELS["FluxTransformer2DModel"]


def generate(pipe: Any, steps: int = 8, name: str = "FluxPipeline", seed: int = 0) -> torch.Tensor:
    return run(pipe, **PIPELINES[name].call(steps=steps, seed=seed))


@pytest.fixture
def flux() -> Any:
    return PIPELINES["FluxPipeline"].build()


def bare_loop(net: nn.Module, steps: int = 5, first: int = 0, **inputs: Any) -> list[torch.Tensor]:
    given = FLUX.inputs(**inputs)
    with torch.no_grad():
        return [net(**with_timestep(FLUX, given, 1 - i / steps))[0] for i in range(first, steps)]


MODULES = {
    "base": "CacheBackend",
    "cache_dit_backend": "CacheDiTBackend",
    "magcache": "MagCacheBackend",
    "prompt_embed_cache": "PromptEmbedCache",
    "selector": "get_cache_backend",
    "teacache": "TeaCacheBackend",
}


@pytest.mark.parametrize(("module", "name"), MODULES.items())
def test_modules(module: str, name: str) -> None:
    """Each module has what its description says, and nothing is run by importing it."""
    imported = importlib.import_module(f"holdover.{module}")
    assert imported.__doc__
    assert callable(getattr(imported, name))
    assert getattr(holdover, module) is imported


# CacheBackend


class Recorder(CacheBackend):
    """The least that the page asks of a backend."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.calls: list[Any] = []

    def enable(self, pipeline: Any) -> None:
        self.calls.append((type(pipeline.transformer).__name__, pipeline.__class__.__name__))
        self.enabled = True

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        self.calls.append((num_inference_steps, verbose))


class TestCacheBackend:
    def test_bases(self) -> None:
        assert issubclass(CacheBackend, ABC)
        assert {"enable", "refresh"} == CacheBackend.__abstractmethods__
        with pytest.raises(TypeError, match="abstract"):
            CacheBackend(DiffusionCacheConfig())

    def test_config(self) -> None:
        config = DiffusionCacheConfig(rel_l1_thresh=0.3)
        assert Recorder(config).config is config

    def test_enabled(self, flux: Any) -> None:
        backend = TeaCacheBackend(DiffusionCacheConfig())
        assert backend.enabled is False
        backend.enable(flux)
        assert backend.enabled is True
        backend.disable()
        assert backend.enabled is False

    def test_enable(self, flux: Any) -> None:
        backend = Recorder(DiffusionCacheConfig())
        backend.enable(flux)
        assert backend.calls == [("FluxTransformer2DModel", "FluxPipeline")]

    def test_is_enabled(self, flux: Any) -> None:
        backend = Recorder(DiffusionCacheConfig())
        assert backend.is_enabled() is False
        backend.enable(flux)
        assert backend.is_enabled() is True

    def test_refresh(self, flux: Any) -> None:
        backend = Recorder(DiffusionCacheConfig())
        backend.refresh(flux, 28)
        assert backend.calls == [(28, True)]


# CacheContext


def make_context(**changed: Any) -> CacheContext:
    hidden, encoder = torch.randn(2, 6, 8), torch.randn(2, 3, 8)
    fields: dict[str, Any] = {
        "modulated_input": hidden.clone(),
        "hidden_states": hidden,
        "encoder_hidden_states": encoder,
        "temb": torch.randn(2, 8),
        "run_transformer_blocks": lambda: (hidden, encoder),
        "postprocess": lambda states: states,
    }
    return CacheContext(**fields | changed)


class SingleStream(nn.Module):
    """The single-stream model of the page's examples; it has no list that could be traced."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time, self.norm_out = nn.Linear(1, 8), nn.LayerNorm(8)
        self.stack = nn.Module()
        self.stack.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.proj_out = nn.Linear(8, 4)
        self.runs = 0

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> Any:
        return extract(self, hidden_states, timestep).run_all()


class _Runnable(CacheContext):
    def run_all(self) -> Any:
        return self.postprocess(self.run_transformer_blocks()[0])


def extract(module: SingleStream, hidden_states: torch.Tensor, timestep: torch.Tensor) -> _Runnable:
    temb = module.time(timestep[:, None])[:, None]
    embedded = hidden_states + temb

    def run_blocks() -> tuple[torch.Tensor, ...]:
        module.runs += 1
        h = embedded
        for block in module.stack.blocks:
            h = h + torch.tanh(block(h))
        return (h,)

    def postprocess(h: torch.Tensor) -> Transformer2DModelOutput:
        return Transformer2DModelOutput(sample=module.proj_out(module.norm_out(h)))

    return _Runnable(embedded, embedded, None, temb, run_blocks, postprocess, {"steps": int(timestep * 10)})


@pytest.fixture
def single() -> Iterator[SingleStream]:
    yield SingleStream().eval().requires_grad_(False)
    unregister_extractor("SingleStream")


def single_loop(net: nn.Module, steps: int = 5) -> list[torch.Tensor]:
    latent = torch.linspace(-1, 1, 48).reshape(1, 6, 8)
    with torch.no_grad():
        return [net(latent * (1 - 0.02 * i), torch.full((1,), 1 - i / steps)).sample for i in range(steps)]


HOLD = TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0, compute_last=False)


class TestCacheContext:
    """An extractor builds one; the fields do what the page says of them."""

    def use(self, single: SingleStream, config: TeaCacheConfig = HOLD, **changed: Any) -> Any:
        register_extractor("SingleStream", lambda *args: dataclasses.replace(extract(*args), **changed))
        with holdover.enable(single, config) as cache:
            outputs = single_loop(single)
            return outputs, cache.stats().last.trace("1")

    def test_dataclass(self) -> None:
        assert dataclasses.is_dataclass(CacheContext)
        names = [field.name for field in dataclasses.fields(CacheContext)]
        assert names[:3] == ["modulated_input", "hidden_states", "encoder_hidden_states"]
        assert names[3:] == ["temb", "run_transformer_blocks", "postprocess", "extra_states"]

    def test_modulated_input(self, single: SingleStream) -> None:
        """It decides: one that never changes holds every step, one that does is computed."""
        config = HOLD.replaced(rel_l1_thresh=0.01)
        assert self.use(single, config, modulated_input=torch.ones(1, 1))[1] == "Chhhh"
        assert self.use(single, config)[1] == "CCCCC"

    def test_hidden_states(self, single: SingleStream) -> None:
        """A held step adds what the blocks added to the hidden states of that step."""
        plain = single_loop(single)
        outputs, trace = self.use(single)
        assert trace == "Chhhh"
        context = extract(single, torch.linspace(-1, 1, 48).reshape(1, 6, 8), torch.ones(1))
        residual = context.run_transformer_blocks()[0] - context.hidden_states
        latent = torch.linspace(-1, 1, 48).reshape(1, 6, 8) * 0.98
        now = extract(single, latent, torch.full((1,), 0.8))
        assert torch.equal(outputs[0], plain[0])
        assert torch.equal(outputs[1], now.postprocess(now.hidden_states + residual).sample)

    def test_encoder_hidden_states(self) -> None:
        """None for a single stream; the second stream is updated before postprocess, computed and held."""
        seen = []

        class Two(SingleStream):
            def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> Any:
                return hidden_states * 2 + (torch.ones(1, 2, 8) + 3).mean()

        def two(module: Two, hidden_states: torch.Tensor, timestep: torch.Tensor) -> CacheContext:
            def postprocess(h: torch.Tensor) -> torch.Tensor:
                seen.append(context.encoder_hidden_states.clone())
                return h + context.encoder_hidden_states.mean()

            encoder = torch.ones(1, 2, 8)
            blocks = lambda: (hidden_states * 2, encoder + 3)  # noqa: E731
            context = CacheContext(hidden_states, hidden_states, encoder, timestep, blocks, postprocess)
            return context

        register_extractor("Two", two)
        try:
            net = Two().eval()
            with torch.no_grad(), holdover.enable(net, HOLD) as cache:
                for i in range(3):
                    net(torch.ones(1, 6, 8), torch.full((1,), 1 - 0.1 * i))
                assert cache.stats().last.trace("1") == "Chh"
        finally:
            unregister_extractor("Two")
        assert all(torch.equal(encoder, torch.full((1, 2, 8), 4.0)) for encoder in seen)

    def test_temb(self, single: SingleStream) -> None:
        with pytest.raises(TypeError, match=r"CacheContext\.temb must be a torch.Tensor"):
            self.use(single, temb=0.5)

    def test_run_transformer_blocks(self, single: SingleStream) -> None:
        """It runs at computed steps only, and returns a tuple with the hidden states first."""
        single_loop(single)
        single.runs = 0
        self.use(single)
        assert single.runs == 2  # the first step, and the plain forward it is compared with
        with pytest.raises(TypeError, match="must return a tuple with the hidden states first"):
            self.use(single, run_transformer_blocks=lambda: torch.ones(1, 6, 8))
        with pytest.raises(ValueError, match="must keep the shape of the hidden_states"):
            self.use(single, run_transformer_blocks=lambda: (torch.ones(1, 2, 8),))

    def test_postprocess(self, single: SingleStream) -> None:
        """It may return a tensor, a tuple or diffusers' output class: what it returns is the model's output."""
        register_extractor("SingleStream", extract)
        with holdover.enable(single, HOLD), torch.no_grad():
            for t in (1.0, 0.9):
                output = single(torch.ones(1, 6, 8), torch.full((1,), t))
                assert isinstance(output, Transformer2DModelOutput)

    def test_extra_states(self, single: SingleStream) -> None:
        """They are with the state of the branch, for whoever has the hook."""
        register_extractor("SingleStream", extract)
        apply_teacache_hook(single, HOLD)
        single_loop(single)
        state = single._diffusers_hook.get_hook("teacache").state_manager.get_state()
        assert isinstance(state, TeaCacheState)
        assert state.extra_states == {"steps": 1} or state.extra_states == {"steps": 2}
        assert make_context().extra_states is None

    def test_validate(self) -> None:
        assert make_context().validate() is None
        make_context(encoder_hidden_states=None).validate()
        make_context(encoder_hidden_states=torch.ones(5, 3, 8)).validate()  # a batch of its own

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("modulated_input", None),
            ("hidden_states", np.ones((2, 6, 8))),
            ("encoder_hidden_states", [1.0]),
            ("temb", 0.5),
            ("run_transformer_blocks", None),
            ("postprocess", torch.ones(1)),
            ("extra_states", [1]),
        ],
    )
    def test_validate_type_error(self, field: str, value: Any) -> None:
        with pytest.raises(TypeError, match=rf"CacheContext\.{field}"):
            make_context(**{field: value}).validate()

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("modulated_input", torch.ones(3, 6, 8), "modulated_input has batch size 3 and hidden_states 2"),
            ("modulated_input", torch.ones(2, 6, 8, device="meta"), "modulated_input is on meta and hidden_states on"),
            ("hidden_states", torch.ones(2, 0, 8), "hidden_states is empty"),
            ("temb", torch.ones(2, 8, dtype=torch.int64), "temb must hold floating-point numbers"),
        ],
    )
    def test_validate_value_error(self, field: str, value: Any, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make_context(**{field: value}).validate()

    @pytest.mark.parametrize(
        ("field", "value"), [("run_transformer_blocks", lambda states: (states,)), ("postprocess", lambda: None)]
    )
    def test_validate_runtime_error(self, field: str, value: Any) -> None:
        with pytest.raises(RuntimeError, match=rf"CacheContext\.{field} must take"):
            make_context(**{field: value}).validate()


# TeaCacheBackend


class TestTeaCacheBackend:
    def test_bases(self) -> None:
        assert issubclass(TeaCacheBackend, CacheBackend)

    def test_example(self, flux: Any) -> None:
        plain = generate(flux, 20)
        backend = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=0.4))
        backend.enable(flux)
        backend.refresh(flux, num_inference_steps=20)
        image = generate(flux, 20)
        assert backend.config.rel_l1_thresh == 0.4
        assert backend.stats().last.held["cond"] > 0
        assert not torch.equal(image, plain)
        backend.disable()
        assert torch.equal(generate(flux, 20), plain)

    def test_enable(self, flux: Any) -> None:
        """The transformer and its class are found in the pipeline."""
        backend = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=0.2))
        assert backend.enable(flux) is None
        assert backend.is_enabled()
        assert backend.settings.transformer_type == "FluxTransformer2DModel"
        assert backend.settings.rel_l1_thresh == 0.2

    def test_enable_as_documented_forces_no_last_step_and_clamps_nothing(self, flux: Any) -> None:
        """A DiffusionCacheConfig means what the page says; TeaCacheConfig's own defaults are the paper's."""
        documented = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=1e9, coefficients=[1.0, 0.0]))
        documented.enable(flux)
        generate(flux)
        assert documented.stats().last.trace("cond") == "Chhhhhhh"
        assert not documented.settings.clamp
        documented.disable()
        with holdover.enable(flux, "tea_cache", rel_l1_thresh=1e9, coefficients=[1.0, 0.0]) as cache:
            generate(flux)
            assert cache.stats().last.trace("cond") == "ChhhhhhC"
            with cache.using(compute_last=False):
                generate(flux)
                assert cache.stats().last.trace("cond") == "Chhhhhhh"

    def test_the_polynomial_is_clamped_unless_that_is_switched_off(self, flux: Any) -> None:
        """-1 outside of its range counts as 1, as in vLLM-Omni; clamped, it counts as 0."""
        settings = {"coefficients": [-1.0], "rel_l1_thresh": 0.5}
        with holdover.enable(flux, "tea_cache", **settings) as cache:
            generate(flux)
            assert cache.stats().last.trace("cond") == "ChhhhhhC"
            with cache.using(clamp=False):
                generate(flux)
                assert cache.stats().last.trace("cond") == "CCCCCCCC"

    def test_refresh(self) -> None:
        """Residuals and accumulators of a loop that was left half-way are forgotten."""
        net = FLUX.build()
        plain = bare_loop(net, first=3)
        backend = TeaCacheBackend(TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0))
        backend.enable(net)
        bare_loop(net)
        assert backend.refresh(net, num_inference_steps=2) is None
        outputs = bare_loop(net, first=3)
        assert torch.equal(outputs[0], plain[0])
        assert [g.trace("1") for g in backend.stats().generations] == ["Chhhh", "CC"]

    @pytest.mark.parametrize("verbose", [True, False])
    def test_refresh_verbose(self, flux: Any, verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
        backend = TeaCacheBackend(DiffusionCacheConfig())
        backend.enable(flux)
        with caplog.at_level(logging.INFO, "holdover"):
            backend.refresh(flux, 9, verbose=verbose)
        assert ["9 steps" in message for message in caplog.messages] == [True] * verbose

    def test_refresh_of_another_pipeline_is_an_error(self, flux: Any) -> None:
        backend = TeaCacheBackend(DiffusionCacheConfig())
        backend.enable(flux)
        with pytest.raises(NotEnabledError, match="not on that"):
            backend.refresh(PIPELINES["FluxPipeline"].build(), 9)


# TeaCacheConfig


class TestTeaCacheConfig:
    def test_dataclass(self) -> None:
        assert dataclasses.is_dataclass(TeaCacheConfig)

    def test_coefficients(self, flux: Any) -> None:
        """Given ones are used; without any, those of the model."""
        assert TeaCacheConfig().coefficients is None
        with holdover.enable(flux, TeaCacheConfig(coefficients=[0.0, 1.0], rel_l1_thresh=2.5)) as cache:
            generate(flux)
            assert cache.stats().last.trace("cond") == "ChhChhCC"  # every step adds 1
        with holdover.enable(flux, TeaCacheConfig(rel_l1_thresh=0.4)) as cache:
            assert "profile" in cache.stats().notes[0]
        with pytest.raises(ConfigError, match="must be finite"):
            TeaCacheConfig(coefficients=[])

    def test_rel_l1_thresh(self, flux: Any) -> None:
        """More is held under a larger threshold; the accumulated change is compared with it."""
        assert TeaCacheConfig().rel_l1_thresh == 0.2
        held = []
        for threshold in (0.0, 0.1, 0.3, 1e9):
            with holdover.enable(flux, TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=threshold)) as cache:
                generate(flux)
                held.append(cache.stats().held)
        assert held == sorted(held)
        assert held[0] == 0 < held[-1]

    def test_transformer_type(self, single: SingleStream) -> None:
        """The class whose constants and extractor are used; by default, the transformer's own."""
        assert TeaCacheConfig().transformer_type == "QwenImageTransformer2DModel"
        register_extractor("SomethingElse", extract)
        try:
            with holdover.enable(single, HOLD.replaced(transformer_type="SomethingElse")) as cache:
                single_loop(single)
                assert "extractor" in str(cache.reports()["transformer"].stack)
                assert cache.stats().last.trace("1") == "Chhhh"
        finally:
            unregister_extractor("SomethingElse")


# The functions


class TestApplyTeacacheHook:
    def test_it_intercepts_the_forward(self) -> None:
        net = FLUX.build()
        plain = bare_loop(net)
        assert apply_teacache_hook(net, HOLD) is None
        outputs = bare_loop(net)
        hook = net._diffusers_hook.get_hook("teacache")
        assert hook.stats().last.trace("1") == "Chhhh"
        assert torch.equal(outputs[0], plain[0])
        assert not torch.equal(outputs[1], plain[1])
