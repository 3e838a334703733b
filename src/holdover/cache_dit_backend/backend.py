"""The cache-dit backend, the documented functions that enable it on a pipeline, and its summary."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeAlias

from cache_dit.caching import BlockAdapter, CachedAdapter, ForwardPattern
from rich.console import Console
from rich.table import Table

from ..base import CacheBackend
from ..engine.backend import EngineBackend, find_cache, find_transformers
from ..errors import EnableError, NotEnabledError
from ..models.inputs import unwrap_module
from .adapters import Adapter, CacheDiTAdapterConfig, TransformerAdapter, declared_adapter, declared_config
from .config import CacheDiTConfig, quiet_library
from .method import CacheDiTMethod
from .model_adapters import Wan22S2VCachedAdapter

logger = logging.getLogger(__name__)

RefreshCacheContextFunc: TypeAlias = Callable[[Any, int, bool], None]


def default_get_pipeline_transformer(pipeline: Any) -> Any:
    """The transformer of a pipeline; a transformer is returned as it is."""
    return getattr(pipeline, "transformer", pipeline)


class CacheDiTBackend(EngineBackend[CacheDiTConfig]):
    """cache-dit: hold while the residual of the first blocks has changed little (DBCache), with TaylorSeer and SCM."""

    config_class = CacheDiTConfig

    def __init__(
        self, config: Any = None, block_adapter: Adapter | None = None, adapter_cls: type[CachedAdapter] | None = None
    ) -> None:
        super().__init__(config)
        self._adapter = TransformerAdapter(block_adapter, adapter_cls)

    @staticmethod
    def maybe_build_block_adapter(pipeline: Any) -> BlockAdapter | None:
        """The block adapter that the transformer's class declares as `_cache_dit_adapter_config`, if any."""
        with quiet_library():
            return declared_adapter(default_get_pipeline_transformer(pipeline))

    @staticmethod
    def maybe_get_cached_adapter_cls(pipeline: Any) -> type[CachedAdapter] | None:
        """The adapter class that the transformer's class declares, if any."""
        declared = declared_config(default_get_pipeline_transformer(pipeline))
        return None if declared is None else declared.cached_adapter_cls

    def enable(self, pipeline: Any) -> None:
        names = [type(each).__name__ for each in (pipeline, *find_transformers(pipeline).values())]
        enabler = next((CUSTOM_DIT_ENABLERS[name] for name in names if name in CUSTOM_DIT_ENABLERS), None)
        if enabler is None or self._engine is not None:
            self.enable_directly(pipeline)
            return
        enabler(pipeline, self.config)
        found = find_cache(pipeline)  # the enabler has made a cache of its own; this one takes its place
        if not isinstance(found, CacheDiTBackend) or found._engine is None:
            raise EnableError(
                f"The enabler {enabler.__name__} has put no holdover cache on this {type(pipeline).__name__}: end it "
                "with `return enable_cache_for_dit(pipeline, cache_config, block_adapter)`."
            )
        self._engine, self._adapter, self.enabled = found._engine, found._adapter, True
        self._engine.owner = self
        found._engine, found.enabled = None, False

    def enable_directly(self, pipeline: Any) -> None:
        """Enable without looking for a custom enabler; every enabler ends here."""
        if self._engine is None:
            self._adapter.adapted.clear()  # the transformer may have changed since
        super().enable(pipeline)
        logger.info("cache-dit is enabled on %s: %s", type(pipeline).__name__, "; ".join(self._require_engine().notes))

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        if len(self._require_engine().transformers) == 1:
            self.settings.check_steps(num_inference_steps)
        super().refresh(pipeline, num_inference_steps, verbose)

    def disable(self) -> None:
        super().disable()
        self._adapter.adapted.clear()  # it holds the blocks

    def make_method(self, settings: CacheDiTConfig) -> CacheDiTMethod:
        return CacheDiTMethod(settings, self._adapter)


# The documented functions: each enables the backend on a pipeline and returns a function that refreshes it.


def build_cache_context_refresh(
    cache_config: Any, get_pipeline_transformer: Callable[[Any], Any] = default_get_pipeline_transformer
) -> RefreshCacheContextFunc:
    """A function `(pipeline, num_inference_steps, verbose=True)` that starts a generation of that many steps."""
    settings = CacheDiTBackend(cache_config).settings

    def refresh(pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        transformer = get_pipeline_transformer(pipeline)
        cache = _cache_on(transformer)
        if len(find_transformers(pipeline)) == 1:
            settings.check_steps(num_inference_steps)
        cache.refresh(transformer, num_inference_steps, verbose)

    return refresh


def enable_cache_for_dit(
    pipeline: Any,
    cache_config: Any,
    block_adapter: Adapter | None = None,
    adapter_cls: type[CachedAdapter] | None = None,
) -> RefreshCacheContextFunc:
    """Enable cache-dit with this adapter or declaration, else what the transformer declares, else the library's own."""
    CacheDiTBackend(cache_config, block_adapter, adapter_cls).enable_directly(pipeline)
    return build_cache_context_refresh(cache_config)


def enable_cache_for_wan22(pipeline: Any, cache_config: Any) -> RefreshCacheContextFunc:
    """Enable cache-dit on Wan2.2, on one expert or both; each is cached over the steps it runs."""
    return enable_cache_for_dit(pipeline, cache_config, _declare(pipeline, "blocks", ForwardPattern.Pattern_2))


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


def _declare(pipeline: Any, blocks: str, pattern: ForwardPattern) -> CacheDiTAdapterConfig | None:
    """A declaration for one list of blocks; None for transformers of diffusers, which the library knows."""
    modules = map(unwrap_module, find_transformers(pipeline).values())
    if all(type(module).__module__.startswith("diffusers.") for module in modules):
        return None
    return CacheDiTAdapterConfig({blocks: pattern}, check_forward_pattern=False)


def may_enable_cache_dit(pipeline: Any, od_config: Any) -> CacheDiTBackend | None:
    """Enable cache-dit if the serving engine's config selects it with settings; otherwise return None."""
    if od_config.cache_backend not in ("cache_dit", "cache-dit") or not od_config.cache_config:
        return None
    backend = CacheDiTBackend(od_config.cache_config)
    backend.enable(pipeline)
    return backend


# Functions that enable cache-dit, by the class name of the pipeline or the transformer; register your own here.
CUSTOM_DIT_ENABLERS: dict[str, Callable[..., Any]] = {
    "Wan22Pipeline": enable_cache_for_wan22,
    "Wan22I2VPipeline": enable_cache_for_wan22,
    "Wan22TI2VPipeline": enable_cache_for_wan22,
    "Wan22VACEPipeline": enable_cache_for_wan22,
    "Wan22S2VPipeline": enable_cache_for_wan22_s2v,
    "Cosmos3OmniDiffusersPipeline": enable_cache_for_cosmos3,
}


def cache_summary(pipeline: Any, details: bool = True) -> None:
    """Print a table of computed and held steps; with `details`, also the trace of steps and the reasons."""
    stats = _cache_on(pipeline).stats()
    columns = ("branch", "computed", "held", *(("steps", "why") if details else ()))
    table = Table(*columns, title=f"{stats.method}: {stats.computed} computed, {stats.held} held", title_justify="left")
    if (last := stats.last) is not None:
        for branch in last.branches:
            row = [branch, str(last.computed[branch]), str(last.held[branch])]
            if details:
                reasons = Counter(forward.reason for forward in last.of_branch(branch))
                row += [last.trace(branch), "; ".join(f"{count} x {reason}" for reason, count in reasons.items())]
            table.add_row(*row)
    console = Console()
    console.print(table)
    for note in stats.notes if details else ():
        console.print(note, highlight=False, soft_wrap=True)


def _cache_on(target: Any) -> CacheBackend:
    """The cache on a pipeline or transformer; an error if there is none."""
    if (cache := find_cache(target)) is None:
        raise NotEnabledError(f"There is no holdover cache on this {type(target).__name__}.")
    return cache
