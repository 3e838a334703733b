"""Every item of the documented page of `teacache.hook`, used as the page describes it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import StateManager
from torch import nn

import holdover
from holdover.context import CacheContext
from holdover.engine.backend import find_cache
from holdover.engine.hooks import has_hooks
from holdover.errors import ConfigError, EnableError, UnsupportedModelError
from holdover.profiles import shipped
from holdover.teacache import TeaCacheConfig, TeaCacheState, register_extractor, unregister_extractor
from holdover.teacache.hook import TeaCacheHook, apply_teacache_hook
from snapshots import differences, snapshot
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

FLUX = MODELS["FluxTransformer2DModel"]
HOLD = TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0)
OFF = TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=0.0)
STEPS = 5


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.image, self.text = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, encoder: torch.Tensor, temb: torch.Tensor) -> Any:
        hidden = hidden + self.image(self.norm(hidden) + temb) + encoder.mean(1, keepdim=True)
        return encoder + self.text(encoder), hidden


class DualStream(nn.Module):
    """A model with two streams, both of which its output depends on."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(1, width)
        self.transformer_blocks = nn.ModuleList(Block(width) for _ in range(3))
        self.proj_out, self.text_out = nn.Linear(width, width), nn.Linear(width, width)
        self.runs = 0

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor) -> Any:
        temb = self.time(timestep[:, None])[:, None]
        self.runs += 1
        for block in self.transformer_blocks:
            encoder_hidden_states, hidden_states = block(hidden_states, encoder_hidden_states, temb)
        return self.proj_out(hidden_states) + self.text_out(encoder_hidden_states).mean(1, keepdim=True)


def extract(module: DualStream, hidden_states: Any, encoder_hidden_states: Any, timestep: Any) -> CacheContext:
    temb = module.time(timestep[:, None])[:, None]

    def run_blocks() -> tuple[torch.Tensor, ...]:
        h, e = hidden_states, encoder_hidden_states
        module.runs += 1
        for block in module.transformer_blocks:
            e, h = block(h, e, temb=temb)
        return (h, e)

    def postprocess(h: torch.Tensor) -> torch.Tensor:
        return module.proj_out(h) + module.text_out(context.encoder_hidden_states).mean(1, keepdim=True)

    context = CacheContext(
        modulated_input=module.transformer_blocks[0].norm(hidden_states) + temb,
        hidden_states=hidden_states,
        encoder_hidden_states=encoder_hidden_states,
        temb=temb,
        run_transformer_blocks=run_blocks,
        postprocess=postprocess,
        extra_states={"timestep": float(timestep)},
    )
    return context


@pytest.fixture
def dual() -> Iterator[DualStream]:
    register_extractor("DualStream", extract)
    yield DualStream().eval().requires_grad_(False)
    unregister_extractor("DualStream")


def loop(module: Any, steps: int = STEPS, seed: int = 1) -> list[torch.Tensor]:
    """A loop in which the latent changes at every step."""
    generator = torch.Generator().manual_seed(seed)
    image, text = (torch.randn(1, tokens, 8, generator=generator) for tokens in (6, 4))
    with torch.no_grad():
        return [module(image * (1 - 0.05 * i), text, torch.full((1,), 1.0 - i / steps)) for i in range(steps)]


def flux_loop(net: nn.Module, steps: int = STEPS, call: Any = None, **inputs: Any) -> list[torch.Tensor]:
    given = FLUX.inputs(**inputs)
    with torch.no_grad():
        return [(call or net)(**with_timestep(FLUX, given, 1 - i / steps))[0] for i in range(steps)]


def attach(module: nn.Module, hook: TeaCacheHook) -> TeaCacheHook:
    HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "teacache")
    return hook


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def trace(hook: TeaCacheHook) -> str:
    generation = hook.stats().last
    return generation.trace(generation.branches[0])


class TestTeaCacheHook:
    def test_bases(self) -> None:
        assert issubclass(TeaCacheHook, ModelHook)

    def test_zero_changes_to_model_code(self) -> None:
        """A model without an extractor is traced."""
        net = FLUX.build()
        plain = flux_loop(net)
        hook = attach(net, TeaCacheHook(OFF))
        assert hook.extractor_fn is None
        assert same(flux_loop(net), plain)

    def test_cfg_aware_with_separate_states(self) -> None:
        """Two conditionings without a name are two branches, whatever the order of their forwards."""
        net = FLUX.build()
        hook = attach(net, TeaCacheHook(HOLD))
        cond, uncond = FLUX.inputs(seed=0), FLUX.inputs(seed=1)
        with torch.no_grad():
            for i in range(4):
                for given in (cond, uncond) if i % 2 else (uncond, cond):
                    net(**with_timestep(FLUX, given, 1 - i / 4))
        assert hook.stats().last.trace("1") == hook.stats().last.trace("2") == "Chhh"

    def test_branches_are_those_of_cache_context(self) -> None:
        tiny = PIPELINES["FluxPipeline[true_cfg]"]
        pipe = tiny.build()
        hook = attach(pipe.transformer, TeaCacheHook(HOLD))
        run(pipe, **tiny.call(steps=4))
        assert hook.stats().generations[0].branches == ("cond", "uncond")
        assert hook.stats().held == 6

    def test_model_specific_rescaling_and_auto_detection(self) -> None:
        hook = TeaCacheHook(TeaCacheConfig(rel_l1_thresh=0.4))
        attach(FLUX.build(), hook)
        profile = next(p for p in shipped("tea_cache") if p.transformer_class == "FluxTransformer2DModel")
        assert tuple(hook.rescale_func.coeffs) == pytest.approx(profile.fit("").coefficients)

    def test_config(self) -> None:
        """Another config counts from the next forward on, its threshold as well as its coefficients."""
        net = FLUX.build()
        hook = attach(net, TeaCacheHook(HOLD))
        assert hook.config is HOLD
        flux_loop(net)
        assert trace(hook) == "Chhhh"
        hook.config = HOLD.replaced(rel_l1_thresh=1e-9)
        flux_loop(net)
        assert trace(hook) == "CCCCC"
        hook.config = TeaCacheConfig(coefficients=[0.0], rel_l1_thresh=1e-9)
        assert hook.rescale_func(0.7) == 0.0
        flux_loop(net)
        assert trace(hook) == "Chhhh"

    def test_extractor_fn(self, dual: DualStream) -> None:
        """The registered extractor is used; another one set on the hook takes its place."""
        plain = loop(dual)
        hook = attach(dual, TeaCacheHook(OFF))
        assert hook.extractor_fn is extract
        assert same(loop(dual), plain)
        seen: list[int] = []

        def other(module: DualStream, *args: Any) -> CacheContext:
            seen.append(1)
            return extract(module, *args)

        hook.extractor_fn = other
        assert same(loop(dual), plain)
        assert len(seen) == STEPS + 1  # once more to see that a held step replays a computed one
        hook.extractor_fn = None  # the blocks are traced
        assert same(loop(dual), plain)
        assert len(seen) == STEPS + 1

    def test_extractor_fn_is_that_of_the_configs_transformer_type(self, dual: DualStream) -> None:
        class Renamed(DualStream):
            pass

        unregister_extractor("DualStream")
        register_extractor("SomethingElse", extract)
        net = Renamed().eval()
        hook = attach(net, TeaCacheHook(HOLD.replaced(transformer_type="SomethingElse")))
        unregister_extractor("SomethingElse")
        assert hook.extractor_fn is extract
        loop(net)
        assert net.runs == 2  # the first step, and the plain forward it is compared with

    def test_rescale_func(self) -> None:
        """numpy's polynomial, also outside of the range it was fitted on; another function set on the hook counts."""
        coefficients = [-40.0, 12.0, 0.25]
        net = FLUX.build()
        hook = TeaCacheHook(HOLD.replaced(coefficients=coefficients))
        assert isinstance(hook.rescale_func, np.poly1d)
        assert hook.rescale_func(0.9) == pytest.approx(np.polyval(coefficients, 0.9))
        attach(net, hook)
        assert hook.rescale_func(0.9) == pytest.approx(np.polyval(coefficients, 0.9))
        seen: list[float] = []
        hook.rescale_func = lambda change: seen.append(change) or 100.0
        flux_loop(net)
        assert trace(hook) == "C" * STEPS
        assert len(seen) == STEPS - 1

    def test_rescale_func_that_is_set_before_registration_is_kept(self) -> None:
        hook = TeaCacheHook(HOLD)
        hook.rescale_func = lambda change: 100.0
        net = FLUX.build()
        attach(net, hook)
        flux_loop(net)
        assert trace(hook) == "C" * STEPS

    def test_state_manager(self, dual: DualStream) -> None:
        """One state per context, the same one each time it is asked for."""
        hook = attach(dual, TeaCacheHook(HOLD))
        manager = hook.state_manager
        assert isinstance(manager, StateManager)
        assert isinstance(manager.get_state(), TeaCacheState)
        assert manager.get_state() is manager.get_state()
        manager.set_context("positive")
        positive = manager.get_state()
        manager.set_context("negative")
        assert manager.get_state() is not positive
        manager.set_context("positive")
        assert manager.get_state() is positive
        loop(dual)
        assert hook.stats().last.branches == ("positive",)
        state = manager.get_state()
        assert state.accumulated_rel_l1_distance > 0
        assert state is manager.get_state()

    def test_initialize_hook(self, dual: DualStream) -> None:
        hook = TeaCacheHook(HOLD)
        assert hook.extractor_fn is None
        assert hook.initialize_hook(dual) is dual
        assert hook.extractor_fn is extract

    def test_initialize_hook_refuses_a_class_without_coefficients(self) -> None:
        with pytest.raises(ConfigError, match="No TeaCache coefficients"):
            attach(DualStream(), TeaCacheHook(TeaCacheConfig()))

    def test_new_forward(self, dual: DualStream) -> None:
        """A held step adds the residuals of both streams and runs no block; the first step is always computed."""
        plain = loop(dual)
        hook = attach(dual, TeaCacheHook(HOLD))
        dual.runs = 0
        outputs = loop(dual)
        assert dual.runs == 2  # the first step, and the plain forward it is compared with
        assert torch.equal(outputs[0], plain[0])
        assert not torch.equal(outputs[1], plain[1])
        assert trace(hook) == "Chhhh"  # the last step as well

    def test_new_forward_carries_both_streams(self, dual: DualStream) -> None:
        """At threshold 0, and when a step is held on the same input, the output is that of the model."""
        plain = loop(dual)
        hook = attach(dual, TeaCacheHook(OFF))
        assert same(loop(dual), plain)
        hook.config = HOLD
        given = torch.ones(1, 6, 8), torch.ones(1, 4, 8)
        with torch.no_grad():
            first = dual(*given, torch.tensor([1.0]))
            second = dual(*given, torch.tensor([0.999]))
        assert trace(hook) == "Ch"
        assert torch.allclose(first, second, atol=1e-3)

    def test_new_forward_refuses_an_extractor_that_does_something_else(self, dual: DualStream) -> None:
        """One computed step is compared with the plain forward."""

        def forgetful(module: DualStream, *args: Any) -> CacheContext:
            context = extract(module, *args)
            context.postprocess = module.proj_out
            return context

        hook = attach(dual, TeaCacheHook(HOLD))
        hook.extractor_fn = forgetful
        with pytest.raises(UnsupportedModelError, match="compared with the plain forward"):
            loop(dual)

    def test_new_forward_called_by_hand(self) -> None:
        net = FLUX.build()
        plain = flux_loop(net)
        hook = TeaCacheHook(HOLD)
        hook.initialize_hook(net)
        outputs = flux_loop(net, call=lambda **inputs: hook.new_forward(net, **inputs))
        assert torch.equal(outputs[0], plain[0])
        assert trace(hook) == "Chhhh"

    def test_a_subclass_that_overrides_new_forward_is_obeyed(self, dual: DualStream) -> None:
        class Scaled(TeaCacheHook):
            def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return 2 * super().new_forward(module, *args, **kwargs)

        plain = loop(dual)
        attach(dual, Scaled(OFF))
        assert same(loop(dual), [2 * output for output in plain])

    def test_extra_states_reach_whoever_has_the_hook(self, dual: DualStream) -> None:
        hook = attach(dual, TeaCacheHook(HOLD))
        loop(dual)
        assert hook.state_manager.get_state().extra_states == {"timestep": pytest.approx(1 / STEPS)}

    def test_reset_state(self, dual: DualStream) -> None:
        hook = attach(dual, TeaCacheHook(HOLD))
        expected = loop(dual)
        assert hook.reset_state(dual) is dual
        assert hook.state_manager.get_state().accumulated_rel_l1_distance == 0
        with torch.no_grad():
            dual(torch.zeros(1, 6, 8), torch.zeros(1, 4, 8), torch.tensor([0.5]))
        hook.state_manager.reset()
        assert same(loop(dual), expected)
        assert [g.trace("1") for g in hook.stats().generations] == ["Chhhh", "C", "Chhhh"]


class TestApplyTeacacheHook:
    def test_example(self) -> None:
        """The example of the page, in a pipeline."""
        tiny = PIPELINES["QwenImagePipeline"]
        pipe = tiny.build()
        transformer, before = pipe.transformer, snapshot(pipe.transformer)
        plain = run(pipe, **tiny.call(steps=12))
        config = TeaCacheConfig(rel_l1_thresh=0.2, transformer_type="QwenImageTransformer2DModel")
        assert apply_teacache_hook(transformer, config) is None
        hook = transformer._diffusers_hook.get_hook("teacache")
        assert isinstance(hook, TeaCacheHook)
        cached = run(pipe, **tiny.call(steps=12))
        assert not torch.equal(cached, plain)
        assert min(hook.stats().generations[0].held.values()) > 0
        assert torch.equal(run(pipe, **tiny.call(steps=12)), cached)
        holdover.disable(transformer)
        assert not has_hooks(transformer)
        assert differences(before, snapshot(transformer)) == []
        assert torch.equal(run(pipe, **tiny.call(steps=12)), plain)

    def test_module(self, dual: DualStream) -> None:
        """A transformer of any class; a second application replaces the first."""
        apply_teacache_hook(dual, HOLD)
        apply_teacache_hook(dual, OFF)
        assert dual._diffusers_hook.get_hook("teacache").config is OFF
        assert len(dual._diffusers_hook.hooks) == 1
        loop(dual)
        assert trace(dual._diffusers_hook.get_hook("teacache")) == "CCCCC"

    def test_config(self, dual: DualStream) -> None:
        apply_teacache_hook(dual, TeaCacheConfig(rel_l1_thresh=0.0, transformer_type="FluxTransformer2DModel"))
        hook = dual._diffusers_hook.get_hook("teacache")
        profile = next(p for p in shipped("tea_cache") if p.transformer_class == "FluxTransformer2DModel")
        assert tuple(hook.rescale_func.coeffs) == pytest.approx(profile.fit("").coefficients)

    def test_its_cache_is_found_as_that_of_a_backend_is(self, dual: DualStream) -> None:
        apply_teacache_hook(dual, HOLD)
        loop(dual)
        cache = find_cache(dual)
        assert cache.stats().last.trace("1") == "Chhhh"
        cache.refresh(dual, num_inference_steps=3)
        cache.disable()
        assert not has_hooks(dual)
        assert find_cache(dual) is None

    def test_one_cache_at_a_time(self, dual: DualStream) -> None:
        with holdover.enable(dual, OFF), pytest.raises(EnableError, match="already is a holdover cache"):
            apply_teacache_hook(dual, HOLD)
        apply_teacache_hook(dual, HOLD)
        with pytest.raises(EnableError, match="already are hooks"):
            holdover.enable(dual, OFF)


def test_check_compares_an_extractor_with_the_plain_forward(dual: DualStream) -> None:
    """`holdover.check` does not say that something replays which is not the model."""
    given = {"hidden_states": torch.ones(1, 6, 8), "encoder_hidden_states": torch.ones(1, 4, 8)}
    assert holdover.check(dual, **given, timestep=torch.ones(1)).ok

    def single_stream(module: DualStream, *args: Any, **kwargs: Any) -> CacheContext:
        context = extract(module, *args, **kwargs)
        run_blocks = context.run_transformer_blocks
        context.run_transformer_blocks = lambda: run_blocks()[:1]
        return context

    register_extractor("DualStream", single_stream)
    report = holdover.check(dual, **given, timestep=torch.ones(1))
    assert not report.ok
    assert report.plain_error > 0.01
    assert max(report.outputs) < 1e-3  # a held step does replay the computed one
