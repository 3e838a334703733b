"""Enablers of models that need more than a declaration: Wan2.2, Cosmos3, Krea 2, MAGI-2 and MammothModa2.

Each enables the backend on a pipeline and returns a function that refreshes it. They are registered by the class names
of vLLM-Omni's pipelines.
"""

from __future__ import annotations

from typing import Any

from cache_dit.caching import ForwardPattern
from torch import nn

from ..models.inputs import unwrap_module
from ..models.pipelines import find_transformers
from .adapters import CacheDiTAdapterConfig, declared_config
from .backend import (
    CUSTOM_DIT_ENABLERS,
    CacheDiTBackend,
    CacheDiTEnableResult,
    RefreshCacheContextFunc,
    default_get_pipeline_transformer,
    enable_cache_for_dit,
)
from .model_adapters import Wan22S2VCachedAdapter

# The expert for low noise runs most of the steps, of which the first are less different from each other.
_SECOND_EXPERT = {"max_warmup_steps": 2, "max_cached_steps": 20}


def enable_cache_for_wan22(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Enable cache-dit on Wan2.2, on one expert or both; each is cached over the steps it runs.

    The second expert warms up for 2 steps and holds at most 20, unless the config has `secondary` settings.
    """
    settings = CacheDiTBackend(cache_config).settings
    if settings.secondary is None and getattr(pipeline, "transformer_2", None) is not None:
        settings = settings.replaced(secondary=_SECOND_EXPERT)
    return enable_cache_for_dit(pipeline, settings, _declare(pipeline, "blocks", ForwardPattern.Pattern_2))


def enable_cache_for_wan22_s2v(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Enable cache-dit on Wan2.2 S2V; audio is injected between the blocks as before, also after disable()."""
    declared = _declare(pipeline, "blocks", ForwardPattern.Pattern_3)
    return enable_cache_for_dit(pipeline, cache_config, declared, Wan22S2VCachedAdapter)


def enable_cache_for_cosmos3(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Enable cache-dit on Cosmos3, on its generating pathway: `gen_layers` if the transformer has that list."""
    transformer, declared = default_get_pipeline_transformer(pipeline), None
    if declared_config(transformer) is None and hasattr(transformer, "gen_layers"):
        declared = _declare(pipeline, "gen_layers", ForwardPattern.Pattern_3)
    return enable_cache_for_dit(pipeline, cache_config, declared)


def enable_cache_for_krea2(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Enable cache-dit on Krea 2, with guidance (Raw) and without (Turbo)."""
    return enable_cache_for_dit(
        pipeline, cache_config, _declare(pipeline, "transformer_blocks", ForwardPattern.Pattern_3)
    )


def enable_cache_for_magi2(pipeline: Any, cache_config: Any) -> CacheDiTEnableResult:
    """Enable cache-dit on the layers of MAGI-2; the adapters before and after them run at every step."""

    def get_stack(pipeline: Any) -> nn.Module:
        stack: nn.Module = pipeline.transformer.block
        return stack

    declared = CacheDiTAdapterConfig({"layers": ForwardPattern.Pattern_3})
    refresh = enable_cache_for_dit(pipeline, cache_config, declared, get_pipeline_transformer=get_stack)
    return CacheDiTEnableResult(refresh, (get_stack(pipeline),))


def enable_cache_for_mammothmoda2(pipeline: Any, cache_config: Any) -> CacheDiTEnableResult:
    """Enable cache-dit on the main layers of MammothModa2; its refiners run at every step."""

    def get_transformer(pipeline: Any) -> nn.Module:
        transformer: nn.Module = pipeline.gen_transformer
        return transformer

    declared = CacheDiTAdapterConfig({"layers": ForwardPattern.Pattern_3})
    refresh = enable_cache_for_dit(pipeline, cache_config, declared, get_pipeline_transformer=get_transformer)
    return CacheDiTEnableResult(refresh, (get_transformer(pipeline),))


def _declare(pipeline: Any, blocks: str, pattern: ForwardPattern) -> CacheDiTAdapterConfig | None:
    """A declaration for one list of blocks; None for transformers of diffusers, which the library knows."""
    modules = map(unwrap_module, find_transformers(pipeline).values())
    if all(type(module).__module__.startswith("diffusers.") for module in modules):
        return None
    return CacheDiTAdapterConfig({blocks: pattern}, check_forward_pattern=False)


CUSTOM_DIT_ENABLERS.update(
    {
        "Wan22Pipeline": enable_cache_for_wan22,
        "Wan22I2VPipeline": enable_cache_for_wan22,
        "Wan22TI2VPipeline": enable_cache_for_wan22,
        "Wan22VACEPipeline": enable_cache_for_wan22,
        "Wan22S2VPipeline": enable_cache_for_wan22_s2v,
        "Cosmos3OmniDiffusersPipeline": enable_cache_for_cosmos3,
        "Cosmos3OmniPipeline": enable_cache_for_cosmos3,
        "Krea2Pipeline": enable_cache_for_krea2,
        "Magi2Pipeline": enable_cache_for_magi2,
        "MammothModa2DiTPipeline": enable_cache_for_mammothmoda2,
    }
)
