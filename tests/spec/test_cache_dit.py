"""The documented cache-dit backend: each test is named after an item of its page and shows what the item does."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, get_args, get_origin

import cache_dit
import pytest
import torch
from cache_dit import BlockAdapter, DBCacheConfig, ForwardPattern, ParamsModifier, TaylorSeerCalibratorConfig
from cache_dit.caching import (
    BlockAdapterRegister,
    CachedAdapter,
    CachedContextManager,
    FakeDiffusionPipeline,
)
from cache_dit.caching.cache_blocks import CachedBlocks_Pattern_0_1_2, CachedBlocks_Pattern_3_4_5

import holdover
from cache_dit_backend.families import (
    WIDTH,
    BagelTransformer,
    NaiveCache,
    S2VTransformer,
    SensenovaTransformer,
    Wan22S2VPipeline,
    pipeline_of,
)
from holdover import cache_dit_backend
from holdover.base import CacheBackend, DiffusionCacheConfig
from holdover.cache_dit_backend import (
    CUSTOM_DIT_ENABLERS,
    BagelCachedAdapter,
    BagelCachedBlocks,
    BagelCachedContextManager,
    CacheDiTAdapterConfig,
    CacheDiTBackend,
    CacheDiTEnableResult,
    CacheDiTRequestSpec,
    RefreshCacheContextFunc,
    RequestScopedCacheDiTRuntime,
    SensenovaCachedAdapter,
    SensenovaCachedBlocks,
    Wan22S2VCachedAdapter,
    Wan22S2VCachedBlocks,
    build_cache_context_refresh,
    cache_summary,
    default_get_pipeline_transformer,
    enable_cache_for_cosmos3,
    enable_cache_for_dit,
    enable_cache_for_krea2,
    enable_cache_for_magi2,
    enable_cache_for_mammothmoda2,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
    may_enable_cache_dit,
)
from holdover.cache_dit_backend.config import quiet_library
from holdover.engine.backend import find_cache
from snapshots import denoiser, differences, snapshot
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

MUCH = DiffusionCacheConfig(residual_diff_threshold=1.0, max_warmup_steps=1, max_continuous_cached_steps=2)
SCM = DiffusionCacheConfig(scm_steps_mask_policy="fast", scm_steps_policy="static")
LIBRARY_MUCH = {"residual_diff_threshold": 1.0, "max_warmup_steps": 1, "max_continuous_cached_steps": 2}
FLUX = PIPELINES["FluxPipeline"]


@pytest.fixture(autouse=True)
def _enablers() -> Iterator[None]:
    kept = dict(CUSTOM_DIT_ENABLERS)
    yield
    CUSTOM_DIT_ENABLERS.clear()
    CUSTOM_DIT_ENABLERS.update(kept)


def mask(steps: int, policy: str = "fast") -> str:
    """The library's SCM mask as a trace."""
    return "".join("hC"[m] for m in cache_dit.steps_mask(mask_policy=policy, total_steps=steps))


def library_config() -> DBCacheConfig:
    return DBCacheConfig(Fn_compute_blocks=1, Bn_compute_blocks=0, **LIBRARY_MUCH)


class Denoiser(torch.nn.Module):
    """A transformer with one list of blocks that take and return hidden states."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + timestep
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


class Declared(Denoiser):
    """The same with a declaration."""

    _cache_dit_adapter_config = CacheDiTAdapterConfig(
        block_forward_patterns={"blocks": ForwardPattern.Pattern_3}, check_forward_pattern=False
    )


def denoise(transformer: torch.nn.Module, steps: int = 6) -> list[torch.Tensor]:
    """A loop over a bare transformer."""
    with torch.no_grad():
        return [transformer(torch.ones(1, 4), torch.tensor(1 - step / steps)) for step in range(steps)]


def block_adapter(transformer: Denoiser, **given: Any) -> BlockAdapter:
    with quiet_library():
        return BlockAdapter(
            transformer=transformer, blocks=[transformer.blocks], forward_pattern=[ForwardPattern.Pattern_3], **given
        )


def flux_lists(pipe: Any, **given: Any) -> BlockAdapter:
    """FLUX with a context for each of its two lists; the library's own adapter has one for both."""
    transformer = pipe.transformer
    with quiet_library():
        return BlockAdapter(
            pipe=pipe,
            transformer=transformer,
            blocks=[transformer.transformer_blocks, transformer.single_transformer_blocks],
            forward_pattern=[ForwardPattern.Pattern_1, ForwardPattern.Pattern_1],
            **given,
        )


# CUSTOM_DIT_ENABLERS


class OwnPipeline:
    """A plain pipeline with a scheduler's loop."""

    def __init__(self, transformer: torch.nn.Module) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        self.transformer, self.scheduler = transformer.eval(), FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(self, steps: int = 6) -> torch.Tensor:
        latent = torch.ones(1, 4)
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            latent = self.scheduler.step(self.transformer(latent, t / 1000), t, latent, return_dict=False)[0]
        return latent


def enable_by_holdover(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    return enable_cache_for_dit(pipeline, cache_config, block_adapter(pipeline.transformer))


def enable_by_library(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """As an enabler of vLLM-Omni does it."""
    config = DBCacheConfig(
        Fn_compute_blocks=cache_config.Fn_compute_blocks,
        Bn_compute_blocks=cache_config.Bn_compute_blocks,
        max_warmup_steps=cache_config.max_warmup_steps,
        max_continuous_cached_steps=cache_config.max_continuous_cached_steps,
        residual_diff_threshold=cache_config.residual_diff_threshold,
    )
    cache_dit.enable_cache(block_adapter(pipeline.transformer), cache_config=config)
    pipeline.marked = True

    def refresh(pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        cache_dit.refresh_context(pipeline.transformer, num_inference_steps=num_inference_steps, verbose=verbose)

    return refresh


@pytest.mark.parametrize("enabler", [enable_by_holdover, enable_by_library])
def test_CUSTOM_DIT_ENABLERS(enabler: Callable[..., Any]) -> None:
    pipe = OwnPipeline(Denoiser())
    plain, before = pipe(), snapshot(pipe.transformer)
    CUSTOM_DIT_ENABLERS["OwnPipeline"] = enabler
    backend = CacheDiTBackend(MUCH)
    backend.enable(pipe)
    assert find_cache(pipe) is backend
    with pytest.raises(holdover.EnableError, match="enabled already"):
        backend.enable(pipe)
    backend.refresh(pipe, 6)
    assert not torch.equal(pipe(), plain)
    with backend.using(max_warmup_steps=3):
        pipe()
    with backend.off():
        assert torch.equal(pipe(), plain)
    assert [g.trace("1") for g in backend.stats().generations] == ["ChhChh", "CCChhC", "CCCCCC"]
    backend.disable()
    assert differences(before, snapshot(pipe.transformer)) == []
    assert vars(pipe).keys() == {"transformer", "scheduler"}
    assert "_is_cached" not in vars(FakeDiffusionPipeline)
    assert torch.equal(pipe(), plain)


def test_CUSTOM_DIT_ENABLERS_that_calls_the_library_on_a_pipeline() -> None:
    """The library patches the class of the pipeline; only this one's cache is left, and nothing after disable()."""
    CUSTOM_DIT_ENABLERS["FluxPipeline"] = lambda pipeline, config: cache_dit.enable_cache(
        pipeline, cache_config=library_config(), calibrator_config=TaylorSeerCalibratorConfig()
    )
    pipe, other = FLUX.build(), FLUX.build()
    plain = run(pipe, **FLUX.call(steps=6))
    cls, before = dict(vars(type(pipe))), denoiser(pipe)
    with holdover.enable(pipe, "cache_dit") as cache:
        assert dict(vars(type(pipe))) == cls
        held = run(pipe, **FLUX.call(steps=6))
        assert cache.stats().last.trace("cond") == "ChhChh"
        assert torch.equal(run(other, **FLUX.call(steps=6)), run(other, **FLUX.call(steps=6)))
    assert differences(before, denoiser(pipe)) == []
    assert torch.equal(run(pipe, **FLUX.call(steps=6)), plain)
    del CUSTOM_DIT_ENABLERS["FluxPipeline"]
    with holdover.enable(pipe, "cache_dit", **LIBRARY_MUCH, enable_taylorseer=True):
        assert torch.equal(run(pipe, **FLUX.call(steps=6)), held)


def test_CUSTOM_DIT_ENABLERS_that_patches_the_forward() -> None:
    """What the library patches for a model is in place while a forward runs, and not when the cache is off."""

    class ChromaPipeline(OwnPipeline):
        pass

    tiny = MODELS["ChromaTransformer2DModel"]
    pipe = ChromaPipeline(tiny.build())
    CUSTOM_DIT_ENABLERS["ChromaPipeline"] = lambda pipeline, config: cache_dit.enable_cache(
        pipeline.transformer, cache_config=library_config()
    )
    inputs = tiny.inputs()
    with torch.no_grad():
        plain = pipe.transformer(**inputs)[0]
        before = snapshot(pipe.transformer)
        with holdover.enable(pipe, "cache_dit") as cache:
            for step in range(3):
                with pipe.transformer.cache_context("cond", step_index=step):
                    assert torch.allclose(pipe.transformer(**inputs)[0], plain, atol=1e-5)
            assert cache.stats().last.trace("cond") == "Chh"
            with cache.off():
                assert torch.equal(pipe.transformer(**inputs)[0], plain)
        assert differences(before, snapshot(pipe.transformer)) == []


def refuse(pipeline: Any, cache_config: Any) -> None:
    enable_by_library(pipeline, cache_config)
    raise ValueError("not this one")


def refuse_after_ours(pipeline: Any, cache_config: Any) -> None:
    enable_by_holdover(pipeline, cache_config)
    raise ValueError("not this one")


@pytest.mark.parametrize(
    ("enabler", "error", "message"),
    [
        (refuse, ValueError, "not this one"),
        (refuse_after_ours, ValueError, "not this one"),
        (lambda pipeline, config: None, holdover.EnableError, "has put no cache on this OwnPipeline"),
        (
            lambda pipeline, config: enable_by_library(pipeline, config.replaced(Fn_compute_blocks=9)),
            holdover.ConfigError,
            "blocks has 4 blocks",
        ),
    ],
)
def test_CUSTOM_DIT_ENABLERS_undo_everything_when_they_fail(enabler: Any, error: type, message: str) -> None:
    pipe = OwnPipeline(Denoiser())
    plain, before = pipe(), snapshot(pipe.transformer)
    CUSTOM_DIT_ENABLERS["OwnPipeline"] = enabler
    backend = CacheDiTBackend(MUCH)
    with pytest.raises(error, match=message):
        backend.enable(pipe)
    assert not backend.is_enabled()
    assert find_cache(pipe) is None
    assert differences(before, snapshot(pipe.transformer)) == []
    assert vars(pipe).keys() == {"transformer", "scheduler"}
    assert "_is_cached" not in vars(FakeDiffusionPipeline)
    assert torch.equal(pipe(), plain)


def test_CUSTOM_DIT_ENABLERS_by_class() -> None:
    assert {CUSTOM_DIT_ENABLERS[f"Wan22{kind}Pipeline"] for kind in ("", "I2V", "TI2V", "VACE")} == {
        enable_cache_for_wan22
    }
    assert CUSTOM_DIT_ENABLERS["Wan22S2VPipeline"] is enable_cache_for_wan22_s2v
    assert CUSTOM_DIT_ENABLERS["Cosmos3OmniDiffusersPipeline"] is enable_cache_for_cosmos3
    assert CUSTOM_DIT_ENABLERS["Cosmos3OmniPipeline"] is enable_cache_for_cosmos3
    assert CUSTOM_DIT_ENABLERS["Krea2Pipeline"] is enable_cache_for_krea2
    assert CUSTOM_DIT_ENABLERS["Magi2Pipeline"] is enable_cache_for_magi2
    assert CUSTOM_DIT_ENABLERS["MammothModa2DiTPipeline"] is enable_cache_for_mammothmoda2


def test_RefreshCacheContextFunc() -> None:
    assert get_origin(RefreshCacheContextFunc) is get_origin(Callable[[int], None])
    assert get_args(RefreshCacheContextFunc) == ([Any, int, bool], None)
    pipe = OwnPipeline(Declared())
    refresh: RefreshCacheContextFunc = enable_cache_for_dit(pipe, MUCH)
    assert refresh(pipe, 6, False) is None


def test_logger(caplog: pytest.LogCaptureFixture) -> None:
    assert isinstance(cache_dit_backend.logger, logging.Logger)
    with caplog.at_level(logging.INFO, cache_dit_backend.logger.name):
        enable_cache_for_dit(OwnPipeline(Declared()), MUCH)
    assert "cache-dit is enabled on OwnPipeline: transformer: cache-dit: blocks" in caplog.text


# BAGEL


def bagel_step(pipe: Any, keys: NaiveCache, step: int) -> torch.Tensor:
    inputs = {"update_past_key_values": False, "mode": "gen", "timestep": torch.full((5,), 1 - step / 6)}
    return pipe.transformer(torch.ones(5, WIDTH), keys, **inputs)


def test_BagelCachedAdapter() -> None:
    """`apply` caches; a KV cache object in place of encoder states is passed through."""
    pipe = pipeline_of(BagelTransformer())
    adapter = BlockAdapter(
        transformer=pipe.transformer, blocks=[pipe.transformer.layers], forward_pattern=[ForwardPattern.Pattern_0]
    )
    assert BagelCachedAdapter.apply(adapter, cache_config=library_config()) is adapter
    assert issubclass(BagelCachedAdapter, CachedAdapter)
    with torch.no_grad():
        for step in range(6):
            bagel_step(pipe, NaiveCache(), step)
    assert find_cache(pipe).stats().last.trace("1") == "ChhChh"
    holdover.disable(pipe)


def normalized(pipe: Any) -> BlockAdapter:
    adapter = BlockAdapter(
        transformer=pipe.transformer,
        blocks=[getattr(pipe.transformer, "layers", None) or pipe.transformer.blocks],
        forward_pattern=[
            ForwardPattern.Pattern_0 if isinstance(pipe.transformer, BagelTransformer) else ForwardPattern.Pattern_3
        ],
        check_forward_pattern=False,
    )
    return BlockAdapter.normalize(adapter)


def contexts_of(adapter_cls: Any, adapter: BlockAdapter) -> list[dict[str, Any]]:
    config = library_config()
    config.enable_separate_cfg = False
    names, contexts = adapter_cls.create_context(adapter, cache_config=config, calibrator_config=None)
    assert names == adapter.unique_blocks_name[0] == [context["name"] for context in contexts]
    return contexts


def test_BagelCachedAdapter_create_context() -> None:
    adapter = normalized(pipeline_of(BagelTransformer()))
    contexts = contexts_of(BagelCachedAdapter, adapter)
    manager = adapter.pipe._context_manager
    assert isinstance(manager, BagelCachedContextManager)
    assert manager.get_context(contexts[0]["name"]).cache_config.max_continuous_cached_steps == 2


@pytest.mark.parametrize(
    ("adapter_cls", "blocks_cls", "transformer"),
    [
        (BagelCachedAdapter, BagelCachedBlocks, BagelTransformer),
        (SensenovaCachedAdapter, SensenovaCachedBlocks, SensenovaTransformer),
        (Wan22S2VCachedAdapter, Wan22S2VCachedBlocks, S2VTransformer),
    ],
)
def test_CachedAdapter_collect_unified_blocks(adapter_cls: Any, blocks_cls: type, transformer: Any) -> None:
    """Of each of the three adapters: one block for each list, of the model's own class, over all its layers."""
    pipe = pipeline_of(transformer())
    adapter = normalized(pipe)
    contexts = contexts_of(adapter_cls, adapter)
    (collected,) = adapter_cls.collect_unified_blocks(adapter, contexts)
    assert list(collected) == adapter.unique_blocks_name[0]
    (block,) = collected[contexts[0]["name"]]
    assert type(block) is blocks_cls
    assert list(block.transformer_blocks) == list(adapter.blocks[0][0])


def unified_block(cache: CacheDiTBackend, transformer: torch.nn.Module) -> Any:
    return cache._adapter.adapted[transformer].lists[0].block


def set_context(block: Any, **settings: Any) -> CachedContextManager:
    """A context for a block that is called by itself."""
    manager = CachedContextManager("test")
    config = DBCacheConfig(Fn_compute_blocks=1, enable_separate_cfg=False).update(**settings)
    manager.set_context(manager.new_context(name="context", cache_config=config))
    block.context_manager = manager
    return manager


def test_BagelCachedBlocks_call_Mn_blocks() -> None:
    """The middle layers with a KV cache object: no residual of it."""
    pipe = pipeline_of(BagelTransformer())
    keys, hidden, kwargs = NaiveCache(), torch.ones(3, WIDTH), {"update_past_key_values": False, "mode": "gen"}
    with torch.no_grad(), holdover.enable(pipe, "cache_dit") as cache:
        block = unified_block(cache, pipe.transformer)
        assert isinstance(block, CachedBlocks_Pattern_0_1_2)
        set_context(block, Bn_compute_blocks=1)
        after, kept, residual, encoder_residual = block.call_Mn_blocks(hidden, keys, **kwargs)
        expected = hidden
        for layer in list(pipe.transformer.layers)[1:3]:
            expected, _ = layer(expected, keys, **kwargs)
    assert torch.equal(after, expected)
    assert torch.equal(residual, expected - hidden)
    assert kept is keys
    assert encoder_residual is None


def test_BagelCachedBlocks_compute_or_prune() -> None:
    pipe = pipeline_of(BagelTransformer())
    keys, kwargs = NaiveCache(), {"update_past_key_values": False, "mode": "gen"}
    layer = pipe.transformer.layers[0]
    with torch.no_grad(), holdover.enable(pipe, "cache_dit") as cache:
        block = unified_block(cache, pipe.transformer)
        hidden, kept = block.compute_or_prune(0, layer, torch.ones(1, WIDTH), keys, **kwargs)
        assert kept is keys
        assert torch.equal(hidden, layer(torch.ones(1, WIDTH), keys, **kwargs)[0])


def test_BagelCachedContextManager_apply_cache() -> None:
    manager = BagelCachedContextManager()
    assert isinstance(manager, CachedContextManager)
    manager.set_context(manager.new_context(name="layers_1", cache_config=DBCacheConfig(enable_separate_cfg=False)))
    manager.set_Bn_buffer(torch.ones(2), prefix="Bn_residual")
    hidden, kept = manager.apply_cache(torch.ones(2), keys := object(), "Bn_residual", "Bn_residual")
    assert kept is keys
    assert torch.equal(hidden, torch.full((2,), 2.0))


# CacheDiTAdapterConfig


def test_CacheDiTAdapterConfig_block_forward_patterns() -> None:
    pipe = OwnPipeline(Declared())
    with holdover.enable(pipe, "cache_dit", **LIBRARY_MUCH) as cache:
        pipe()
        assert cache.stats().notes == ("transformer: cache-dit: blocks (4 blocks, Pattern_3)",)
        assert cache.stats().last.trace("1") == "ChhChh"

    class Wrong(Declared):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"layers": ForwardPattern.Pattern_3})

    with pytest.raises(holdover.UnsupportedModelError, match="adapter config of Wrong names layers"):
        holdover.enable(Wrong(), "cache_dit")


def test_CacheDiTAdapterConfig_cached_adapter_cls() -> None:
    """Its own `create_context` and `collect_unified_blocks` are obeyed, and so is the manager it creates."""
    seen: list[str] = []

    class OwnManager(CachedContextManager):
        def apply_cache(self, *args: Any, **kwargs: Any) -> Any:
            seen.append("apply_cache")
            return super().apply_cache(*args, **kwargs)

    class OwnAdapter(CachedAdapter):
        @classmethod
        def create_context(cls, block_adapter: BlockAdapter, **context_kwargs: Any) -> Any:
            seen.append("create_context")
            context_kwargs["cache_config"].max_warmup_steps = 4
            names, contexts = super().create_context(block_adapter, **context_kwargs)
            manager = block_adapter.pipe._context_manager = OwnManager("own", persistent_context=True)
            for name, settings in zip(names, contexts, strict=True):
                manager.reset_context(name, **settings)
            return names, contexts

        @classmethod
        def collect_unified_blocks(cls, block_adapter: BlockAdapter, contexts_kwargs: list[dict]) -> Any:
            seen.append("collect_unified_blocks")
            return super().collect_unified_blocks(block_adapter, contexts_kwargs)

    class Own(Denoiser):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"blocks": ForwardPattern.Pattern_3}, OwnAdapter, False)

    pipe = OwnPipeline(Own())
    before = snapshot(pipe.transformer)
    with holdover.enable(pipe, "cache_dit", **LIBRARY_MUCH) as cache:
        pipe()
        assert cache.stats().last.trace("1") == "CCCChh"
    assert seen[:2] == ["create_context", "collect_unified_blocks"]
    assert seen.count("apply_cache") >= 2
    assert differences(before, snapshot(pipe.transformer)) == []
    assert "_is_cached" not in vars(FakeDiffusionPipeline)


def test_CacheDiTAdapterConfig_check_forward_pattern() -> None:
    """Linear's argument is called `input`: with the check, its pattern does not match."""

    class Checked(Denoiser):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"blocks": ForwardPattern.Pattern_3})

    assert Checked._cache_dit_adapter_config.check_forward_pattern
    with pytest.raises(holdover.UnsupportedModelError, match="does not match its cache-dit adapter"):
        holdover.enable(Checked(), "cache_dit")
    holdover.enable(Declared(), "cache_dit").disable()


@pytest.mark.parametrize("separate", [True, False])
def test_CacheDiTAdapterConfig_has_separate_cfg(separate: bool) -> None:
    """Whatever it says, two branches have contexts of their own: holdover knows them."""

    class Guided(Declared):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"blocks": ForwardPattern.Pattern_3}, None, False, separate)

    model = Guided().eval()
    with torch.no_grad(), holdover.enable(model, "cache_dit", **LIBRARY_MUCH) as cache:
        for step in range(6):
            for name in ("cond", "uncond"):
                with model.cache_context(name, step_index=step):
                    model(torch.ones(1, 4), torch.tensor(1 - step / 6))
        assert [cache.stats().last.trace(name) for name in ("cond", "uncond")] == ["ChhChh"] * 2


# CacheDiTBackend


def test_CacheDiTBackend() -> None:
    assert issubclass(CacheDiTBackend, CacheBackend)
    pipe = FLUX.build()
    backend = CacheDiTBackend(
        DiffusionCacheConfig(enable_taylorseer=True, scm_steps_mask_policy="fast", scm_steps_policy="static")
    )
    backend.enable(pipe)
    backend.refresh(pipe, 12)
    run(pipe, **FLUX.call(steps=12))
    assert backend.stats().last.trace("cond") == mask(12)


def test_CacheDiTBackend_config_and_enabled() -> None:
    pipe, backend = FLUX.build(), CacheDiTBackend(MUCH)
    assert backend.config is MUCH
    assert backend.enabled is backend.is_enabled() is False
    backend.enable(pipe)
    assert backend.enabled is backend.is_enabled() is True
    backend.disable()
    assert backend.enabled is backend.is_enabled() is False


def test_CacheDiTBackend_refresh_func() -> None:
    """`_refresh_func` is what the enabler returned, and `refresh` calls it."""
    calls: list[tuple[Any, ...]] = []

    def enabler(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
        refresh = enable_by_holdover(pipeline, cache_config)

        def own(*args: Any) -> None:
            calls.append(args)
            refresh(*args)

        return own

    pipe, backend = OwnPipeline(Denoiser()), CacheDiTBackend(MUCH)
    assert backend._refresh_func is None
    CUSTOM_DIT_ENABLERS["OwnPipeline"] = enabler
    backend.enable(pipe)
    assert callable(backend._refresh_func)
    backend.refresh(pipe, 6, verbose=False)
    assert calls == [(pipe, 6, False)]
    other = CacheDiTBackend(MUCH)
    other.enable(FLUX.build())
    assert callable(other._refresh_func)


def test_CacheDiTBackend_last_num_inference_steps() -> None:
    pipe, backend = OwnPipeline(Declared()), CacheDiTBackend(MUCH)
    backend.enable(pipe)
    assert backend._last_num_inference_steps is None
    for steps in (6, 8):
        backend.refresh(pipe, steps)
        assert backend._last_num_inference_steps == steps
    CUSTOM_DIT_ENABLERS["OwnPipeline"] = enable_by_library
    pipe, backend = OwnPipeline(Denoiser()), CacheDiTBackend(MUCH)
    backend.enable(pipe)
    backend.refresh(pipe, 7)
    assert backend._last_num_inference_steps == 7
    assert (
        pipe.transformer._context_manager.get_context(
            pipe.transformer._context_names[0]
        ).cache_config.num_inference_steps
        == 7
    )


def test_CacheDiTBackend_enable() -> None:
    """On one transformer, and on both of Wan 2.2."""
    for name, branch in (("FluxPipeline", "cond"), ("WanPipeline[2.2]", "transformer_2/cond")):
        pipe = PIPELINES[name].build()
        backend = CacheDiTBackend(MUCH)
        backend.enable(pipe)
        run(pipe, **PIPELINES[name].call(steps=6))
        assert "h" in backend.stats().last.trace(branch)


def test_CacheDiTBackend_maybe_build_block_adapter() -> None:
    pipe = pipeline_of(Declared())
    adapter = CacheDiTBackend.maybe_build_block_adapter(pipe)
    assert isinstance(adapter, BlockAdapter)
    assert adapter.transformer is pipe.transformer
    assert adapter.blocks == [pipe.transformer.blocks]
    assert adapter.forward_pattern == [ForwardPattern.Pattern_3]
    assert CacheDiTBackend.maybe_build_block_adapter(FLUX.build()) is None


def test_CacheDiTBackend_maybe_get_cached_adapter_cls() -> None:
    assert CacheDiTBackend.maybe_get_cached_adapter_cls(pipeline_of(Declared())) is None
    assert CacheDiTBackend.maybe_get_cached_adapter_cls(pipeline_of(BagelTransformer())) is BagelCachedAdapter
    assert CacheDiTBackend.maybe_get_cached_adapter_cls(FLUX.build()) is None


def test_CacheDiTBackend_refresh() -> None:
    """The context is for the new number of steps; those of Wan 2.2 are split at its boundary."""
    model, backend = Declared().eval(), CacheDiTBackend(SCM)
    backend.enable(model)
    for steps in (8, 12):
        backend.refresh(model, steps)
        denoise(model, steps)
        assert backend.stats().last.trace("1") == mask(steps)
    with pytest.raises(holdover.NotEnabledError, match="not on that Declared"):
        backend.refresh(Declared(), 8)
    with pytest.raises(holdover.ConfigError, match="at least 1, not 0"):
        backend.refresh(model, 0)
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe, backend = tiny.build(), CacheDiTBackend(SCM)
    pipe.register_to_config(boundary_ratio=0.5)
    backend.enable(pipe)
    backend.refresh(pipe, 20)
    run(pipe, **tiny.call(steps=20))
    high = sum(t >= 500 for t in pipe.scheduler.timesteps.tolist())
    assert backend.stats().last.trace("transformer/cond") == mask(high)
    assert backend.stats().last.trace("transformer_2/cond") == mask(20 - high)


@pytest.mark.parametrize("steps", [3, 5, 7])
def test_CacheDiTBackend_refresh_without_a_mask_for_the_steps(steps: int) -> None:
    """SCM has no masks for these: the residual threshold decides alone, after a warning."""
    model = Declared().eval()
    backend = CacheDiTBackend({"scm_steps_mask_policy": "fast", "scm_steps_policy": "static", **LIBRARY_MUCH})
    backend.enable(model)
    backend.refresh(model, steps)
    with pytest.warns(holdover.HoldoverWarning, match=f"no mask for the {steps} steps"):
        denoise(model, steps)
    assert backend.stats().last.trace("1") == "ChhChhC"[:steps]
    backend.refresh(model, 8)
    denoise(model, 8)
    assert backend.stats().last.trace("1") == mask(8)


# SenseNova-U1


def sensenova(pipe: Any, steps: int = 6) -> None:
    image = {"cache": [], "update_cache": False, "image_gen_indicators": torch.ones(5, dtype=torch.bool)}
    with torch.no_grad():
        for step in range(steps):
            pipe.transformer(torch.ones(5, WIDTH), timestep=torch.full((5,), 1 - step / steps), **image)


def test_SensenovaCachedAdapter() -> None:
    pipe = pipeline_of(SensenovaTransformer())
    adapter = BlockAdapter(
        transformer=pipe.transformer,
        blocks=[pipe.transformer.layers],
        forward_pattern=[ForwardPattern.Pattern_3],
        check_forward_pattern=False,
    )
    SensenovaCachedAdapter.apply(adapter, cache_config=library_config())
    sensenova(pipe)
    assert find_cache(pipe).stats().last.trace("1") == "ChhChh"


def test_SensenovaCachedBlocks_forward() -> None:
    """Image tokens of denoising passes are cached; a pass that writes the KV cache is computed whole."""
    pipe = pipeline_of(SensenovaTransformer())
    writes = {"cache": (keys := []), "update_cache": True}
    with torch.no_grad(), holdover.enable(pipe, "cache_dit") as cache:
        block = unified_block(cache, pipe.transformer)
        assert isinstance(block, CachedBlocks_Pattern_3_4_5)
        block.context_manager = None  # it is not asked
        block(torch.ones(5, WIDTH), **writes)
        assert len(keys) == 4
        with cache.using(**LIBRARY_MUCH):
            sensenova(pipe)
            assert cache.stats().last.trace("1") == "ChhChh"


# Wan 2.2 S2V


def test_Wan22S2VCachedAdapter() -> None:
    """`apply` caches, with audio after each of its layers and none twice."""
    pipe = Wan22S2VPipeline()
    plain, before = pipe(20), snapshot(pipe.transformer)
    adapter = BlockAdapter(
        transformer=pipe.transformer, blocks=[pipe.transformer.blocks], forward_pattern=[ForwardPattern.Pattern_3]
    )
    config = DBCacheConfig(
        Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=2, max_cached_steps=-1, residual_diff_threshold=1.0
    )
    Wan22S2VCachedAdapter.apply(adapter, cache_config=config)
    cache_dit.refresh_context(pipe.transformer, num_inference_steps=20)
    pipe.transformer.injected.clear()
    output = pipe(20)
    generation = find_cache(pipe).stats().last
    assert [generation.computed[branch] for branch in generation.branches] == [2, 2]
    assert 0 < (output - plain).abs().max() < 0.2 * plain.abs().max()
    holdover.disable(pipe)
    assert torch.equal(pipe(20), plain)
    changed = differences(before, snapshot(pipe.transformer))
    assert [path for path in changed if path != ".audio"] == []


def s2v_block(cache: CacheDiTBackend, pipe: Wan22S2VPipeline) -> tuple[Any, dict[str, torch.Tensor]]:
    block = unified_block(cache, pipe.transformer)
    set_context(block, Bn_compute_blocks=1)
    pipe.transformer.audio = torch.full((1, 1, WIDTH), 0.5)
    return block, {"e": torch.ones(1, 1, WIDTH), "context": torch.ones(1, 2, WIDTH)}


def run_layers(pipe: Wan22S2VPipeline, layers: range, kwargs: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = torch.ones(1, 5, WIDTH)
    for index in layers:
        hidden = pipe.transformer.blocks[index](hidden, **kwargs)
        hidden = pipe.transformer.after_transformer_block(index, hidden)
    return hidden


@pytest.mark.parametrize(
    ("method", "layers"),
    [
        ("call_blocks", range(4)),
        ("call_Fn_blocks", range(1)),
        ("call_Mn_blocks", range(1, 3)),
        ("call_Bn_blocks", range(3, 4)),
    ],
)
def test_Wan22S2VCachedBlocks(method: str, layers: range) -> None:
    """Each stretch of layers runs with the audio that is injected after them."""
    pipe = Wan22S2VPipeline()
    with torch.no_grad(), holdover.enable(pipe, "cache_dit") as cache:
        block, kwargs = s2v_block(cache, pipe)
        assert isinstance(block, CachedBlocks_Pattern_3_4_5)
        hidden, encoder, *residual = getattr(block, method)(torch.ones(1, 5, WIDTH), **kwargs)
        expected = run_layers(pipe, layers, kwargs)
    assert torch.equal(hidden, expected)
    assert encoder is None
    if residual:
        assert torch.equal(residual[0], expected - 1)


# The functions


def test_build_cache_context_refresh() -> None:
    """Refreshes with the SCM mask of its own config, and of its own transformer."""
    pipe = FLUX.build()
    refresh = build_cache_context_refresh(SCM)
    with pytest.raises(holdover.NotEnabledError, match="no holdover cache"):
        refresh(pipe, 12, True)
    own = enable_cache_for_dit(pipe, MUCH)
    traces = []
    for function in (refresh, own, build_cache_context_refresh(SCM, lambda pipe: pipe.transformer)):
        function(pipe, 12, False)
        run(pipe, **FLUX.call(steps=12))
        traces.append(find_cache(pipe).stats().last.trace("cond"))
    assert traces == [mask(12), "ChhChhChhChh", mask(12)]


def test_build_cache_context_refresh_with_a_step_to_start_over() -> None:
    pipe = OwnPipeline(Declared())
    enable_cache_for_dit(pipe, MUCH)
    config = DiffusionCacheConfig(force_refresh_step_hint=2, force_refresh_step_policy="repeat")
    build_cache_context_refresh(config)(pipe, 6, False)
    pipe()
    assert find_cache(pipe).stats().last.trace("1") == "ChChCh"


def test_cache_summary(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A table with the percentiles of the residual differences, and with `details` the steps and reasons."""
    monkeypatch.setenv("COLUMNS", "200")
    tiny = PIPELINES["WanPipeline[2.2]"]
    pipe = tiny.build()
    with holdover.enable(pipe, "cache_dit", max_warmup_steps=1, residual_diff_threshold=0.9) as cache:
        run(pipe, **tiny.call(steps=6))
        diffs = cache.residual_diffs()["transformer", "cond"]
        cache_summary(pipe)
        detailed = capsys.readouterr().out
        cache_summary(pipe, details=False)
        short = capsys.readouterr().out
    assert "transformer_2/uncond" in short
    assert "warm-up" not in short
    assert "warm-up" in detailed
    assert f"{max(diffs):.3f}" in short
    assert "diff p95" in short
    with pytest.raises(holdover.NotEnabledError, match="no holdover cache"):
        cache_summary(pipe)


def test_default_get_pipeline_transformer() -> None:
    pipe = pipeline_of(Declared())
    assert default_get_pipeline_transformer(pipe) is pipe.transformer


def test_enable_cache_for_cosmos3() -> None:
    """Only the generating pathway is cached."""

    class Cosmos3(Denoiser):
        def __init__(self) -> None:
            super().__init__()
            self.gen_layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states, timestep):
            hidden_states = super().forward(hidden_states, timestep)
            for layer in self.gen_layers:
                hidden_states = layer(hidden_states)
            return hidden_states

    class Cosmos3OmniPipeline(OwnPipeline):
        pass

    pipe = Cosmos3OmniPipeline(Cosmos3())
    refresh = enable_cache_for_cosmos3(pipe, MUCH)
    refresh(pipe, 6, False)
    pipe()
    stats = find_cache(pipe).stats()
    assert stats.notes == ("transformer: cache-dit: gen_layers (3 blocks, Pattern_3)",)
    assert stats.last.trace("1") == "ChhChh"


def test_enable_cache_for_dit() -> None:
    """By what the transformer declares, or by the library's adapter."""
    for pipe in (OwnPipeline(Declared()), FLUX.build()):
        refresh = enable_cache_for_dit(pipe, MUCH)
        refresh(pipe, 6, False)
        pipe() if isinstance(pipe, OwnPipeline) else run(pipe, **FLUX.call(steps=6))
        assert find_cache(pipe).stats().last.trace("1" if isinstance(pipe, OwnPipeline) else "cond") == "ChhChh"


def test_enable_cache_for_dit_block_adapter() -> None:
    pipe = FLUX.build()
    plain = run(pipe, **FLUX.call(steps=6))
    modifiers = [ParamsModifier(cache_config=DBCacheConfig().reset(max_warmup_steps=n)) for n in (1, 4)]
    given = flux_lists(pipe, params_modifiers=modifiers)
    enable_cache_for_dit(pipe, MUCH, given)
    assert given.pipe is pipe  # the caller's adapter is not changed
    run(pipe, **FLUX.call(steps=6))
    stats = find_cache(pipe).stats()
    assert "transformer_blocks (2 blocks, Pattern_1), single_transformer_blocks" in stats.notes[0]
    only = [forward.reason.endswith("in transformer_blocks only") for forward in stats.last.forwards]
    assert only == [False, True, True, False, False, False]
    holdover.disable(pipe)
    assert torch.equal(run(pipe, **FLUX.call(steps=6)), plain)


def test_enable_cache_for_dit_adapter_cls() -> None:
    class Own(CachedAdapter):
        made = 0

        @classmethod
        def collect_unified_blocks(cls, block_adapter, contexts_kwargs):
            cls.made += 1
            return super().collect_unified_blocks(block_adapter, contexts_kwargs)

    pipe = FLUX.build()
    before = dict(vars(type(pipe)))
    enable_cache_for_dit(pipe, MUCH, adapter_cls=Own)
    run(pipe, **FLUX.call(steps=6))
    assert Own.made == 1
    assert find_cache(pipe).stats().last.trace("cond") == "ChhChh"
    assert dict(vars(type(pipe))) == before


def test_enable_cache_for_dit_get_pipeline_transformer() -> None:
    """Only the module that it returns is cached; refresh and summary find it."""
    pipe = SimpleNamespace(transformer=Denoiser().eval(), small_transformer=Declared().eval())
    refresh = enable_cache_for_dit(pipe, SCM, get_pipeline_transformer=lambda pipe: pipe.small_transformer)
    refresh(pipe, 12, False)
    denoise(pipe.transformer, 12)
    denoise(pipe.small_transformer, 12)
    stats = find_cache(pipe).stats()
    assert stats.last.trace("1") == mask(12)
    assert stats.computed + stats.held == 12
    cache_summary(pipe)


class Wan22Pipeline:
    """Two experts that are not of diffusers, and a boundary that is not in a config."""

    def __init__(self) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler

        class WanTransformer3DModel(S2VTransformer):
            def forward(self, hidden_states, timestep, encoder_hidden_states):
                for block in self.blocks:
                    hidden_states = block(hidden_states, encoder_hidden_states, timestep[:, None, None])
                return hidden_states

        self.transformer, self.transformer_2 = WanTransformer3DModel().eval(), WanTransformer3DModel().eval()
        for model in (self.transformer, self.transformer_2):
            for block in model.blocks:
                block.forward = lambda h, e, t, net=block.net: (
                    h + 0.1 * torch.tanh(net(h) + e.mean(1, keepdim=True) + t)
                )
        self.scheduler = FlowMatchEulerDiscreteScheduler()
        self.boundary_ratio = 0.6

    @torch.no_grad()
    def __call__(self, steps: int) -> torch.Tensor:
        latent, words = torch.ones(1, 4, 8), torch.ones(1, 2, 8)
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            expert = self.transformer if t >= self.boundary_ratio * 1000 else self.transformer_2
            output = expert(latent, timestep=t.expand(1) / 1000, encoder_hidden_states=words)
            latent = self.scheduler.step(output, t, latent, return_dict=False)[0]
        return latent


def test_enable_cache_for_wan22() -> None:
    """Each expert over its own steps; the second warms up for 2 steps and holds at most 20."""
    pipe = Wan22Pipeline()
    plain, before = pipe(40), [snapshot(pipe.transformer), snapshot(pipe.transformer_2)]
    config = DiffusionCacheConfig(residual_diff_threshold=1.0, max_warmup_steps=3, max_continuous_cached_steps=-1)
    with holdover.enable(pipe, "cache_dit", **config.part(CacheDiTBackend.config_class)) as cache:
        pipe(40)
        generation = cache.stats().last
        high = sum(t >= 600 for t in pipe.scheduler.timesteps.tolist())
        assert generation.trace("transformer/1") == "CCC" + "h" * (high - 3)
        assert generation.trace("transformer_2/1") == ("CC" + "h" * 20 + "C" * 40)[: 40 - high]
    for module, state in zip((pipe.transformer, pipe.transformer_2), before, strict=True):
        assert differences(state, snapshot(module)) == []
    assert torch.equal(pipe(40), plain)


def test_enable_cache_for_wan22_with_one_transformer() -> None:
    pipe = Wan22Pipeline()
    pipe.transformer_2, pipe.boundary_ratio = None, -1
    enable_cache_for_wan22(pipe, MUCH)(pipe, 6, False)
    pipe(6)
    assert find_cache(pipe).stats().last.trace("1") == "ChhChh"


def test_enable_cache_for_wan22_with_masks() -> None:
    pipe = Wan22Pipeline()
    enable_cache_for_wan22(pipe, SCM)(pipe, 20, False)
    pipe(20)
    high = sum(t >= 600 for t in pipe.scheduler.timesteps.tolist())
    generation = find_cache(pipe).stats().last
    assert generation.trace("transformer/1") == mask(high)
    assert generation.trace("transformer_2/1") == mask(20 - high)


def test_enable_cache_for_wan22_s2v() -> None:
    pipe = Wan22S2VPipeline()
    plain = pipe()
    pipe.transformer.injected.clear()
    refresh = enable_cache_for_wan22_s2v(pipe, DiffusionCacheConfig(residual_diff_threshold=0.0))
    refresh(pipe, 12, False)
    assert torch.equal(pipe(), plain)  # the audio is injected once, not twice
    holdover.disable(pipe)
    assert torch.equal(pipe(), plain)


def test_may_enable_cache_dit() -> None:
    def config(name: str, values: Any) -> SimpleNamespace:
        return SimpleNamespace(cache_backend=name, cache_config=values)

    pipe = FLUX.build()
    assert may_enable_cache_dit(pipe, config("tea_cache", {"rel_l1_thresh": 0.2})) is None
    assert may_enable_cache_dit(pipe, config("cache_dit", None)) is None
    assert find_cache(pipe) is None
    backend = may_enable_cache_dit(pipe, config("cache-dit", {"max_warmup_steps": 2}))
    assert isinstance(backend, CacheDiTBackend)
    assert backend.is_enabled()
    assert backend.settings.max_warmup_steps == 2
    assert find_cache(pipe) is backend


# Beyond the page: what vLLM-Omni 0.30 added


def test_CacheDiTEnableResult() -> None:
    """An enabler may return it: the refresh function in it is the one that is called."""
    calls: list[int] = []

    def enabler(pipeline: Any, cache_config: Any) -> CacheDiTEnableResult:
        adapter = block_adapter(pipeline.transformer)
        cache_dit.enable_cache(adapter, cache_config=library_config())
        return CacheDiTEnableResult(refresh=lambda pipeline, steps, verbose: calls.append(steps), targets=(adapter,))

    CUSTOM_DIT_ENABLERS["OwnPipeline"] = enabler
    pipe, backend = OwnPipeline(Denoiser()), CacheDiTBackend()
    backend.enable(pipe)
    backend.refresh(pipe, 6)
    pipe()
    assert calls == [6]
    assert backend.stats().last.trace("1") == "ChhChh"
    backend.disable(pipe)
    assert find_cache(pipe) is None


def test_CacheDiTRequestSpec() -> None:
    """A request's own cache: the same key refreshes it, another key or none takes it off."""
    pipe = OwnPipeline(Declared())
    plain, runtime = pipe(), RequestScopedCacheDiTRuntime(pipe)
    runtime.prepare(CacheDiTRequestSpec("fast", MUCH, 6))
    first = find_cache(pipe)
    assert runtime.is_enabled
    runtime.prepare(CacheDiTRequestSpec("fast", MUCH, 8))
    assert find_cache(pipe) is first
    assert first._last_num_inference_steps == 8
    runtime.prepare(CacheDiTRequestSpec("careful", DiffusionCacheConfig(residual_diff_threshold=0.0), 6))
    assert find_cache(pipe) is not first
    assert torch.equal(pipe(), plain)
    runtime.prepare(None)
    assert not runtime.is_enabled
    assert find_cache(pipe) is None
    with pytest.raises(holdover.NotEnabledError, match="not enabled"):
        runtime.adopt(CacheDiTBackend(), installation_key="other")


def test_enable_cache_for_krea2() -> None:
    class Krea2Pipeline(OwnPipeline):
        is_distilled = True

    class Krea(Denoiser):
        def __init__(self) -> None:
            super().__init__()
            self.transformer_blocks = self.blocks
            del self.blocks

        def forward(self, hidden_states, timestep):
            hidden_states = hidden_states + timestep
            for block in self.transformer_blocks:
                hidden_states = block(hidden_states)
            return hidden_states

    pipe = Krea2Pipeline(Krea())
    with holdover.enable(pipe, "cache_dit", **LIBRARY_MUCH) as cache:
        pipe()
        assert cache.stats().last.trace("1") == "ChhChh"


def test_enable_cache_for_mammothmoda2() -> None:
    """The transformer has another name, and only its main layers are cached."""

    class Layer(torch.nn.Linear):
        def forward(self, hidden_states):
            return super().forward(hidden_states)

    class Moda(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.refiner = torch.nn.ModuleList(Layer(4, 4) for _ in range(2))
            self.layers = torch.nn.ModuleList(Layer(4, 4) for _ in range(4))

        def forward(self, hidden_states, timestep):
            for layer in self.refiner:
                hidden_states = layer(hidden_states + timestep)
            for layer in self.layers:
                hidden_states = layer(hidden_states)
            return hidden_states

    class MammothModa2DiTPipeline(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gen_transformer, self._dit_modules = Moda().eval(), ["gen_transformer"]

    pipe, backend = MammothModa2DiTPipeline(), CacheDiTBackend(MUCH)
    backend.enable(pipe)
    backend.refresh(pipe, 6)
    denoise(pipe.gen_transformer)
    assert backend.stats().notes == ("gen_transformer: cache-dit: layers (4 blocks, Pattern_3)",)
    assert backend.stats().last.trace("1") == "ChhChh"


def test_enable_cache_for_magi2() -> None:
    """A part of the transformer is cached: its stack of layers, which has no timestep. `refresh` tells the steps."""

    class Layer(torch.nn.Linear):
        def forward(self, hidden_states, rope):
            return super().forward(hidden_states) + rope

    class Stack(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(Layer(4, 4) for _ in range(4))

        def forward(self, hidden_states, rope):
            for layer in self.layers:
                hidden_states = layer(hidden_states, rope)
            return hidden_states

    class Magi2Transformer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.block = Stack()

        def forward(self, x, time):
            return self.block(x + time, torch.zeros(4)) * 2

    class Magi2Pipeline(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.transformer = Magi2Transformer().eval()

    pipe, backend = Magi2Pipeline(), CacheDiTBackend(MUCH)
    plain = denoise(pipe.transformer)
    backend.enable(pipe)
    assert backend.stats().notes == ("transformer.block: cache-dit: layers (4 blocks, Pattern_3)",)
    for _ in range(2):
        backend.refresh(pipe, 6)
        denoise(pipe.transformer)
        assert backend.stats().last.trace("1") == "ChhChh"
    backend.disable()
    assert all(torch.equal(a, b) for a, b in zip(denoise(pipe.transformer), plain, strict=True))


def test_an_error_in_the_librarys_adapter_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(pipe: Any, **options: Any) -> BlockAdapter:
        return {}["single_blocks"]

    monkeypatch.setitem(BlockAdapterRegister._adapters, "Flux", broken)
    with pytest.raises(holdover.UnsupportedModelError, match="'Flux' fails on .*: KeyError: 'single_blocks'") as caught:
        holdover.enable(FLUX.build(), "cache_dit")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(holdover.UnsupportedModelError, match="has no adapter for Linear"):
        holdover.enable(torch.nn.Linear(2, 2), "cache_dit")
