"""The documented functions and classes."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from cache_dit import BlockAdapter, DBCacheConfig, ForwardPattern, ParamsModifier
from cache_dit.caching import CachedAdapter

import holdover
from cache_dit_backend.families import BagelTransformer, S2VTransformer, Wan22S2VPipeline, pipeline_of
from holdover.base import DiffusionCacheConfig
from holdover.cache_dit_backend import (
    CUSTOM_DIT_ENABLERS,
    BagelCachedAdapter,
    BagelCachedBlocks,
    BagelCachedContextManager,
    CacheDiTAdapterConfig,
    CacheDiTBackend,
    build_cache_context_refresh,
    default_get_pipeline_transformer,
    enable_cache_for_cosmos3,
    enable_cache_for_dit,
    enable_cache_for_wan22,
    enable_cache_for_wan22_s2v,
    may_enable_cache_dit,
)
from holdover.cache_dit_backend.config import quiet_library
from holdover.engine.backend import find_cache
from snapshots import differences, snapshot
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

MUCH = DiffusionCacheConfig(residual_diff_threshold=1.0, max_warmup_steps=1, max_continuous_cached_steps=2)
FLUX = PIPELINES["FluxPipeline"]


@pytest.fixture(autouse=True)
def _enablers() -> Iterator[None]:
    kept = dict(CUSTOM_DIT_ENABLERS)
    yield
    CUSTOM_DIT_ENABLERS.clear()
    CUSTOM_DIT_ENABLERS.update(kept)


def flux_lists(pipe, **given) -> BlockAdapter:
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


def test_an_adapter_of_ones_own() -> None:
    pipe = FLUX.build()
    plain = run(pipe, **FLUX.call(steps=6))
    refresh = enable_cache_for_dit(pipe, MUCH, flux_lists(pipe))
    cache = find_cache(pipe)
    refresh(pipe, 6, False)
    assert not torch.equal(run(pipe, **FLUX.call(steps=6)), plain)
    assert cache.stats().last.trace("cond") == "ChhChh"
    assert "transformer_blocks (2 blocks, Pattern_1), single_transformer_blocks" in cache.stats().notes[0]
    cache.disable()
    assert torch.equal(run(pipe, **FLUX.call(steps=6)), plain)


def test_settings_that_an_adapter_changes_for_one_list() -> None:
    pipe = FLUX.build()
    modifiers = [ParamsModifier(cache_config=DBCacheConfig().reset(max_warmup_steps=n)) for n in (1, 4)]
    enable_cache_for_dit(pipe, MUCH, flux_lists(pipe, params_modifiers=modifiers))
    run(pipe, **FLUX.call(steps=6))
    forwards = find_cache(pipe).stats().last.forwards
    assert [forward.reason.endswith("in transformer_blocks only") for forward in forwards] == [
        False,
        True,
        True,
        False,
        False,
        False,
    ]


def test_a_foreign_adapter_class_makes_the_blocks_and_patches_nothing() -> None:
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


def test_refresh_asks_for_a_cache_and_a_mask() -> None:
    pipe = FLUX.build()
    refresh = build_cache_context_refresh(DiffusionCacheConfig(scm_steps_mask_policy="fast"))
    with pytest.raises(holdover.NotEnabledError, match="no holdover cache"):
        refresh(pipe, 12, True)
    enable_cache_for_dit(pipe, MUCH)
    refresh(pipe, 12, True)
    with pytest.raises(holdover.ConfigError, match="no mask for the 7 steps"):
        refresh(pipe, 7, True)
    build_cache_context_refresh(MUCH, lambda pipe: pipe.transformer)(pipe, 7, False)


def test_a_third_party_enabler_is_taken_over_by_the_backend() -> None:
    class OwnFluxPipeline(type(FLUX.build())):
        pass

    seen = []

    def enable_cache_for_own(pipeline, cache_config):
        seen.append(cache_config)
        return enable_cache_for_dit(pipeline, cache_config, flux_lists(pipeline))

    CUSTOM_DIT_ENABLERS["OwnFluxPipeline"] = enable_cache_for_own
    pipe = FLUX.build()
    pipe.__class__ = OwnFluxPipeline
    plain = run(pipe, **FLUX.call(steps=6))
    backend = CacheDiTBackend(MUCH)
    backend.enable(pipe)
    assert seen == [MUCH]
    assert backend.is_enabled()
    assert find_cache(pipe) is backend
    with pytest.raises(holdover.EnableError, match="enabled already"):
        backend.enable(pipe)
    backend.refresh(pipe, 6)
    run(pipe, **FLUX.call(steps=6))
    with backend.using(max_warmup_steps=3):
        run(pipe, **FLUX.call(steps=6))
    assert [g.trace("cond") for g in backend.stats().generations] == ["ChhChh", "CCChhC"]
    backend.disable()
    assert torch.equal(run(pipe, **FLUX.call(steps=6)), plain)


def test_an_enabler_that_puts_nothing_on_is_an_error() -> None:
    CUSTOM_DIT_ENABLERS["FluxTransformer2DModel"] = lambda pipeline, config: None
    with pytest.raises(holdover.EnableError, match="has put no holdover cache on this FluxPipeline"):
        holdover.enable(FLUX.build(), "cache_dit")


class Declared(torch.nn.Module):
    """A transformer that says how it is cached."""

    _cache_dit_adapter_config = CacheDiTAdapterConfig(
        block_forward_patterns={"blocks": ForwardPattern.Pattern_3}, check_forward_pattern=False
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(4))

    def forward(self, hidden_states: torch.Tensor, timestep: torch.Tensor) -> torch.Tensor:
        hidden_states = hidden_states + timestep
        for block in self.blocks:
            hidden_states = block(hidden_states)
        return hidden_states


def test_a_declared_adapter() -> None:
    pipe = pipeline_of(Declared())
    adapter = CacheDiTBackend.maybe_build_block_adapter(pipe)
    assert adapter.blocks_name == ["blocks"]
    assert adapter.forward_pattern == [ForwardPattern.Pattern_3]
    assert CacheDiTBackend.maybe_get_cached_adapter_cls(pipe) is None
    assert CacheDiTBackend.maybe_get_cached_adapter_cls(pipeline_of(BagelTransformer())) is BagelCachedAdapter
    assert CacheDiTBackend.maybe_build_block_adapter(FLUX.build()) is None
    assert default_get_pipeline_transformer(pipe) is pipe.transformer
    assert default_get_pipeline_transformer(pipe.transformer) is pipe.transformer
    with torch.no_grad(), holdover.enable(pipe, "cache_dit", residual_diff_threshold=1.0, max_warmup_steps=1) as cache:
        for step in range(4):
            pipe.transformer(torch.ones(1, 4), torch.tensor(1 - step / 4))
        assert cache.stats().last.trace("1") == "Chhh"


def test_a_declaration_that_is_wrong_names_what_is() -> None:
    class Wrong(Declared):
        _cache_dit_adapter_config = CacheDiTAdapterConfig({"layers": ForwardPattern.Pattern_3})

    with pytest.raises(holdover.UnsupportedModelError, match="adapter config of Wrong names layers"):
        holdover.enable(Wrong(), "cache_dit")
    with pytest.raises(holdover.UnsupportedModelError, match="no adapter for Linear"):
        holdover.enable(torch.nn.Linear(2, 2), "cache_dit")
    with pytest.raises(holdover.UnsupportedModelError, match="adapter config of Linear names blocks"):
        enable_cache_for_wan22(pipeline_of(torch.nn.Linear(2, 2)), MUCH)


def test_bagels_parts_by_themselves() -> None:
    manager = BagelCachedContextManager()
    manager.set_context(manager.new_context(name="layers_1", cache_config=DBCacheConfig(enable_separate_cfg=False)))
    manager.set_Bn_buffer(torch.ones(2), prefix="Bn_residual")
    hidden, kept = manager.apply_cache(torch.ones(2), kv := object(), "Bn_residual", "Bn_residual")
    assert kept is kv
    assert torch.equal(hidden, torch.full((2,), 2.0))
    pipe = pipeline_of(BagelTransformer())
    with holdover.enable(pipe, "cache_dit") as cache:
        block = cache._adapter.adapt(pipe.transformer).lists[0].block
        assert isinstance(block, BagelCachedBlocks)
        layer = pipe.transformer.layers[0]
        kwargs = {"update_past_key_values": False, "mode": "gen"}
        from cache_dit_backend.families import NaiveCache

        hidden, kept = block.compute_or_prune(0, layer, torch.ones(1, 8), keys := NaiveCache(), **kwargs)
        assert kept is keys
        assert torch.equal(hidden, layer(torch.ones(1, 8), keys, **kwargs)[0])


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


def test_wan22_by_a_pipeline_without_a_config() -> None:
    pipe = Wan22Pipeline()
    plain = pipe(20)
    before = [snapshot(pipe.transformer), snapshot(pipe.transformer_2)]
    settings = {"scm_steps_mask_policy": "medium", "scm_steps_policy": "static"}
    with holdover.enable(pipe, "cache_dit", **settings) as cache:
        pipe(20)
        generation = cache.stats().last
    high = sum(t >= 600 for t in pipe.scheduler.timesteps.tolist())
    from cache_dit import steps_mask

    for name, steps in (("transformer/1", high), ("transformer_2/1", 20 - high)):
        expected = "".join("hC"[m] for m in steps_mask(mask_policy="medium", total_steps=steps))
        assert generation.trace(name) == expected
    assert [
        differences(b, snapshot(t)) for b, t in zip(before, (pipe.transformer, pipe.transformer_2), strict=True)
    ] == [[], []]
    assert torch.equal(pipe(20), plain)


def test_cosmos3_with_a_list_of_its_own_for_what_is_generated() -> None:
    class Cosmos3(Declared):
        _cache_dit_adapter_config = None

        def __init__(self) -> None:
            super().__init__()
            self.gen_layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))

        def forward(self, hidden_states, timestep):
            hidden_states = super().forward(hidden_states, timestep)
            for layer in self.gen_layers:
                hidden_states = layer(hidden_states)
            return hidden_states

    pipe = pipeline_of(Cosmos3())
    enable_cache_for_cosmos3(pipe, MUCH)
    assert find_cache(pipe).stats().notes == ("transformer: cache-dit: gen_layers (3 blocks, Pattern_3)",)


def test_an_engines_config_says_whether() -> None:
    def config(name, values):
        return SimpleNamespace(cache_backend=name, cache_config=values)

    pipe = FLUX.build()
    assert may_enable_cache_dit(pipe, config("tea_cache", {"rel_l1_thresh": 0.2})) is None
    assert may_enable_cache_dit(pipe, config("cache_dit", None)) is None
    backend = may_enable_cache_dit(pipe, config("cache-dit", {"max_warmup_steps": 2}))
    assert backend.is_enabled()
    assert backend.settings.max_warmup_steps == 2
    assert find_cache(pipe) is backend


def test_which_classes_have_an_enabler() -> None:
    assert CUSTOM_DIT_ENABLERS["Wan22Pipeline"] is enable_cache_for_wan22
    assert CUSTOM_DIT_ENABLERS[Wan22S2VPipeline.__name__] is enable_cache_for_wan22_s2v
    assert enable_cache_for_cosmos3 in CUSTOM_DIT_ENABLERS.values()
    assert "Cosmos3OmniTransformer" in MODELS
