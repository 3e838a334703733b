"""The cache-dit backend, the functions that enable it on a pipeline and refresh it, and its summary."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from cache_dit.caching import BlockAdapter, CachedAdapter
from rich.console import Console
from rich.table import Table
from torch import nn

from ..base import CacheBackend, DiffusionCacheConfig
from ..engine.backend import EngineBackend, find_cache
from ..engine.install import Overrides
from ..errors import EnableError, NotEnabledError
from ..models.pipelines import find_transformers
from .adapters import Adapter, TransformerAdapter, declared_adapter, declared_config
from .config import CacheDiTConfig, quiet_library
from .method import CacheDiTMethod, ResidualDiffs
from .patches import PipelineState

logger = logging.getLogger(__name__)

RefreshCacheContextFunc: TypeAlias = Callable[[Any, int, bool], None]


@dataclass(frozen=True)
class CacheDiTEnableResult:
    """What an enabler may return instead of a refresh function: the function, and what it has made cache-dit cache."""

    refresh: RefreshCacheContextFunc
    targets: tuple[Any, ...]


CacheDiTEnabler: TypeAlias = Callable[[Any, Any], RefreshCacheContextFunc | CacheDiTEnableResult]

# Functions that enable cache-dit, by the class name of the pipeline or the transformer; register your own here.
CUSTOM_DIT_ENABLERS: dict[str, Callable[..., Any]] = {}


def default_get_pipeline_transformer(pipeline: Any) -> Any:
    """The transformer of a pipeline; a transformer is returned as it is."""
    return getattr(pipeline, "transformer", pipeline)


class CacheDiTBackend(EngineBackend[CacheDiTConfig]):
    """cache-dit: hold while the residual of the first blocks has changed little (DBCache), with TaylorSeer and SCM."""

    config_class = CacheDiTConfig

    def __init__(
        self,
        config: Any = None,
        block_adapter: Adapter | None = None,
        adapter_cls: type[CachedAdapter] | None = None,
        context_kwargs: dict[str, Any] | None = None,
        get_pipeline_transformer: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(config)
        self._adapter = TransformerAdapter(block_adapter, adapter_cls, context_kwargs)
        self._get_transformer = get_pipeline_transformer
        self._refresh_func: RefreshCacheContextFunc | None = None
        self._last_num_inference_steps: int | None = None
        self._residual_diffs: ResidualDiffs = {}
        self._marks = Overrides()  # attributes of transformers and the pipeline that are set while it is enabled

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
        """Enable with the enabler registered for the pipeline or a transformer, if there is one, else directly."""
        transformers = find_transformers(pipeline)
        names = [type(each).__name__ for each in (pipeline, *transformers.values())]
        enabler = next((CUSTOM_DIT_ENABLERS[name] for name in names if name in CUSTOM_DIT_ENABLERS), None)
        if enabler is None or self._engine is not None or find_cache(pipeline) is not None:
            self.enable_directly(pipeline)
        else:
            self._run_enabler(enabler, pipeline, transformers)

    def _run_enabler(self, enabler: CacheDiTEnabler, pipeline: Any, transformers: dict[str, nn.Module]) -> None:
        """Let an enabler make a cache, and take its place: a cache of holdover's, or one of the library's own."""
        state, name = PipelineState(pipeline, transformers), getattr(enabler, "__name__", repr(enabler))
        try:
            with quiet_library():
                result = enabler(pipeline, self.config)
            refresh = result.refresh if isinstance(result, CacheDiTEnableResult) else result
            found = find_cache(pipeline)
            if isinstance(found, CacheDiTBackend):
                self._adopt(found)
            elif (installed := state.take_over(name)) is not None:
                self._adapter = TransformerAdapter(
                    installed.block_adapter, installed.adapter_cls, None, installed.template, installed.patches
                )
                self.enable_directly(pipeline, installed.transformers)
                for attribute, value in installed.attributes.items():
                    self._marks.set(pipeline, attribute, value)
            else:
                raise EnableError(
                    f"The enabler {name} has put no cache on this {type(pipeline).__name__}: end it with "
                    "`return enable_cache_for_dit(pipeline, cache_config, block_adapter)`."
                )
        except BaseException:
            if (found := find_cache(pipeline)) is not None:
                found.disable()
            state.restore()
            raise
        self.expose_contexts()
        if callable(refresh):
            self._refresh_func = refresh

    def _adopt(self, found: CacheDiTBackend) -> None:
        """Take the place of a cache that is enabled."""
        for name in (
            "_engine",
            "_adapter",
            "_marks",
            "_refresh_func",
            "_residual_diffs",
            "_get_transformer",
            "settings",
        ):
            setattr(self, name, getattr(found, name))
        self._require_engine().owner, self.enabled = self, True
        found._engine, found.enabled, found._marks = None, False, Overrides()

    def enable_directly(self, pipeline: Any, transformers: dict[str, nn.Module] | None = None) -> None:
        """Enable without looking for an enabler, on all transformers of the pipeline or on these."""
        if self._engine is None:
            self._adapter.adapted.clear()  # the transformer may have changed since
            self._adapter.refreshed = None
            if transformers is None and self._get_transformer is not None:
                module = self._get_transformer(pipeline)
                transformers = {_path_of(module, find_transformers(pipeline)): module}
        self._enable_on(pipeline, transformers or find_transformers(pipeline))
        for part in self._require_engine().transformers:  # the stack inside a transformer need not get the timestep
            if "." in part.name and part.inputs.timestep_name is None:
                part.family = dataclasses.replace(part.family, one_forward_per_step=True)
        self._refresh_func = build_cache_context_refresh(
            self.settings, self._get_transformer or default_get_pipeline_transformer
        )
        logger.info("cache-dit is enabled on %s: %s", type(pipeline).__name__, "; ".join(self._require_engine().notes))

    def expose_contexts(self) -> None:
        """Put the contexts where `cache_dit.refresh_context` looks for them, until the cache is disabled."""
        for module, adapted in self._adapter.adapted.items():
            self._marks.set(module, "_context_manager", adapted.template)
            self._marks.set(module, "_context_names", list(adapted.names))

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        """Call the refresh function of the enabler; a generation of that many steps starts, whatever it does."""
        self._check_target(pipeline, num_inference_steps)
        engine, self._last_num_inference_steps = self._require_engine(), None
        engine.check_transformers()
        assert self._refresh_func is not None
        target = pipeline if pipeline is not None else engine.pipeline or engine.transformers[0].module
        self._refresh_func(target, num_inference_steps, verbose)
        if self._last_num_inference_steps is None:
            self.start_generation(num_inference_steps, verbose)

    def start_generation(
        self, num_inference_steps: int, verbose: bool = True, settings: CacheDiTConfig | None = None
    ) -> None:
        """Start a generation of that many steps; its SCM mask and where it starts over are those of `settings`."""
        if settings is not None:
            self._adapter.refreshed = settings
        super().refresh(None, num_inference_steps, verbose)
        self._last_num_inference_steps = num_inference_steps

    def disable(self, pipeline: Any = None) -> None:
        """Remove the cache; the pipeline may be named, but need not be."""
        if pipeline is not None:
            self._check_target(pipeline)
        with contextlib.suppress(EnableError):  # `cache_dit.disable_cache` may have removed some of them
            self._marks.restore()
        self._marks = Overrides()
        super().disable()
        self._adapter.adapted.clear()  # it holds the blocks

    def make_method(self, settings: CacheDiTConfig) -> CacheDiTMethod:
        return CacheDiTMethod(settings, self.settings, self._adapter, self._residual_diffs)

    def residual_diffs(self) -> ResidualDiffs:
        """How much the residual of the first blocks differed at each comparison of the last generation."""
        return self._residual_diffs


# The documented functions


def build_cache_context_refresh(
    cache_config: Any, get_pipeline_transformer: Callable[[Any], Any] = default_get_pipeline_transformer
) -> RefreshCacheContextFunc:
    """A function `(pipeline, num_inference_steps, verbose=True)` that starts a generation of that many steps.

    The SCM mask is the one of `cache_config`, which need not be the config that the cache was enabled with.
    """
    settings = CacheDiTBackend(cache_config).settings

    def refresh(pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        cache = _cache_on(get_pipeline_transformer(pipeline))
        if not isinstance(cache, CacheDiTBackend):
            raise NotEnabledError(f"The cache on this {type(pipeline).__name__} is not one of cache_dit.")
        cache._check_target(None, num_inference_steps)
        cache.start_generation(num_inference_steps, verbose, settings)

    return refresh


def enable_cache_for_dit(
    pipeline: Any,
    cache_config: Any,
    block_adapter: Adapter | None = None,
    adapter_cls: type[CachedAdapter] | None = None,
    get_pipeline_transformer: Callable[[Any], Any] | None = None,
) -> RefreshCacheContextFunc:
    """Enable cache-dit with this adapter or declaration, else what the transformer declares, else the library's own.

    All transformers of the pipeline are cached; with `get_pipeline_transformer`, only the module that it returns.
    """
    backend = CacheDiTBackend(cache_config, block_adapter, adapter_cls, None, get_pipeline_transformer)
    backend.enable_directly(pipeline)
    assert backend._refresh_func is not None
    return backend._refresh_func


def may_enable_cache_dit(pipeline: Any, od_config: Any) -> CacheDiTBackend | None:
    """Enable cache-dit if the serving engine's config selects it with settings; otherwise return None."""
    if od_config.cache_backend not in ("cache_dit", "cache-dit") or not od_config.cache_config:
        return None
    backend = CacheDiTBackend(od_config.cache_config)
    backend.enable(pipeline)
    return backend


@dataclass(frozen=True)
class CacheDiTRequestSpec:
    """The cache that one request wants. Requests with the same `installation_key` share one installation."""

    installation_key: str
    cache_config: DiffusionCacheConfig
    num_inference_steps: int


class RequestScopedCacheDiTRuntime:
    """Enables, refreshes or disables cache-dit on a pipeline as each request wants it."""

    def __init__(self, pipeline: Any) -> None:
        self._pipeline = pipeline
        self._backend: CacheDiTBackend | None = None
        self._key: str | None = None

    @property
    def is_enabled(self) -> bool:
        return self._backend is not None and self._backend.is_enabled()

    def adopt(self, backend: CacheDiTBackend, *, installation_key: str) -> None:
        """Take charge of a cache that is enabled already."""
        if self._backend is not None and (self._backend is not backend or self._key != installation_key):
            raise EnableError(f"cache-dit is enabled for {self._key!r}: disable() it before {installation_key!r}.")
        if not backend.is_enabled():
            raise NotEnabledError("This cache is not enabled: call enable(pipeline) first.")
        self._backend, self._key = backend, installation_key

    def prepare(self, spec: CacheDiTRequestSpec | None) -> None:
        """Make the pipeline ready for a request; None is a request without a cache."""
        if self._key != (None if spec is None else spec.installation_key):
            self.disable()
        if spec is None:
            return
        if self._backend is None:
            backend = CacheDiTBackend(spec.cache_config)
            backend.enable(self._pipeline)
            self.adopt(backend, installation_key=spec.installation_key)
        assert self._backend is not None
        self._backend.refresh(self._pipeline, spec.num_inference_steps)

    def disable(self) -> None:
        """Take the cache off, if there is one."""
        backend, self._backend, self._key = self._backend, None, None
        if backend is not None:
            backend.disable()


def cache_summary(pipeline: Any, details: bool = True) -> None:
    """Print a table of computed and held steps, and percentiles of the residual differences.

    With `details`, also the trace of steps and the reasons.
    """
    cache = _cache_on(pipeline)
    stats = cache.stats()
    diffs = cache.residual_diffs() if isinstance(cache, CacheDiTBackend) else {}
    percentiles = (0, 25, 50, 75, 95, 100)
    columns = ["branch", "computed", "held"]
    columns += [f"diff p{percentile}" for percentile in percentiles] if diffs else []
    columns += ["steps", "why"] if details else []
    table = Table(*columns, title=f"{stats.method}: {stats.computed} computed, {stats.held} held", title_justify="left")
    if (last := stats.last) is not None:
        for branch in last.branches:
            forwards = last.of_branch(branch)
            row = [branch, str(last.computed[branch]), str(last.held[branch])]
            if diffs:
                measured = diffs.get((forwards[0].transformer, forwards[0].branch))
                values = np.percentile(measured, percentiles) if measured else ()
                row += [f"{value:.3f}" for value in values] or [""] * len(percentiles)
            if details:
                reasons = Counter(forward.reason for forward in forwards)
                row += [last.trace(branch), "; ".join(f"{count} x {reason}" for reason, count in reasons.items())]
            table.add_row(*row)
    console = Console()
    console.print(table)
    for note in stats.notes if details else ():
        console.print(note, highlight=False, soft_wrap=True)


def _path_of(module: nn.Module, transformers: dict[str, nn.Module]) -> str:
    """The name of a transformer, or of a part of one, in the pipeline."""
    for name, transformer in transformers.items():
        for path, part in transformer.named_modules():
            if part is module:
                return f"{name}.{path}" if path else name
    return "other"


def _cache_on(target: Any) -> CacheBackend:
    """The cache on a pipeline or transformer; an error if there is none."""
    if (cache := find_cache(target)) is None:
        raise NotEnabledError(f"There is no holdover cache on this {type(target).__name__}.")
    return cache
