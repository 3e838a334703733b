"""Every documented class, function, attribute and signature, where it is documented, and doing what is said of it.

The documents are those of vLLM-Omni's `diffusion.cache`: code written against them runs by changing the package name.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import logging
from abc import ABC
from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from cache_dit.caching import CachedAdapter, CachedContextManager
from cache_dit.caching.cache_blocks import CachedBlocks_Pattern_0_1_2, CachedBlocks_Pattern_3_4_5
from diffusers.hooks import HookRegistry, ModelHook
from torch import nn

import holdover
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
from holdover.engine.backend import BranchStateManager, find_cache
from holdover.magcache import MagCacheBackend, MagCacheConfig, MagCacheState
from holdover.magcache.hook import MagCacheBlockHook, MagCacheHeadHook, apply_mag_cache_hook
from holdover.magcache.strategy import (
    FluxMagCacheStrategy,
    MagCacheStrategy,
    TransformerBlockMetadata,
)
from holdover.profiles import shipped
from holdover.prompt_embed_cache import PromptEmbedCache
from holdover.teacache import TeaCacheBackend, TeaCacheConfig, TeaCacheState, register_extractor, unregister_extractor
from holdover.teacache.hook import TeaCacheHook, apply_teacache_hook
from tiny.models import MODELS, with_timestep
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


STATES = BranchStateManager(MagCacheState)
TEA, MAG, EVERYTHING = TeaCacheConfig(coefficients=[1.0, 0.0]), MagCacheConfig(), DiffusionCacheConfig()
ATTRIBUTES = [
    (lambda: TeaCacheBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: MagCacheBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: CacheDiTBackend(EVERYTHING), {"config": EVERYTHING, "enabled": False}),
    (lambda: TeaCacheHook(TEA), {"config": TEA, "extractor_fn": None}),
    (lambda: MagCacheHeadHook(state_manager=STATES, config=MAG), {"config": MAG, "state_manager": STATES}),
    (
        lambda: MagCacheBlockHook(state_manager=STATES, config=MAG, is_tail=True),
        {"config": MAG, "state_manager": STATES, "is_tail": True},
    ),
    (lambda: MagCacheBlockHook(state_manager=STATES, config=MAG), {"is_tail": False}),
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


def test_teacache_hook_rescales_and_has_states() -> None:
    hook = TeaCacheHook(TeaCacheConfig(coefficients=[2.0, 0.0, 0.25]))
    assert hook.rescale_func(0.5) == pytest.approx(0.75)
    assert isinstance(hook.state_manager.get_state(), TeaCacheState)


# The interface of all backends


def test_a_backend_needs_enable_and_refresh() -> None:
    assert {"enable", "refresh"} <= CacheBackend.__abstractmethods__
    with pytest.raises(TypeError, match="abstract"):
        CacheBackend(DiffusionCacheConfig())


def test_a_backend_needs_no_more_than_enable_and_refresh() -> None:
    class MyBackend(CacheBackend):
        def enable(self, pipeline: Any) -> None:
            self.enabled = True

        def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None: ...

    config = DiffusionCacheConfig()
    backend = MyBackend(config)
    assert backend.config is config
    assert backend.is_enabled() is False
    backend.enable(None)
    assert backend.is_enabled() is True


@pytest.fixture
def flux() -> diffusers.FluxPipeline:
    return PIPELINES["FluxPipeline"].build()


def generate(pipe: Any, steps: int, name: str = "FluxPipeline", seed: int = 0) -> torch.Tensor:
    return run(pipe, **PIPELINES[name].call(steps=steps, seed=seed))


def test_the_example_of_teacache_backend(flux: Any) -> None:
    backend = TeaCacheBackend(DiffusionCacheConfig(rel_l1_thresh=0.4))
    backend.enable(flux)
    assert backend.is_enabled() is backend.enabled is True
    assert backend.config.rel_l1_thresh == 0.4
    backend.refresh(flux, num_inference_steps=20)
    generate(flux, 20)
    generation = backend.stats().last
    assert generation.steps == 20
    assert generation.held["cond"] > 0
    assert generation.trace("cond")[0] == generation.trace("cond")[-1] == "C"
    backend.disable()
    assert backend.is_enabled() is backend.enabled is False


@pytest.mark.parametrize("verbose", [True, False])
def test_refresh_logs_when_it_is_to(flux: Any, verbose: bool, caplog: pytest.LogCaptureFixture) -> None:
    backend = MagCacheBackend(DiffusionCacheConfig())
    backend.enable(flux)
    with caplog.at_level(logging.INFO, "holdover"):
        backend.refresh(flux, 9, verbose=verbose)
    assert [record for record in caplog.messages if "9 steps" in record] == caplog.messages[: int(verbose)]


def test_refresh_forgets_the_generation_before() -> None:
    """After a loop that was left half-way, the next one begins at its first step."""
    model, net = MODELS[FLUX], MODELS[FLUX].build()
    backend = TeaCacheBackend(TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0))
    backend.enable(net)
    inputs = model.inputs()
    with torch.no_grad():
        for t in (1.0, 0.8, 0.6):
            net(**with_timestep(model, inputs, t))
        backend.refresh(net, num_inference_steps=2)
        for t in (0.4, 0.2):
            net(**with_timestep(model, inputs, t))
    assert [g.trace("1") for g in backend.stats().generations] == ["Chh", "CC"]


# Hooks


def loop(module: nn.Module, steps: int, call: Any = None) -> list[torch.Tensor]:
    """A denoising loop written by hand around a tiny FLUX transformer."""
    model, inputs = MODELS[FLUX], MODELS[FLUX].inputs()
    with torch.no_grad():
        return [
            (call or module)(**with_timestep(model, inputs, 1 - i / steps), return_dict=False)[0] for i in range(steps)
        ]


def test_apply_mag_cache_hook() -> None:
    net = MODELS[FLUX].build()
    assert apply_mag_cache_hook(net, MagCacheConfig(num_inference_steps=28)) is None
    loop(net, 28)
    generation = find_cache(net).stats().last
    assert generation.trace("1").startswith("CCCh")
    assert generation.held["1"] > 10
    holdover.disable(net)
    assert find_cache(net) is None


def test_apply_teacache_hook() -> None:
    tiny = PIPELINES["QwenImagePipeline"]
    pipe = tiny.build()
    config = TeaCacheConfig(rel_l1_thresh=0.2, transformer_type="QwenImageTransformer2DModel")
    assert apply_teacache_hook(pipe.transformer, config) is None
    plain = PIPELINES["QwenImagePipeline"].build()
    assert not torch.equal(generate(pipe, 20, tiny.name), generate(plain, 20, tiny.name))
    generation = find_cache(pipe.transformer).stats().last
    assert set(generation.branches) == {"cond", "uncond"}
    assert min(generation.held.values()) > 0
    holdover.disable(pipe.transformer)
    assert torch.equal(generate(pipe, 20, tiny.name), generate(plain, 20, tiny.name))


def test_coefficients_come_from_the_transformer_type() -> None:
    """For a class without constants of its own, those of the named class are used."""
    pipe = PIPELINES["SanaPipeline"].build()
    apply_teacache_hook(pipe.transformer, TeaCacheConfig(rel_l1_thresh=0.4, transformer_type=FLUX))
    holdover.disable(pipe.transformer)


def test_the_transformer_type_is_detected_by_the_backend(flux: Any) -> None:
    backend = TeaCacheBackend(DiffusionCacheConfig())
    backend.enable(flux)
    assert backend.settings.transformer_type == FLUX


def test_the_hooks_rescaling_is_the_one_in_use() -> None:
    net = MODELS[FLUX].build()
    hook = TeaCacheHook(TeaCacheConfig(rel_l1_thresh=0.4))
    hook.initialize_hook(net)
    profile = next(p for p in shipped("tea_cache") if p.name == "tc.flux1-dev")
    *_, constant = profile.fit("").coefficients
    assert hook.rescale_func(0.0) == pytest.approx(constant)


def test_teacache_hook_called_by_hand() -> None:
    net, plain = MODELS[FLUX].build(), MODELS[FLUX].build()
    hook = TeaCacheHook(TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0))
    assert hook.initialize_hook(net) is net
    assert hook.extractor_fn is None
    outputs = loop(net, 4, lambda **inputs: hook.new_forward(net, **inputs))
    expected = loop(plain, 4)
    assert torch.equal(outputs[0], expected[0])
    assert not torch.equal(outputs[1], expected[1])
    state = hook.state_manager.get_state()
    assert state.anchor == 0
    assert state.accumulated_rel_l1_distance > 0
    assert hook.reset_state(net) is net
    assert hook.state_manager.get_state().accumulated_rel_l1_distance == 0
    loop(net, 4, lambda **inputs: hook.new_forward(net, **inputs))
    assert [g.trace("1") for g in find_cache(net).stats().generations] == ["Chhh", "Chhh"]
    holdover.disable(net)


def test_teacache_hook_in_diffusers_registry() -> None:
    net = MODELS[FLUX].build()
    hook = TeaCacheHook(TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0))
    HookRegistry.check_if_exists_or_initialize(net).register_hook(hook, "teacache")
    loop(net, 4)
    assert find_cache(net).stats().held == 3


def block_hooks() -> tuple[MagCacheHeadHook, MagCacheBlockHook]:
    states = BranchStateManager(MagCacheState)
    return MagCacheHeadHook(states, MAG), MagCacheBlockHook(states, MAG, is_tail=True)


@pytest.mark.parametrize("index", [0, 1], ids=["head", "block"])
def test_magcache_hooks_called_by_hand(index: int) -> None:
    """Outside a cached forward a block's role is to run the block."""
    hook, block = block_hooks()[index], nn.Linear(3, 3)
    inputs = torch.randn(2, 3)
    assert hook.initialize_hook(block) is block
    assert torch.equal(hook.new_forward(block, inputs), block(inputs))
    assert torch.equal(hook.new_forward(block, input=inputs), block(inputs))
    assert hook.reset_state(block) is block
    assert hook.state_manager.get_state() == MagCacheState()


@pytest.mark.parametrize("index", [0, 1], ids=["head", "block"])
def test_magcache_hooks_in_diffusers_registry(index: int) -> None:
    hook, block = block_hooks()[index], nn.Linear(3, 3)
    inputs = torch.randn(2, 3)
    expected = block(inputs)
    HookRegistry.check_if_exists_or_initialize(block).register_hook(hook, "mag_cache")
    assert torch.equal(block(inputs), expected)


def test_what_magcache_hooks_log(caplog: pytest.LogCaptureFixture) -> None:
    head, tail = block_hooks()
    state = MagCacheState(anchor=4, accumulated_err=0.125, accumulated_steps=2)
    residual = torch.ones(1, 2, 3)
    with caplog.at_level(logging.DEBUG, "holdover.magcache.hook"):
        head.log_cache_hit(state, residual, residual)
        head.log_cache_miss(state, residual)
        tail.log_residual_computed(state, residual)
        tail.log_residual_computed(state, (residual, torch.ones(1, 5, 3)))
    hit, miss, one, two = caplog.messages
    assert "0.125" in hit
    assert "4" in miss
    assert "(1, 2, 3)" in one
    assert "(1, 2, 3), (1, 5, 3)" in two
    assert {record.name for record in caplog.records} == {"holdover.magcache.hook"}


def test_magcache_tail_advances() -> None:
    """The step is known, not counted: all there is to note is that the branch was there."""
    _, tail = block_hooks()
    state = MagCacheState(anchor=4)
    tail.advance_step(state)
    assert state.seen == 4


@pytest.mark.parametrize("dual", [False, True])
def test_magcache_tail_calibrates(dual: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(2, 5, 8, generator=generator) for _ in range(2))
    _, tail = block_hooks()
    state = MagCacheState()
    for residual in (first, second):
        tail.perform_calibration(state, (residual[:, :2], residual[:, 2:]) if dual else residual)
    ratios = second.norm(dim=-1) / first.norm(dim=-1)
    cosines = (first * second).sum(-1) / (first.norm(dim=-1) * second.norm(dim=-1))
    assert state.norm_ratios == pytest.approx([1.0, float(ratios.mean())], rel=1e-5)
    assert state.norm_stds == pytest.approx([0.0, float(ratios.std())], rel=1e-5)
    assert state.cos_dises == pytest.approx([0.0, float(1 - cosines.mean())], rel=1e-5)


# A custom model, by the extractor the documents ask for


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.image, self.text = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor, encoder: torch.Tensor, temb: torch.Tensor) -> Any:
        hidden = hidden + self.image(self.norm(hidden) + temb) + encoder.mean(1, keepdim=True)
        return encoder + self.text(encoder), hidden


class CustomTransformer(nn.Module):
    """A dual-stream model like the one in the documents."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.time = nn.Linear(1, width)
        self.transformer_blocks = nn.ModuleList(_Block(width) for _ in range(3))
        self.proj_out = nn.Linear(width, width)
        self.runs = 0

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: torch.Tensor, timestep: torch.Tensor) -> Any:
        temb = self.time(timestep[:, None])[:, None]
        self.runs += 1
        for block in self.transformer_blocks:
            encoder_hidden_states, hidden_states = block(hidden_states, encoder_hidden_states, temb)
        return self.proj_out(hidden_states)


def extract(module: CustomTransformer, hidden_states: Any, encoder_hidden_states: Any, timestep: Any) -> CacheContext:
    temb = module.time(timestep[:, None])[:, None]

    def run_blocks() -> tuple[torch.Tensor, ...]:
        h, e = hidden_states, encoder_hidden_states
        module.runs += 1
        for block in module.transformer_blocks:
            e, h = block(h, e, temb=temb)
        return (h, e)

    return CacheContext(
        modulated_input=module.transformer_blocks[0].norm(hidden_states) + temb,
        hidden_states=hidden_states,
        encoder_hidden_states=encoder_hidden_states,
        temb=temb,
        run_transformer_blocks=run_blocks,
        postprocess=lambda h: module.proj_out(h),
    )


@pytest.fixture
def custom() -> Iterator[CustomTransformer]:
    yield CustomTransformer().eval()
    unregister_extractor("CustomTransformer")


def custom_loop(module: Any, steps: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    image, text = (torch.randn(1, tokens, 8, generator=generator) for tokens in (6, 4))
    with torch.no_grad():
        return [module(image, text, torch.full((1,), 1.0 - i / steps)) for i in range(steps)]


def test_an_extractor_of_ones_own(custom: CustomTransformer) -> None:
    plain = custom_loop(CustomTransformer().eval())
    register_extractor("CustomTransformer", extract)
    hook = TeaCacheHook(TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=0.0))
    hook.initialize_hook(custom)
    assert hook.extractor_fn is extract
    assert all(torch.equal(a, b) for a, b in zip(custom_loop(custom), plain, strict=True))
    holdover.disable(custom)
    apply_teacache_hook(custom, TeaCacheConfig(coefficients=[1.0, 0.0], rel_l1_thresh=100.0))
    custom.runs = 0
    outputs = custom_loop(custom)
    assert find_cache(custom).stats().last.trace("1") == "Chhhh"
    assert custom.runs == 1
    assert torch.equal(outputs[0], plain[0])
    assert not torch.equal(outputs[-1], plain[-1])


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"temb": None}, TypeError),
        ({"modulated_input": torch.ones(0)}, ValueError),
        ({"postprocess": lambda: None}, RuntimeError),
        ({"run_transformer_blocks": lambda: torch.ones(1)}, TypeError),
        ({"run_transformer_blocks": lambda: (torch.ones(1, 2, 3),)}, ValueError),
    ],
)
def test_a_wrong_context_is_an_error_at_the_first_forward(
    custom: CustomTransformer, changed: dict[str, Any], error: type[Exception]
) -> None:
    register_extractor(
        "CustomTransformer", lambda module, *inputs: dataclasses.replace(extract(module, *inputs), **changed)
    )
    apply_teacache_hook(custom, TEA)
    with pytest.raises(error, match="CacheContext"):
        custom_loop(custom)
