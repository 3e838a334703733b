"""One of holdover's methods as a cache backend of vLLM-Omni."""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from operator import attrgetter
from typing import Any

from torch import nn

from ..base import CacheBackend
from ..config import Config
from ..engine.backend import EngineBackend
from ..engine.engine import is_inactive
from ..engine.install import Overrides
from ..engine.parallel import Ranks
from ..errors import ConfigError, EnableError, NotEnabledError, UnsupportedModelError
from ..selector import backend_for_config
from ..stats import Stats

logger = logging.getLogger(__name__)


class OmniBackend(CacheBackend):
    """The cache that vLLM-Omni's model runner enables once and refreshes before requests.

    The runner refreshes only if it knows the number of steps. So a generation also starts and ends with the pipeline's
    own forward: nothing is held between requests.
    """

    def __init__(self, name: str, config: Config) -> None:
        super().__init__(config)
        self.name = name
        cache = backend_for_config(config)
        assert isinstance(cache, EngineBackend)
        self._cache = cache
        self._view: PipelineView | None = None
        self._overrides = Overrides()
        self._steps: int | None = None

    def enable(self, pipeline: nn.Module) -> None:
        ranks, view = current_ranks(), view_of(pipeline)
        self._cache.enable(view)
        try:
            self._cache.set_ranks(ranks)
        except BaseException:
            self._cache.disable()
            raise
        self._overrides.set(pipeline, "forward", self._wrap(pipeline.forward))
        self._view, self.enabled = view, True
        logger.info("%s is enabled on the %s of %s", self.name, ", ".join(view.components), type(pipeline).__name__)

    def refresh(self, pipeline: nn.Module, num_inference_steps: int | None, verbose: bool = True) -> None:
        """Set the number of steps of the next request; None or less than 1 means unknown."""
        if pipeline is not self._enabled_view().pipeline:
            raise NotEnabledError(f"This cache is not on that {type(pipeline).__name__}.")
        self._steps = num_inference_steps if num_inference_steps and num_inference_steps > 0 else None
        if verbose:
            logger.debug("%s: a request of %s steps", self.name, self._steps or "unknown")

    def disable(self) -> None:
        self._enabled_view()
        self._overrides.restore()
        self._cache.disable()
        self._view, self.enabled = None, False

    def stats(self) -> Stats:
        return self._cache.stats()

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        return self._cache.using(**settings)

    def off(self) -> AbstractContextManager[None]:
        return self._cache.off()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r}, {self.config!r})"

    def _enabled_view(self) -> PipelineView:
        if self._view is None:
            raise NotEnabledError("This cache is not enabled: call enable(pipeline) first.")
        return self._view

    def _wrap(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """The pipeline's forward as one generation: one request, or a batch that the runner generates together."""

        @functools.wraps(plain)
        def forward(*args: Any, **kwargs: Any) -> Any:
            cache, stats = self._cache, self.stats()
            before = stats.computed + stats.held
            if self._steps is None:
                cache.forget()
            else:
                cache.refresh(self._view, self._steps, verbose=False)
            try:
                settings, *others = request_settings(next(iter((*args, *kwargs.values()))))
                scope: AbstractContextManager[None] = nullcontext()
                if others or isinstance(settings, str):  # if the settings differ within a batch, nothing is held
                    scope = cache.off()
                elif settings:
                    scope = cache.using(**settings)
                with scope:
                    output = plain(*args, **kwargs)
            finally:
                self._steps = None
                cache.forget()
            self._check_generation(before)
            return output

        return forward

    def _check_generation(self, before: int) -> None:
        """Raise if the request bypassed the cache or nothing could be held: otherwise it would go unnoticed."""
        view, stats = self._enabled_view(), self.stats()
        pipeline, transformers = type(view.pipeline).__name__, ", ".join(view.components)
        if (last := stats.last) is None or stats.computed + stats.held == before:
            raise UnsupportedModelError(
                f"{pipeline} ran without one forward of its {transformers} that the cache could see: it calls parts of "
                "it directly, with autograd on, or in training mode. Start without --cache-backend."
            )
        if is_inactive(last):
            raise UnsupportedModelError(
                f"Nothing could be held for {pipeline}: no forward of its {transformers} belonged to the same branch "
                "as an earlier one, because the conditioning changes at every step. Start without --cache-backend."
            )
        logger.info("%s: %d forwards computed, %d held", self.name, last.computed_total, last.held_total)


def request_settings(batch: Any) -> list[Mapping[str, Any] | str]:
    """The different settings in the `extra_args` of a batch's requests; `{}` is the server's own, `"off"` no cache."""
    found: list[Mapping[str, Any] | str] = []
    for request in batch.requests:
        settings = (request.sampling_params.extra_args or {}).get("holdover") or {}
        if not isinstance(settings, Mapping) and settings != "off":
            raise ConfigError(f"extra_args['holdover'] must be an object of settings, or 'off', not {settings!r}.")
        if settings not in found:
            found.append(settings)
    return found


class PipelineView:
    """A vLLM-Omni pipeline as holdover's backends expect one: its transformers by name, and all other attributes.

    vLLM-Omni's pipelines are modules whose forward runs the whole loop, so a backend would take them for transformers.
    """

    def __init__(self, pipeline: nn.Module, transformers: dict[str, nn.Module]) -> None:
        self.pipeline, self.components = pipeline, transformers
        self.config = vars(pipeline)  # what diffusers keeps in a pipeline's config are plain attributes here

    def __getattr__(self, name: str) -> Any:
        return self.components[name] if name in self.components else getattr(self.pipeline, name)


def view_of(pipeline: nn.Module) -> PipelineView:
    """The view, with the class names of the pipeline and its bases, by which profiles find pipelines."""
    view_class: type[PipelineView] = PipelineView
    for cls in reversed(type(pipeline).__mro__):
        view_class = type(cls.__name__, (view_class,), {})
    return view_class(pipeline, declared_transformers(pipeline))


def declared_transformers(pipeline: nn.Module) -> dict[str, nn.Module]:
    """The modules that the pipeline lists in `_dit_modules`, else its transformers; none that is inside another."""
    declared: Iterable[str] = getattr(pipeline, "_dit_modules", None) or ("transformer", "transformer_2")
    found: dict[str, nn.Module] = {}
    for path in declared:
        with suppress(AttributeError):
            if isinstance(module := attrgetter(path)(pipeline), nn.Module):
                found[path] = module
    if not found:
        raise EnableError(
            f"{type(pipeline).__name__} has none of {', '.join(declared)}, so there is nothing to cache. "
            "List its transformers in the pipeline's `_dit_modules`."
        )
    inner = {id(part) for module in found.values() for part in module.modules() if part is not module}
    return {  # holdover's backends look for names with `transformer` in them
        path if path.startswith("transformer") or path.endswith("transformer") else f"{path}_transformer": module
        for path, module in found.items()
        if id(module) not in inner
    }


def current_ranks() -> Ranks:
    """The process groups that vLLM-Omni has set up, if any. Rank `i` of the CFG group computes the `i`-th branch."""
    state: Any = importlib.import_module("vllm_omni.diffusion.distributed.parallel_state")
    if not state.model_parallel_is_initialized():
        return Ranks()
    stages = state.get_pipeline_parallel_world_size()
    if stages > 1:
        raise EnableError(
            f"The transformer is split into {stages} pipeline stages: no rank runs all of it, so no step can be held. "
            "Start with --pipeline-parallel-size 1, or without --cache-backend."
        )
    tensor: Any = importlib.import_module("vllm.distributed.parallel_state")
    return Ranks(
        cfg=state.get_cfg_group().device_group,
        sequence=state.get_sp_group().device_group,
        tensor=tensor.get_tp_group().device_group,
    )
