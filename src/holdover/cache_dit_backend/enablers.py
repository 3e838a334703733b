"""The documented functions: each puts the one cache on a pipeline and returns what refreshes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from cache_dit.caching import BlockAdapter, CachedAdapter, FakeDiffusionPipeline, ForwardPattern
from torch import nn

from ..errors import NotEnabledError, UnsupportedModelError
from ..models.inputs import unwrap_module
from ..runtime.backend import cache_of, transformers_of
from .backend import CUSTOM_DIT_ENABLERS, CacheDiTBackend, default_get_pipeline_transformer
from .library import quiet
from .wan_s2v import Wan22S2VCachedAdapter

RefreshCacheContextFunc: TypeAlias = Callable[[Any, int, bool], None]


def build_cache_context_refresh(
    cache_config: Any, get_pipeline_transformer: Callable[[Any], Any] = default_get_pipeline_transformer
) -> RefreshCacheContextFunc:
    """A function `(pipeline, num_inference_steps, verbose=True)` that begins a generation of that many steps."""
    checking = CacheDiTBackend(cache_config)

    def refresh(pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        transformer = get_pipeline_transformer(pipeline)
        cache = cache_of(transformer)
        if cache is None:
            raise NotEnabledError(f"There is no holdover cache on this {type(transformer).__name__}.")
        if len(transformers_of(pipeline)) == 1:
            checking.method(checking.settings).check_steps(num_inference_steps)
        cache.refresh(transformer, num_inference_steps, verbose)

    return refresh


def enable_cache_for_dit(
    pipeline: Any,
    cache_config: Any,
    block_adapter: BlockAdapter | None = None,
    adapter_cls: type[CachedAdapter] | None = None,
) -> RefreshCacheContextFunc:
    """Put cache-dit on a pipeline: with this adapter, the one its transformer declares, or the library's own."""
    CacheDiTBackend(cache_config, block_adapter, adapter_cls).enable_directly(pipeline)
    return build_cache_context_refresh(cache_config)


def enable_cache_for_wan22(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Put cache-dit on Wan2.2, on one transformer or on both; each is cached over the steps it handles."""
    experts = [name for name in ("transformer", "transformer_2") if getattr(pipeline, name, None) is not None]
    return enable_cache_for_dit(pipeline, cache_config, _adapter(pipeline, experts, "blocks", ForwardPattern.Pattern_2))


def enable_cache_for_wan22_s2v(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Put cache-dit on Wan2.2 S2V: the audio is injected between the blocks as before, and still is after disable."""
    adapter = _adapter(pipeline, ["transformer"], "blocks", ForwardPattern.Pattern_3)
    return enable_cache_for_dit(pipeline, cache_config, adapter, Wan22S2VCachedAdapter)


def enable_cache_for_cosmos3(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Put cache-dit on Cosmos3, on the pathway that generates: `gen_layers` where the transformer has that list.

    The transformer of diffusers runs both pathways in one list; there the library's own adapter holds both.
    """
    if not hasattr(default_get_pipeline_transformer(pipeline), "gen_layers"):
        return enable_cache_for_dit(pipeline, cache_config)
    adapter = CacheDiTBackend.maybe_build_block_adapter(pipeline) or _adapter(
        pipeline, ["transformer"], "gen_layers", ForwardPattern.Pattern_3
    )
    return enable_cache_for_dit(pipeline, cache_config, adapter)


def _adapter(pipeline: Any, transformers: list[str], blocks: str, pattern: ForwardPattern) -> BlockAdapter | None:
    """An adapter for one list of some transformers; None where they are of diffusers: the library knows those."""
    modules = [unwrap_module(each) for each in (getattr(pipeline, name, pipeline) for name in transformers)]
    if all(type(module).__module__.startswith("diffusers.") for module in modules):
        return None
    for module in modules:
        if not isinstance(getattr(module, blocks, None), nn.ModuleList):
            raise UnsupportedModelError(f"{type(module).__name__} has no list `{blocks}` of blocks to cache.")
    with quiet():
        return BlockAdapter(
            pipe=FakeDiffusionPipeline(modules[0]),
            transformer=modules,
            blocks=[getattr(module, blocks) for module in modules],
            blocks_name=[blocks] * len(modules),
            forward_pattern=[pattern] * len(modules),
            check_forward_pattern=False,
        )


def may_enable_cache_dit(pipeline: Any, od_config: Any) -> CacheDiTBackend | None:
    """Put cache-dit on a pipeline if the engine's config asks for it; otherwise None."""
    if od_config.cache_backend not in ("cache_dit", "cache-dit") or not od_config.cache_config:
        return None
    backend = CacheDiTBackend(od_config.cache_config)
    backend.enable(pipeline)
    return backend


CUSTOM_DIT_ENABLERS.update(
    {
        **dict.fromkeys(
            ("Wan22Pipeline", "Wan22I2VPipeline", "Wan22TI2VPipeline", "Wan22VACEPipeline"), enable_cache_for_wan22
        ),
        "Wan22S2VPipeline": enable_cache_for_wan22_s2v,
        "Cosmos3OmniDiffusersPipeline": enable_cache_for_cosmos3,
    }
)
