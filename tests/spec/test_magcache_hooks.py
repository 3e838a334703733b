"""Every item of the documented page of `magcache.hook`, used as the page describes it."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import CacheContext as HookContext
from diffusers.hooks.hooks import StateManager
from diffusers.models.transformers.transformer_glm_image import GlmImageKVCache
from torch import nn

import holdover
from holdover.engine.hooks import BranchStateManager, has_hooks
from holdover.errors import ConfigError, EnableError, HoldoverWarning, UnsupportedModelError
from holdover.magcache import (
    FluxMagCacheStrategy,
    MagCacheConfig,
    MagCacheState,
    MagCacheStrategy,
    register_strategy,
    unregister_strategy,
)
from holdover.magcache import hook as page
from holdover.magcache.hook import MagCacheBlockHook, MagCacheHeadHook, apply_mag_cache_hook
from holdover.models.inputs import copy_containers, iter_tensors
from holdover.models.trace import find_block_lists
from models.support_table import _scale_latent as scale_latent
from snapshots import differences, snapshot
from tiny.models import MODELS, with_timestep
from tiny.pipelines import PIPELINES, run

STEPS = 6
RATIOS = (1.0, 1.01, 1.02, 1.03, 1.02, 1.01)
CONFIG = MagCacheConfig(
    mag_ratios=RATIOS,
    mag_threshold=0.06,
    mag_max_skip_steps=2,
    mag_retention_ratio=0.0,
    num_inference_steps=STEPS,
)
TRACE = "ChhChh"
CALIBRATE = MagCacheConfig(calibrate=True, num_inference_steps=STEPS)
FLUX = MODELS["FluxTransformer2DModel"]

# Registered by hand, hooks know their blocks alone: these models differ from the engine, or are refused, for that.
ROUNDED = {name for name in MODELS if ("controlnet" in name and "Cosmos" not in name) or "WanVACE" in name}
REFUSED = {name: "Block writes to its arguments" for name in MODELS if name.endswith("[kv]")} | {
    "ConsisIDTransformer3DModel": "calls blocks of several kinds in turn",
    "WanAnimateTransformer3DModel": "calls blocks of several kinds in turn",
    "RFD4ProteinaTransformer[recycle]": "calls the head twice in one forward",
}

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


@pytest.fixture
def flux() -> nn.Module:
    return FLUX.build()


def blocks_of(net: nn.Module) -> list[nn.Module]:
    return [block for blocks in find_block_lists(net).values() for block in blocks]


def generate(
    net: nn.Module, tiny: Any = FLUX, name: str | None = None, stop: int = STEPS, steps: int = STEPS, **inputs: Any
) -> list[torch.Tensor]:
    """A denoising loop in which the latent changes; every tensor that the model returns."""
    given, outputs = tiny.inputs(**inputs), []
    for i in range(min(stop, steps)):
        if name is None:
            outputs += step(net, tiny, i, given, steps)
        else:
            with net.cache_context(name, step_index=i, num_inference_steps=steps):
                outputs += step(net, tiny, i, given, steps)
    return outputs


def step(net: nn.Module, tiny: Any, i: int, given: Any = None, steps: int = STEPS) -> list[torch.Tensor]:
    given = copy_containers(tiny.inputs() if given is None else given)  # AnyFlow FAR writes to its flags
    with torch.no_grad():
        output = net(**with_timestep(tiny, scale_latent(tiny, given, 1 - 0.03 * i), 1 - i / (steps + 1)))
    return [t.clone() for t in iter_tensors([dict(output) if hasattr(output, "keys") else output])]


def called_blocks(net: nn.Module, tiny: Any) -> list[nn.Module]:
    """The blocks in the order in which the model calls them."""
    called: list[nn.Module] = []
    handles = [block.register_forward_pre_hook(lambda module, args: called.append(module)) for block in blocks_of(net)]
    step(net, tiny, 0)
    for handle in handles:
        handle.remove()
    return list(dict.fromkeys(called))


def generate_with_hooks(net: nn.Module, tiny: Any, manager: Any) -> tuple[list[torch.Tensor], str]:
    """Four steps of the branch `cond` and their decisions, also of a transformer without `cache_context`."""
    decisions, outputs, given = "", [], tiny.inputs()
    for i in range(4):
        manager.set_context(HookContext("cond", i, STEPS))
        outputs += step(net, tiny, i, given)
        decisions += "C" if manager.get_state().should_compute else "h"
    return outputs, decisions


def register(
    net: nn.Module,
    config: MagCacheConfig = CONFIG,
    manager: Any = None,
    head: type[MagCacheHeadHook] = MagCacheHeadHook,
    block: type[MagCacheBlockHook] = MagCacheBlockHook,
    strategy: MagCacheStrategy | None = None,
    blocks: list[nn.Module] | None = None,
) -> tuple[MagCacheHeadHook, MagCacheBlockHook]:
    """The hooks of the page, registered by hand as its architecture says; the first and the last one."""
    manager = manager or StateManager(MagCacheState, (), {})
    first, *others = blocks or blocks_of(net)
    hooks: list[Any] = [head(manager, config, strategy, is_tail=not others)]
    hooks += [block(manager, other is others[-1], config, strategy) for other in others]
    for module, hook in zip((first, *others), hooks, strict=True):
        HookRegistry.check_if_exists_or_initialize(module).register_hook(hook, "mag_cache")
    HookRegistry.check_if_exists_or_initialize(net).invalidate_child_registries_cache()  # as diffusers asks for
    return hooks[0], hooks[-1]


def watch(net: nn.Module) -> list[str]:
    """`C` or `h` for each forward: whether the last block's attention ran."""
    trace: list[str] = []
    net.register_forward_pre_hook(lambda *_: trace.append("h"))
    blocks_of(net)[-1].norm.register_forward_pre_hook(lambda *_: trace.__setitem__(-1, "C"))
    return trace


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# The module


class TestLogger:
    def test_logger(self, flux: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
        """Everything the hooks log is logged by the module's logger: a line at the head, one at the tail."""
        register(flux)
        with caplog.at_level(logging.DEBUG, page.logger.name):
            generate(flux, stop=3)
        assert page.logger.name == "holdover.magcache.hook"
        assert {record.name for record in caplog.records} == {page.logger.name}
        words = [message.partition(",")[0].partition(":")[0] for message in caplog.messages]
        assert words == ["step 0 computed", "residual of step 0 stored", "step 1 held", "step 2 held"]


class TestApplyMagCacheHook:
    @pytest.mark.filterwarnings("ignore::UserWarning")
    @pytest.mark.parametrize("name", sorted(MODELS))
    def test_every_family_decides_and_computes_as_the_engine_does(self, name: str) -> None:
        tiny = MODELS[name]
        net = tiny.build()
        config = CONFIG.replaced(mag_max_skip_steps=1)  # ChCh: what is recorded is held, and what is computed along it
        with holdover.enable(net, config) as cache:
            expected = generate(net, tiny, "cond", stop=4)
            trace = cache.stats().last.trace("cond")
        apply_mag_cache_hook(net, config)
        manager = blocks_of(net)[0]._diffusers_hook.get_hook("mag_cache").state_manager
        outputs, decisions = generate_with_hooks(net, tiny, manager)
        assert same(outputs, expected)
        assert decisions == trace
        holdover.disable(net)

        # registered by hand
        manager = StateManager(MagCacheState, (), {})
        register(net, config, manager, blocks=called_blocks(net, tiny))
        if name in REFUSED:
            with pytest.raises(UnsupportedModelError, match=REFUSED[name]):
                generate_with_hooks(net, tiny, manager)
            return
        outputs, decisions = generate_with_hooks(net, tiny, manager)
        assert decisions == trace
        assert same(outputs, expected) or name in ROUNDED
        for mine, engines in zip(outputs, expected, strict=True):
            torch.testing.assert_close(mine, engines, rtol=1e-5, atol=1e-5)

    def test_the_head_and_the_tail_are_where_the_model_starts_and_ends(self, caplog: pytest.LogCaptureFixture) -> None:
        """Wan VACE's lists are not in the order of their calls; a recycling model calls its head twice a step."""
        vace = MODELS["WanVACETransformer3DModel"]
        net = vace.build()
        apply_mag_cache_hook(net, CONFIG)
        called: list[nn.Module] = []
        for block in blocks_of(net):
            block.register_forward_pre_hook(lambda module, args: called.append(module))
        step(net, vace, 0)
        called.clear()
        step(net, vace, 0)
        hooks = [block._diffusers_hook.get_hook("mag_cache") for block in called]
        assert [type(hook) for hook in hooks] == [MagCacheHeadHook] + [MagCacheBlockHook] * (len(hooks) - 1)
        assert [hook.is_tail for hook in hooks] == [False] * (len(hooks) - 1) + [True]
        recycle = MODELS["RFD4ProteinaTransformer[recycle]"]
        net = recycle.build()
        apply_mag_cache_hook(net, CONFIG)
        with caplog.at_level(logging.DEBUG, page.logger.name):
            for i in range(2):
                blocks_of(net)[0]._diffusers_hook.get_hook("mag_cache").state_manager.set_context(
                    HookContext("cond", i)
                )
                step(net, recycle, i)
        words = [message.partition(",")[0].partition(":")[0] for message in caplog.messages]
        assert words == ["step 0 computed", "residual of step 0 stored", "step 1 held"]

    def test_branches_and_prompts_are_told_apart_as_by_the_engine(self, flux: nn.Module) -> None:
        """Two branches without a name, and another prompt in the middle of a named one."""

        def run_all() -> list[torch.Tensor]:
            given = [FLUX.inputs(seed=0), FLUX.inputs(seed=1)]
            outputs = [t for i in range(STEPS) for inputs in given for t in step(flux, FLUX, i, inputs)]
            for i in range(4):
                with flux.cache_context("cond", step_index=i, num_inference_steps=STEPS):
                    outputs += step(flux, FLUX, i, given[i // 2])
            return outputs

        with holdover.enable(flux, CONFIG):
            expected = run_all()
        apply_mag_cache_hook(flux, CONFIG)
        trace = watch(flux)
        assert same(run_all(), expected)
        assert "".join(trace) == "".join(2 * decision for decision in TRACE) + "ChCh"

    def test_reset_state_of_any_hook_starts_a_generation(self, flux: nn.Module) -> None:
        plain = step(flux, FLUX, 2)
        apply_mag_cache_hook(flux, CONFIG)
        expected = generate(flux)
        for block in (flux.transformer_blocks[0], blocks_of(flux)[-1]):
            generate(flux, stop=2, seed=3)
            block._diffusers_hook.get_hook("mag_cache").reset_state(block)
            assert same(step(flux, FLUX, 2), plain)
            assert same(generate(flux), expected)

    def test_module(self, flux: nn.Module) -> None:
        """The transformer is hooked at its blocks, and removing the hooks leaves the objects that were there."""
        before = snapshot(flux)
        plain = generate(flux)
        assert apply_mag_cache_hook(flux, CONFIG) is None
        roles = [block._diffusers_hook.get_hook("mag_cache") for block in blocks_of(flux)]
        assert type(roles[0]) is MagCacheHeadHook
        assert {type(hook) for hook in roles[1:]} == {MagCacheBlockHook}
        assert [hook.is_tail for hook in roles] == [False] * 5 + [True]
        assert len({id(hook.state_manager) for hook in roles}) == 1
        trace = watch(flux)
        held = generate(flux)
        assert "".join(trace) == TRACE
        assert not same(held, plain)
        holdover.disable(flux)
        flux._forward_pre_hooks.clear()
        blocks_of(flux)[-1].norm._forward_pre_hooks.clear()
        assert differences(before, snapshot(flux)) == []
        assert same(generate(flux), plain)

    def test_config(self, flux: nn.Module) -> None:
        """The threshold decides; a second application replaces the first, and so does a config that is set."""
        plain = generate(flux)
        for threshold, expected in ((0.0, "CCCCCC"), (1e9, "ChhChh")):
            apply_mag_cache_hook(flux, CONFIG.replaced(mag_threshold=threshold))
            trace = watch(flux)
            assert same(generate(flux), plain) is (threshold == 0.0)
            assert "".join(trace) == expected
        head = flux.transformer_blocks[0]._diffusers_hook.get_hook("mag_cache")
        head.config = CONFIG.replaced(mag_threshold=0.0)
        assert same(generate(flux), plain)

    def test_strategy(self, flux: nn.Module) -> None:
        strategy = CountingStrategy()
        apply_mag_cache_hook(flux, CONFIG.replaced(mag_ratios=None), strategy)
        trace = watch(flux)
        outputs = generate(flux)
        assert "".join(trace) == TRACE
        checked = 1  # the replay check computes and holds once
        assert strategy.calls == {"compute": TRACE.count("C") + checked, "apply": TRACE.count("h") + checked}
        holdover.disable(flux)
        apply_mag_cache_hook(flux, CONFIG)
        assert same(generate(flux), outputs)

    def test_strategy_is_looked_up_in_the_registry(self, flux: nn.Module) -> None:
        strategy = CountingStrategy()
        register_strategy("FluxTransformer2DModel", strategy)
        try:
            apply_mag_cache_hook(flux, CONFIG)
            generate(flux)
        finally:
            unregister_strategy("FluxTransformer2DModel")
        assert strategy.calls["apply"] == TRACE.count("h") + 1

    def test_of_the_strategy_of_a_base_class_the_ratios_are_used(self, flux: nn.Module) -> None:
        strategy = CountingStrategy()
        flux.__class__ = type("MyTransformer2DModel", (type(flux),), {})
        register_strategy("FluxTransformer2DModel", strategy)
        try:
            apply_mag_cache_hook(flux, CONFIG.replaced(mag_ratios=None))
        finally:
            unregister_strategy("FluxTransformer2DModel")
        trace = watch(flux)
        generate(flux)
        assert "".join(trace) == TRACE
        assert strategy.calls == {"compute": 0, "apply": 0}

    def test_without_ratios_those_of_the_class_are_used(self, flux: nn.Module) -> None:
        apply_mag_cache_hook(flux, MagCacheConfig(num_inference_steps=28))
        trace = watch(flux)
        generate(flux, stop=28, steps=28)
        with holdover.enable(FLUX.build(), "mag_cache", num_inference_steps=28) as cache:
            generate(cache._engine.transformers[0].module, stop=28, steps=28)
            assert "".join(trace) == cache.stats().last.trace("1")
        with pytest.raises(ConfigError, match="No magnitude ratios ship for SanaTransformer2DModel"):
            apply_mag_cache_hook(MODELS["SanaTransformer2DModel"].build(), MagCacheConfig())

    def test_one_block_is_head_and_tail(self) -> None:
        tiny = MODELS["FluxTransformer2DModel[one_double]"]
        net = tiny.build()
        (block,) = blocks_of(net)
        apply_mag_cache_hook(net, CONFIG)
        hook = block._diffusers_hook.get_hook("mag_cache")
        assert isinstance(hook, MagCacheHeadHook)
        assert hook.is_tail

    def test_a_pipeline_runs_as_with_the_backend(self) -> None:
        tiny = PIPELINES["FluxPipeline[true_cfg]"]
        pipe = tiny.build()
        with holdover.enable(pipe, CONFIG):
            expected = run(pipe, **tiny.call(steps=STEPS))
        apply_mag_cache_hook(pipe.transformer, CONFIG)
        assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), expected)
        assert torch.equal(run(pipe, **tiny.call(steps=STEPS)), expected)

    def test_an_interrupted_generation_does_not_reach_the_next(self, flux: nn.Module) -> None:
        apply_mag_cache_hook(flux, CONFIG)
        expected = generate(flux)
        generate(flux, stop=2, seed=3)
        assert same(generate(flux), expected)
        handle = blocks_of(flux)[3].attn.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            generate(flux)
        handle.remove()
        assert same(generate(flux), expected)

    def test_one_cache_at_a_time(self, flux: nn.Module) -> None:
        with holdover.enable(flux, CONFIG), pytest.raises(EnableError, match="already is a holdover cache"):
            apply_mag_cache_hook(flux, CONFIG)
        apply_mag_cache_hook(flux, CONFIG)
        with pytest.raises(EnableError, match="already are hooks"):
            holdover.enable(flux, CONFIG)

    def test_a_transformer_without_blocks_is_refused(self) -> None:
        with pytest.raises(UnsupportedModelError, match="Linear has no list of blocks"):
            apply_mag_cache_hook(nn.Linear(2, 2), CONFIG)


class CountingStrategy(MagCacheStrategy):
    """The dual-stream strategy of the documents, which counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = {"compute": 0, "apply": 0}

    @property
    def mag_ratios(self) -> torch.Tensor:
        return torch.tensor(RATIOS)

    def compute_residual(self, output: Any, head_input: torch.Tensor) -> torch.Tensor:
        self.calls["compute"] += 1
        return output[1] - head_input

    def apply_residual_tuple(self, hidden_states: Any, encoder_hidden_states: Any, residual: Any) -> Any:
        self.calls["apply"] += 1
        return hidden_states + residual, encoder_hidden_states


class Loop(nn.Module):
    """A pipeline that is a module, as those of vLLM-Omni are: its forward runs all steps."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def forward(self) -> list[torch.Tensor]:
        return generate(self.transformer)


# MagCacheHeadHook


class TestMagCacheHeadHook:
    def test_bases(self) -> None:
        assert issubclass(MagCacheHeadHook, ModelHook)
        assert MagCacheHeadHook._is_stateful

    @pytest.mark.parametrize("manager", [StateManager, BranchStateManager])
    def test_registered_by_hand_it_decides_whether_to_skip(self, flux: nn.Module, manager: Any) -> None:
        """The same decisions and bits as the engine, with diffusers' own state manager as with ours."""
        with holdover.enable(flux, CONFIG):
            expected = generate(flux)
        register(flux, manager=manager(MagCacheState, (), {}))
        trace = watch(flux)
        assert same(generate(flux), expected)
        assert same(Loop(flux)(), expected)
        assert "".join(trace) == TRACE * 2

    def test_a_strategy_for_all_blocks_is_refused_where_the_model_changes_the_stream_between_them(
        self,
    ) -> None:
        tiny = MODELS["FluxTransformer2DModel[controlnet]"]
        net = tiny.build()
        register(net, strategy=CountingStrategy())
        with pytest.raises(UnsupportedModelError, match="has a CountingStrategy for the blocks as a whole"):
            step(net, tiny, 0)

    def test_a_pass_that_writes_a_kv_cache_is_refused_between_passes_that_read_it(self) -> None:
        """GLM-Image's blocks see it in an attribute of an argument alone."""
        tiny = MODELS["GlmImageTransformer2DModel"]
        net = tiny.build()
        head, _ = register(net)
        given = tiny.inputs() | {"kv_caches": GlmImageKVCache(len(blocks_of(net)))}
        given["kv_caches"].set_mode("read")
        for i in range(2):
            step(net, tiny, i, given)
        assert not head.state_manager.get_state().should_compute
        given["kv_caches"].set_mode("write")
        with pytest.raises(UnsupportedModelError, match="GlmImageTransformerBlock writes to its arguments"):
            step(net, tiny, 2, given)

    def test_config(self, flux: nn.Module) -> None:
        """Another config counts from the next forward on."""
        head, _ = register(flux)
        assert head.config is CONFIG
        head.config = CONFIG.replaced(mag_threshold=0.0)
        trace = watch(flux)
        generate(flux)
        assert "".join(trace) == "C" * STEPS

    def test_config_without_ratios_is_refused_at_registration(self, flux: nn.Module) -> None:
        with pytest.raises(ConfigError, match="No magnitude ratios ship for this transformer"):
            register(flux, MagCacheConfig())
        register(flux, MagCacheConfig(), strategy=FluxMagCacheStrategy())

    def test_state_manager(self, flux: nn.Module) -> None:
        """Each context has a state of its own, which diffusers' `cache_context` selects."""
        manager = BranchStateManager(MagCacheState)
        head, tail = register(flux, manager=manager)
        assert head.state_manager is tail.state_manager is manager
        generate(flux, name="cond", stop=2)
        generate(flux, name="uncond", stop=1)
        manager.set_context("cond")
        cond = manager.get_state()
        assert cond is manager.get_state()
        manager.set_context("uncond")
        assert (cond.step_index, manager.get_state().step_index) == (2, 1)
        assert cond.accumulated_steps == 1
        assert manager.get_state().accumulated_steps == 0

    def test_initialize_hook(self, flux: nn.Module) -> None:
        block = flux.transformer_blocks[0]
        assert MagCacheHeadHook(BranchStateManager(MagCacheState), CONFIG).initialize_hook(block) is block

    def test_log_cache_hit(self, flux: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
        head, _ = register(flux)
        state = MagCacheState(step_index=4, accumulated_err=0.125, accumulated_steps=2)
        output, ret = torch.ones(1), (torch.zeros(1), torch.ones(1))
        with caplog.at_level(logging.DEBUG, page.logger.name):
            assert head.log_cache_hit(state, output, ret) is ret
            assert head.log_cache_hit(state, output, None) is output
        assert caplog.messages[0] == "step 4 held, accumulated error 0.1250 over 2 steps"

    def test_log_cache_hit_is_called_at_every_held_step_and_its_result_is_returned(self, flux: nn.Module) -> None:
        seen = []

        class Head(MagCacheHeadHook):
            def log_cache_hit(self, state: MagCacheState, output: Any, ret: Any) -> Any:
                seen.append((state.step_index, state.should_compute, torch.equal(output, ret[1])))
                return tuple(torch.zeros_like(t) for t in super().log_cache_hit(state, output, ret))

        plain = generate(flux)
        register(flux, head=Head)
        outputs = generate(flux)
        assert seen == [(i, False, True) for i in (1, 2, 4, 5)]
        assert torch.equal(outputs[0], plain[0])
        assert not torch.equal(outputs[1], plain[1])

    def test_log_cache_miss(self, flux: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
        head, _ = register(flux)
        output = (torch.zeros(1), torch.ones(1))
        with caplog.at_level(logging.DEBUG, page.logger.name):
            assert head.log_cache_miss(MagCacheState(step_index=4), output) is output
        assert caplog.messages == ["step 4 computed"]

    def test_log_cache_miss_is_called_at_every_computed_step_and_its_result_is_returned(self, flux: nn.Module) -> None:
        class Head(MagCacheHeadHook):
            def log_cache_miss(self, state: MagCacheState, output: Any) -> Any:
                seen.append((state.step_index, state.should_compute))
                results.append([*super().log_cache_miss(state, output)])
                return results[-1]

        seen, results, returned = [], [], []
        register(flux, head=Head)
        flux.transformer_blocks[0].register_forward_hook(lambda module, args, output: returned.append(output))
        generate(flux)
        assert seen == [(0, True), (3, True)]
        assert [returned[i] is result for i, result in zip((0, 3), results, strict=True)] == [True, True]

    def test_new_forward(self, flux: nn.Module) -> None:
        """A held step adds the stored residual to the hidden states that enter, and runs no block."""
        head, _ = register(flux)
        ran = []
        for block in blocks_of(flux):
            block.attn.register_forward_hook(lambda *_: ran.append(1))
        returned: list[Any] = []
        flux.transformer_blocks[0].register_forward_hook(lambda module, args, output: returned.append(output[1]))
        generate(flux, stop=2)
        assert len(ran) == 6  # all blocks at the first step, none at the second
        state = head.state_manager.get_state()
        assert torch.equal(returned[1], state.head_block_input + state.previous_residual)

    def test_a_subclass_that_overrides_new_forward_is_obeyed(self, flux: nn.Module) -> None:
        class Head(MagCacheHeadHook):
            def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return self.fn_ref.original_forward(*args, **kwargs)

        plain = generate(flux)
        register(flux, head=Head)
        with pytest.warns(HoldoverWarning, match="called before the head or after the tail"):
            assert same(generate(flux), plain)

    def test_reset_state(self, flux: nn.Module) -> None:
        """Everything is forgotten, the last residual too: the next generation is what it would be without the first."""
        head, _ = register(flux)
        expected = generate(flux)
        generate(flux, stop=4, seed=3)
        assert head.state_manager.get_state().previous_residual is not None
        block = flux.transformer_blocks[0]
        assert head.reset_state(block) is block
        assert head.state_manager._state_cache == {}
        assert same(generate(flux), expected)

    def test_a_head_without_a_tail_is_an_error(self, flux: nn.Module) -> None:
        hook = MagCacheHeadHook(BranchStateManager(MagCacheState), CONFIG)
        HookRegistry.check_if_exists_or_initialize(flux.transformer_blocks[0]).register_hook(hook, "mag_cache")
        with pytest.raises(UnsupportedModelError, match="did not reach a tail hook"):
            generate(flux)

    def test_with_autograd_every_step_is_computed(self, flux: nn.Module) -> None:
        register(flux)
        with torch.enable_grad(), pytest.warns(HoldoverWarning, match="Autograd is on"):
            assert flux(**FLUX.inputs())[0].shape == (1, 16, 16)

    def test_other_shapes_are_computed(self, flux: nn.Module) -> None:
        plain = step(flux, FLUX, 1)
        register(flux)
        generate(flux, stop=1, batch=2)
        assert torch.equal(step(flux, FLUX, 1)[0], plain[0])


# MagCacheBlockHook


class TestMagCacheBlockHook:
    def test_bases(self) -> None:
        assert issubclass(MagCacheBlockHook, ModelHook)

    def test_config(self, flux: nn.Module) -> None:
        """The tail's config says when a generation ends."""
        _, tail = register(flux)
        assert tail.config is CONFIG
        assert MagCacheBlockHook(tail.state_manager).config == MagCacheConfig()
        tail.config = CONFIG.replaced(num_inference_steps=3)
        state = MagCacheState(step_index=2)
        tail.advance_step(state)
        assert state == MagCacheState()

    def test_is_tail(self, flux: nn.Module) -> None:
        """Only the tail stores and advances."""
        head, tail = register(flux)
        assert tail.is_tail
        assert not MagCacheBlockHook(tail.state_manager).is_tail
        tail.is_tail = False
        with pytest.raises(UnsupportedModelError, match="did not reach a tail hook"):
            generate(flux)
        assert head.state_manager.get_state().previous_residual is None

    def test_state_manager(self, flux: nn.Module) -> None:
        """Blocks follow the decision that the head has left in the shared state."""
        head, tail = register(flux)
        generate(flux, stop=2)
        assert tail.state_manager is head.state_manager
        assert not tail.state_manager.get_state().should_compute

    def test_advance_step(self, flux: nn.Module) -> None:
        _, tail = register(flux)
        state = MagCacheState(step_index=3, previous_residual=torch.ones(1), anchor=3)
        tail.advance_step(state)
        assert (state.step_index, state.anchor) == (4, 3)
        tail.advance_step(state)
        tail.advance_step(state)
        assert state == MagCacheState()

    def test_a_subclass_that_overrides_advance_step_is_obeyed(self, flux: nn.Module) -> None:
        class Block(MagCacheBlockHook):
            def advance_step(self, state: MagCacheState) -> None:
                seen.append(state.step_index)
                super().advance_step(state)

        seen: list[int] = []
        register(flux, block=Block)
        generate(flux)
        assert seen == list(range(STEPS))

    def test_initialize_hook(self, flux: nn.Module) -> None:
        block = flux.transformer_blocks[1]
        assert MagCacheBlockHook(BranchStateManager(MagCacheState)).initialize_hook(block) is block

    def test_log_residual_computed(self, flux: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
        _, tail = register(flux)
        one, two = torch.ones(1, 2, 3), torch.ones(1, 5, 3)
        with caplog.at_level(logging.DEBUG, page.logger.name):
            assert tail.log_residual_computed(MagCacheState(step_index=4), one) is None
            tail.log_residual_computed(MagCacheState(step_index=5), (one, two))
        assert caplog.messages == [
            "residual of step 4 stored: [(1, 2, 3)]",
            "residual of step 5 stored: [(1, 2, 3), (1, 5, 3)]",
        ]

    def test_log_residual_computed_is_called_at_every_computed_step(self, flux: nn.Module) -> None:
        class Block(MagCacheBlockHook):
            def log_residual_computed(self, state: MagCacheState, residual: Any) -> None:
                seen.append((state.step_index, residual is state.previous_residual))

        seen: list[Any] = []
        register(flux, block=Block)
        generate(flux)
        assert seen == [(0, True), (3, True)]

    def test_new_forward(self, flux: nn.Module) -> None:
        """The tail's residual is its output minus what entered the head; held blocks pass their inputs on."""
        _, tail = register(flux)
        ends: list[torch.Tensor] = []
        blocks_of(flux)[-1].register_forward_hook(lambda m, a, k, out: ends.append(out[1]), with_kwargs=True)
        generate(flux, stop=2)
        state = tail.state_manager.get_state()
        first, held = ends
        step(flux, FLUX, 2)
        entered = state.head_block_input
        assert torch.equal(ends[2], entered + state.previous_residual)
        assert not torch.equal(first, held)

    def test_a_subclass_that_overrides_new_forward_is_obeyed(self, flux: nn.Module) -> None:
        """A block that always runs does so at held steps as well."""

        class Block(MagCacheBlockHook):
            def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
                return super().new_forward(module, *args, **kwargs) if self.is_tail else self.run(*args, **kwargs)

            def run(self, *args: Any, **kwargs: Any) -> Any:
                ran.append(1)
                return self.fn_ref.original_forward(*args, **kwargs)

        ran: list[int] = []
        register(flux, block=Block)
        generate(flux, stop=3)
        assert len(ran) == 3 * 4

    @pytest.mark.parametrize("dual", [False, True])
    def test_perform_calibration(self, flux: nn.Module, dual: bool) -> None:
        generator = torch.Generator().manual_seed(0)
        residuals = [torch.randn(2, 5, 8, generator=generator) for _ in range(2)]
        _, tail = register(flux, CALIBRATE)
        state = MagCacheState()
        for residual in residuals:
            given = (residual[:, :2], residual[:, 2:]) if dual else residual
            assert tail.perform_calibration(state, given) is None
            state.previous_residual = given
        first, second = residuals
        ratios = second.norm(dim=-1) / first.norm(dim=-1)
        cosines = torch.cosine_similarity(first, second, dim=-1)
        assert state.norm_ratios == pytest.approx([1.0, float(ratios.mean())], rel=1e-5)
        assert state.norm_stds[0] == 0.0
        assert state.norm_stds[1] > 0
        assert state.cos_dises == pytest.approx([0.0, float(1 - cosines.mean())], rel=1e-4)

    def test_perform_calibration_asks_the_strategy(self, flux: nn.Module) -> None:
        class Strategy(CountingStrategy):
            def compute_calibration_metrics(self, current_residual: Any, previous_residual: Any) -> Any:
                assert current_residual is not previous_residual
                return 2.0, 3.0, 4.0

        apply_mag_cache_hook(flux, CALIBRATE, Strategy())
        generate(flux, stop=2)
        state = blocks_of(flux)[0]._diffusers_hook.get_hook("mag_cache").state_manager.get_state()
        assert (state.norm_ratios, state.norm_stds, state.cos_dises) == ([1.0, 2.0], [0.0, 3.0], [0.0, 4.0])

    def test_calibration_collects_per_branch_what_the_engine_measures(
        self, flux: nn.Module, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Two branches, one call each a step, do not mix; at the end of a generation the lists are logged."""
        with holdover.enable(flux, CALIBRATE) as cache:
            interleave(flux)
            profile = cache.calibration()
        _, tail = register(flux, CALIBRATE)
        interleave(flux, STEPS - 1)
        measured = {}
        for name in ("cond", "uncond"):
            tail.state_manager.set_context(HookContext(name))
            measured[name] = tail.state_manager.get_state().norm_ratios
            assert measured[name] == pytest.approx(profile.ratios(name)[:-1], rel=1e-6)
        assert measured["cond"] != measured["uncond"]
        tail.reset_state(flux)
        with caplog.at_level(logging.INFO, page.logger.name):
            interleave(flux)
        lines = [message for message in caplog.messages if message.startswith("norm_ratios: ")]
        expected = [[round(ratio, 5) for ratio in profile.ratios(name)] for name in ("cond", "uncond")]
        assert lines == [f"norm_ratios: {ratios}" for ratios in expected]
        assert any("DiffusionCacheConfig(mag_ratios=...)" in message for message in caplog.messages)

    def test_a_subclass_that_overrides_perform_calibration_is_obeyed(self, flux: nn.Module) -> None:
        class Block(MagCacheBlockHook):
            def perform_calibration(self, state: MagCacheState, current_residual: Any) -> None:
                state.norm_ratios.append(7.0)

        _, tail = register(flux, CALIBRATE, block=Block)
        generate(flux, stop=3)
        assert tail.state_manager.get_state().norm_ratios == [7.0] * 3

    def test_reset_state(self, flux: nn.Module) -> None:
        _, tail = register(flux)
        generate(flux, stop=2)
        assert tail.reset_state(flux) is flux
        trace = watch(flux)
        generate(flux, stop=2)
        assert trace == ["C", "h"]


def interleave(net: nn.Module, steps: int = STEPS) -> None:
    """Both branches at each step, as a pipeline with guidance makes them."""
    inputs = {"cond": FLUX.inputs(seed=0), "uncond": FLUX.inputs(seed=1)}
    with torch.no_grad():
        for i in range(steps):
            for name, given in inputs.items():
                with net.cache_context(name):
                    net(**with_timestep(FLUX, scale_latent(FLUX, given, 1 - 0.03 * i), 1 - i / (STEPS + 1)))


# The architecture of the page


class TestMagCacheState:
    def test_it_tracks_residual_and_accumulated_error(self, flux: nn.Module) -> None:
        head, _ = register(flux)
        generate(flux, stop=2)
        state = head.state_manager.get_state()
        assert isinstance(state, MagCacheState)
        assert isinstance(state.previous_residual, torch.Tensor)
        assert isinstance(state.head_block_input, torch.Tensor)
        assert state.should_compute is False
        assert state.accumulated_ratio == pytest.approx(1.01)
        assert state.accumulated_err == pytest.approx(0.01)
        assert (state.accumulated_steps, state.step_index) == (1, 2)

    def test_a_residual_that_is_taken_away_is_computed_again(self, flux: nn.Module) -> None:
        head, _ = register(flux)
        generate(flux, stop=1)
        head.state_manager.get_state().previous_residual = None
        trace = watch(flux)
        step(flux, FLUX, 1)
        assert trace == ["C"]


class TestMagCacheStrategy:
    def test_it_is_taken_by_both_hooks(self, flux: nn.Module) -> None:
        strategy = CountingStrategy()
        register(flux, CONFIG.replaced(mag_ratios=None), strategy=strategy)
        generate(flux)
        assert strategy.calls == {"compute": 2, "apply": 4}


def test_disable_finds_the_hooks(flux: nn.Module) -> None:
    register(flux)
    assert has_hooks(flux)
    holdover.disable(flux)
    assert not has_hooks(flux)
    with pytest.raises(holdover.NotEnabledError):
        holdover.disable(flux)
