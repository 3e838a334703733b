"""Every documented class, function, attribute and signature, where it is documented, and doing what is said of it.

The documents are those of vLLM-Omni's `diffusion.cache`: code written against them runs by changing the package name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from abc import ABC
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from cache_dit.caching import CachedAdapter, CachedContextManager
from cache_dit.caching.cache_blocks import CachedBlocks_Pattern_0_1_2, CachedBlocks_Pattern_3_4_5
from diffusers.hooks import ModelHook

from holdover.base import CacheBackend, DiffusionCacheConfig
from holdover.cache_dit_backend import (
    BagelCachedAdapter,
    BagelCachedBlocks,
    BagelCachedContextManager,
    CacheDiTAdapterConfig,
    CacheDiTBackend,
    CacheDiTConfig,
    SensenovaCachedAdapter,
    SensenovaCachedBlocks,
    Wan22S2VCachedAdapter,
    Wan22S2VCachedBlocks,
)
from holdover.context import CacheContext
from holdover.magcache import MagCacheBackend, MagCacheConfig, MagCacheState
from holdover.magcache.hook import MagCacheBlockHook, MagCacheHeadHook
from holdover.magcache.strategy import (
    FluxMagCacheStrategy,
    MagCacheStrategy,
    TransformerBlockMetadata,
)
from holdover.prompt_embed_cache import PromptEmbedCache
from holdover.teacache import TeaCacheBackend, TeaCacheConfig
from holdover.teacache.hook import TeaCacheHook
from tiny.pipelines import PIPELINES, run

FLUX = "FluxTransformer2DModel"
CACHE_DIT = "holdover.cache_dit_backend"

# Where each name is

PACKAGE = [
    "CacheBackend",
    "CacheContext",
    "PromptEmbedCache",
    "TeaCacheBackend",
    "TeaCacheConfig",
    "install_prompt_embed_cache",
    "resolve_prompt_embed_cache_config",
    "uninstall_prompt_embed_cache",
    "base",
    "cache_dit_backend",
    "magcache",
    "prompt_embed_cache",
    "selector",
    "teacache",
]
NAMES = {
    "holdover.magcache.state": ["MagCacheState"],
    "holdover": PACKAGE,
    "holdover.base": ["CacheBackend", "DiffusionCacheConfig"],
    "holdover.selector": ["get_cache_backend"],
    "holdover.cache_dit_backend": [
        "CUSTOM_DIT_ENABLERS",
        "BagelCachedAdapter",
        "BagelCachedBlocks",
        "BagelCachedContextManager",
        "CacheDiTAdapterConfig",
        "CacheDiTBackend",
        "RefreshCacheContextFunc",
        "SensenovaCachedAdapter",
        "SensenovaCachedBlocks",
        "Wan22S2VCachedAdapter",
        "Wan22S2VCachedBlocks",
        "build_cache_context_refresh",
        "cache_summary",
        "default_get_pipeline_transformer",
        "enable_cache_for_cosmos3",
        "enable_cache_for_dit",
        "enable_cache_for_wan22",
        "enable_cache_for_wan22_s2v",
        "logger",
        "may_enable_cache_dit",
    ],
    "holdover.prompt_embed_cache": [
        "PromptEmbedCache",
        "install_prompt_embed_cache",
        "resolve_prompt_embed_cache_config",
        "uninstall_prompt_embed_cache",
    ],
    "holdover.teacache": [
        "CacheContext",
        "TeaCacheBackend",
        "TeaCacheConfig",
        "TeaCacheHook",
        "TeaCacheState",
        "apply_teacache_hook",
    ],
    "holdover.teacache.hook": ["TeaCacheHook", "apply_teacache_hook"],
    "holdover.teacache.backend": ["TeaCacheBackend"],
    "holdover.teacache.config": ["TeaCacheConfig"],
    "holdover.magcache": [
        "FluxMagCacheStrategy",
        "MagCacheBackend",
        "MagCacheBlockHook",
        "MagCacheConfig",
        "MagCacheHeadHook",
        "MagCacheState",
        "MagCacheStrategy",
        "apply_mag_cache_hook",
        "register_strategy",
    ],
    "holdover.magcache.backend": ["MagCacheBackend"],
    "holdover.magcache.config": ["MagCacheConfig"],
    "holdover.magcache.hook": ["MagCacheBlockHook", "MagCacheHeadHook", "apply_mag_cache_hook", "logger"],
    "holdover.magcache.strategy": [
        "FluxMagCacheStrategy",
        "MagCacheStrategy",
        "TransformerBlockMetadata",
        "register_strategy",
    ],
}


def _named() -> Iterator[Any]:
    for module, names in NAMES.items():
        yield from (pytest.param(module, name, id=f"{module}.{name}") for name in names)


@pytest.mark.parametrize(("module", "name"), _named())
def test_importable_where_documented(module: str, name: str) -> None:
    scope: dict[str, Any] = {}
    exec(f"from {module} import {name}", scope)
    found = scope[name]
    if inspect.isclass(found) or inspect.isfunction(found):
        homes = [importlib.import_module(other) for other, names in NAMES.items() if name in names]
        assert all(getattr(home, name) is found for home in homes)
        assert found.__doc__


# Signatures: what is documented is there, in that order, of that kind and with that default; more may follow, optional

SIGNATURES = [
    # The package
    ("holdover.base", "CacheBackend.enable", "(self, pipeline)"),
    ("holdover.base", "CacheBackend.refresh", "(self, pipeline, num_inference_steps, verbose=True)"),
    ("holdover.base", "CacheBackend.is_enabled", "(self)"),
    ("holdover.context", "CacheContext.validate", "(self)"),
    (
        "holdover.context",
        "CacheContext",
        "(modulated_input, hidden_states, encoder_hidden_states, temb, run_transformer_blocks, postprocess,"
        " extra_states=None)",
    ),
    ("holdover.selector", "get_cache_backend", "(cache_backend, cache_config=None)"),
    ("holdover.base", "DiffusionCacheConfig.from_dict", "(values)"),
    # The prompt-embedding cache
    ("holdover.prompt_embed_cache", "PromptEmbedCache.clear", "(self)"),
    ("holdover.prompt_embed_cache", "PromptEmbedCache.get", "(self, key)"),
    ("holdover.prompt_embed_cache", "PromptEmbedCache.put", "(self, key, value)"),
    ("holdover.prompt_embed_cache", "PromptEmbedCache.stats", "(self)"),
    (
        "holdover.prompt_embed_cache",
        "install_prompt_embed_cache",
        "(pipeline, *, max_size=32, enabled=True, model_tag=None)",
    ),
    ("holdover.prompt_embed_cache", "resolve_prompt_embed_cache_config", "(enable=None, max_size=None)"),
    ("holdover.prompt_embed_cache", "uninstall_prompt_embed_cache", "(pipeline)"),
    # cache-dit
    (CACHE_DIT, "CacheDiTBackend.enable", "(self, pipeline)"),
    (CACHE_DIT, "CacheDiTBackend.refresh", "(self, pipeline, num_inference_steps, verbose=True)"),
    (CACHE_DIT, "CacheDiTBackend.is_enabled", "(self)"),
    (CACHE_DIT, "CacheDiTBackend.maybe_build_block_adapter", "(pipeline)"),
    (CACHE_DIT, "CacheDiTBackend.maybe_get_cached_adapter_cls", "(pipeline)"),
    (
        CACHE_DIT,
        "CacheDiTAdapterConfig",
        "(block_forward_patterns, cached_adapter_cls=None, check_forward_pattern=True, has_separate_cfg=False)",
    ),
    (CACHE_DIT, "BagelCachedAdapter.collect_unified_blocks", "(block_adapter, contexts_kwargs)"),
    (CACHE_DIT, "BagelCachedAdapter.create_context", "(block_adapter, **context_kwargs)"),
    (CACHE_DIT, "BagelCachedBlocks.call_Mn_blocks", "(self, hidden_states, encoder_hidden_states, *args, **kwargs)"),
    (
        CACHE_DIT,
        "BagelCachedBlocks.compute_or_prune",
        "(self, block_id, block, hidden_states, encoder_hidden_states, *args, **kwargs)",
    ),
    (
        CACHE_DIT,
        "BagelCachedContextManager.apply_cache",
        "(self, hidden_states, encoder_hidden_states=None, prefix='Bn', encoder_prefix='Bn_encoder')",
    ),
    (CACHE_DIT, "SensenovaCachedAdapter.collect_unified_blocks", "(block_adapter, contexts_kwargs)"),
    (CACHE_DIT, "SensenovaCachedBlocks.forward", "(self, hidden_states, *args, **kwargs)"),
    (CACHE_DIT, "Wan22S2VCachedAdapter.collect_unified_blocks", "(block_adapter, contexts_kwargs)"),
    (CACHE_DIT, "Wan22S2VCachedBlocks.call_Bn_blocks", "(self, hidden_states, *args, **kwargs)"),
    (CACHE_DIT, "Wan22S2VCachedBlocks.call_Fn_blocks", "(self, hidden_states, *args, **kwargs)"),
    (CACHE_DIT, "Wan22S2VCachedBlocks.call_Mn_blocks", "(self, hidden_states, *args, **kwargs)"),
    (CACHE_DIT, "Wan22S2VCachedBlocks.call_blocks", "(self, hidden_states, *args, **kwargs)"),
    (
        CACHE_DIT,
        "build_cache_context_refresh",
        "(cache_config, get_pipeline_transformer=default_get_pipeline_transformer)",
    ),
    (CACHE_DIT, "cache_summary", "(pipeline, details=True)"),
    (CACHE_DIT, "default_get_pipeline_transformer", "(pipeline)"),
    (CACHE_DIT, "enable_cache_for_cosmos3", "(pipeline, cache_config)"),
    (CACHE_DIT, "enable_cache_for_dit", "(pipeline, cache_config, block_adapter=None, adapter_cls=None)"),
    (CACHE_DIT, "enable_cache_for_wan22", "(pipeline, cache_config)"),
    (CACHE_DIT, "enable_cache_for_wan22_s2v", "(pipeline, cache_config)"),
    (CACHE_DIT, "may_enable_cache_dit", "(pipeline, od_config)"),
    # TeaCache
    ("holdover.teacache", "TeaCacheBackend.enable", "(self, pipeline)"),
    ("holdover.teacache", "TeaCacheBackend.refresh", "(self, pipeline, num_inference_steps, verbose=True)"),
    (
        "holdover.teacache",
        "TeaCacheConfig",
        "(rel_l1_thresh=0.2, coefficients=None, transformer_type='QwenImageTransformer2DModel')",
    ),
    ("holdover.teacache.hook", "TeaCacheHook", "(config)"),
    ("holdover.teacache.hook", "TeaCacheHook.initialize_hook", "(self, module)"),
    ("holdover.teacache.hook", "TeaCacheHook.new_forward", "(self, module, *args, **kwargs)"),
    ("holdover.teacache.hook", "TeaCacheHook.reset_state", "(self, module)"),
    ("holdover.teacache.hook", "apply_teacache_hook", "(module, config)"),
    # MagCache
    ("holdover.magcache", "MagCacheBackend.enable", "(self, pipeline)"),
    ("holdover.magcache", "MagCacheBackend.refresh", "(self, pipeline, num_inference_steps, verbose=True)"),
    ("holdover.magcache.hook", "MagCacheHeadHook.initialize_hook", "(self, module)"),
    ("holdover.magcache.hook", "MagCacheHeadHook.log_cache_hit", "(self, state, output, ret)"),
    ("holdover.magcache.hook", "MagCacheHeadHook.log_cache_miss", "(self, state, output)"),
    ("holdover.magcache.hook", "MagCacheHeadHook.new_forward", "(self, module, *args, **kwargs)"),
    ("holdover.magcache.hook", "MagCacheHeadHook.reset_state", "(self, module)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.advance_step", "(self, state)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.initialize_hook", "(self, module)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.log_residual_computed", "(self, state, residual)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.new_forward", "(self, module, *args, **kwargs)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.perform_calibration", "(self, state, current_residual)"),
    ("holdover.magcache.hook", "MagCacheBlockHook.reset_state", "(self, module)"),
    ("holdover.magcache.hook", "apply_mag_cache_hook", "(module, config, strategy=None)"),
    ("holdover.magcache.strategy", "MagCacheStrategy.compute_residual", "(self, output, head_input)"),
    (
        "holdover.magcache.strategy",
        "MagCacheStrategy.apply_residual_tuple",
        "(self, hidden_states, encoder_hidden_states, residual)",
    ),
    ("holdover.magcache.strategy", "MagCacheStrategy.register_block_metadata", "(self, block_class)"),
    ("holdover.magcache.strategy", "register_strategy", "(transformer_cls_name, strategy)"),
]


def _shape(parameter: inspect.Parameter) -> tuple[str, Any, Any]:
    return parameter.name, parameter.kind, parameter.default


@pytest.mark.parametrize(("module", "path", "text"), SIGNATURES, ids=[f"{m}.{p}" for m, p, _ in SIGNATURES])
def test_signature(module: str, path: str, text: str) -> None:
    found: Any = importlib.import_module(module)
    for name in path.split("."):
        found = getattr(found, name)
    scope: dict[str, Any] = dict(vars(importlib.import_module(module)))
    exec(f"def documented{text}: ...", scope)
    documented = [_shape(p) for p in inspect.signature(scope["documented"]).parameters.values()]
    parameters = list(inspect.signature(found).parameters.values())
    names = [name for name, _, _ in documented]
    assert [_shape(p) for p in parameters if p.name in names] == documented
    more = [p for p in parameters if p.name not in names]
    assert all(p.default is not p.empty for p in more)
    positional = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert positional[: len(names)] == [
        n for n, kind, _ in documented if kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    ]


FIELDS = {
    "rel_l1_thresh": 0.2,
    "coefficients": None,
    "mag_threshold": 0.24,
    "mag_max_skip_steps": 5,
    "mag_retention_ratio": 0.1,
    "num_inference_steps": 28,
    "mag_ratios": None,
    "calibrate": False,
    "mag_calibrate": False,
}
CACHE_DIT_FIELDS = {
    "Fn_compute_blocks": 1,
    "Bn_compute_blocks": 0,
    "max_warmup_steps": 4,
    "max_cached_steps": -1,
    "max_continuous_cached_steps": 3,
    "residual_diff_threshold": 0.24,
    "enable_taylorseer": False,
    "taylorseer_order": 1,
    "scm_steps_mask_policy": None,
    "scm_steps_policy": "dynamic",
    "force_refresh_step_hint": None,
    "force_refresh_step_policy": "once",
}


@pytest.mark.parametrize(("name", "default"), CACHE_DIT_FIELDS.items())
def test_settings_of_cache_dit_and_their_defaults(name: str, default: Any) -> None:
    assert getattr(DiffusionCacheConfig(), name) == getattr(CacheDiTConfig(), name) == default


@pytest.mark.parametrize(("name", "default"), FIELDS.items())
def test_settings_and_their_defaults(name: str, default: Any) -> None:
    owners = [c for c in (DiffusionCacheConfig, TeaCacheConfig, MagCacheConfig) if name in c.field_names()]
    assert DiffusionCacheConfig in owners
    assert len(owners) == 2
    assert all(getattr(owner(), name) == default for owner in owners)


BASES = [
    (CacheBackend, ABC),
    (TeaCacheBackend, CacheBackend),
    (MagCacheBackend, CacheBackend),
    (CacheDiTBackend, CacheBackend),
    (BagelCachedAdapter, CachedAdapter),
    (BagelCachedBlocks, CachedBlocks_Pattern_0_1_2),
    (BagelCachedContextManager, CachedContextManager),
    (SensenovaCachedAdapter, CachedAdapter),
    (SensenovaCachedBlocks, CachedBlocks_Pattern_3_4_5),
    (Wan22S2VCachedAdapter, CachedAdapter),
    (Wan22S2VCachedBlocks, CachedBlocks_Pattern_3_4_5),
    (TeaCacheHook, ModelHook),
    (MagCacheHeadHook, ModelHook),
    (MagCacheBlockHook, ModelHook),
    (FluxMagCacheStrategy, MagCacheStrategy),
]


@pytest.mark.parametrize(("cls", "base"), BASES, ids=[cls.__name__ for cls, _ in BASES])
def test_base_class(cls: type, base: type) -> None:
    assert issubclass(cls, base)


@pytest.mark.parametrize(
    "cls", [CacheContext, TeaCacheConfig, MagCacheConfig, DiffusionCacheConfig, CacheDiTAdapterConfig]
)
def test_is_a_dataclass(cls: type) -> None:
    assert dataclasses.is_dataclass(cls)


EVERYTHING = DiffusionCacheConfig()
ATTRIBUTES = [
    (lambda: TeaCacheBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: MagCacheBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: CacheDiTBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: PromptEmbedCache(max_size=7, enabled=False), {"max_size": 7, "enabled": False}),
    (PromptEmbedCache, {"max_size": 32, "enabled": True, "hits": 0, "misses": 0, "bypassed": 0}),
    (
        lambda: TransformerBlockMetadata(1, 0),
        {"return_hidden_states_index": 1, "return_encoder_hidden_states_index": 0},
    ),
    (
        lambda: TransformerBlockMetadata(return_hidden_states_index=0),
        {"return_hidden_states_index": 0, "return_encoder_hidden_states_index": None},
    ),
    (MagCacheState, {"accumulated_err": 0.0}),
]


@pytest.mark.parametrize(("make", "attributes"), ATTRIBUTES)
def test_attributes_after_construction(make: Any, attributes: dict[str, Any]) -> None:
    made = make()
    assert {name: getattr(made, name) for name in attributes} == attributes


@pytest.fixture
def flux() -> diffusers.FluxPipeline:
    return PIPELINES["FluxPipeline"].build()


def generate(pipe: Any, steps: int, name: str = "FluxPipeline", seed: int = 0) -> torch.Tensor:
    return run(pipe, **PIPELINES[name].call(steps=steps, seed=seed))


# MagCache, as its proposal describes it


# fmt: on
