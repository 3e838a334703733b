"""The backends users hold: enable, refresh, disable. The method puts policy, predictor and signal together."""

from __future__ import annotations

import inspect
import logging
import reprlib
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import nn

from ..base import CacheBackend, DiffusionCacheConfig
from ..config import ConfigT
from ..errors import ConfigError, EnableError, NotEnabledError, UnsupportedModelError, did_you_mean
from ..models.inputs import describe_structure
from ..models.pipelines import find_transformers
from ..policies.base import AlwaysCompute, PolicyState
from ..stats import Stats
from .engine import Engine
from .hooks import has_hooks
from .install import CachedTransformer, find_engine
from .method import BLOCK_PASSES, Method, NoneConfig, NoneMethod
from .parallel import Ranks
from .state import BranchState, ForwardCall, Generation
from .verify import ReplayReport

logger = logging.getLogger(__name__)


class EngineBackend(CacheBackend[ConfigT]):
    """A cache that the engine runs."""

    config_class: ClassVar[type[ConfigT]]

    def __init__(self, config: ConfigT | DiffusionCacheConfig | Mapping[str, Any] | None = None) -> None:
        super().__init__(config if config is not None else self.config_class())
        self.settings: ConfigT = self._own_config(self.config)
        self._engine: Engine | None = None
        self._last_stats: Stats | None = None

    @classmethod
    def _own_config(cls, config: Any) -> ConfigT:
        if isinstance(config, cls.config_class):
            return config
        if isinstance(config, DiffusionCacheConfig):
            return cls.config_class(**config.part(cls.config_class))
        if isinstance(config, Mapping):
            return cls.config_class.from_dict(config)
        raise ConfigError(f"{cls.__name__} takes a {cls.config_class.__name__}, not {type(config).__name__}.")

    @abstractmethod
    def make_method(self, settings: ConfigT) -> Method[ConfigT]:
        """The method with these settings."""

    def enable(self, pipeline: Any) -> None:
        self._enable_on(pipeline, find_transformers(pipeline))

    def _enable_on(self, pipeline: Any, transformers: Mapping[str, nn.Module]) -> None:
        """Enable on these transformers of a pipeline, or on a transformer that was given itself."""
        if self._engine is not None:
            raise EnableError("This cache is enabled already: disable() it first, or make another one.")
        for module in transformers.values():
            if has_hooks(module):
                raise EnableError(
                    f"There already are hooks of a holdover cache on this {type(module).__name__}: "
                    "holdover.disable() them first."
                )
        whole = None if any(module is pipeline for module in transformers.values()) else pipeline
        engine = Engine(whole, transformers, self.make_method(self.settings), owner=self)
        engine.install()
        self._engine, self.enabled = engine, True

    def take_over(self, engine: Engine) -> None:
        """Be the cache of an engine that is on its transformer already."""
        self._engine, self.enabled, engine.owner = engine, True, self

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        self._check_target(pipeline, num_inference_steps)
        self._require_engine().refresh(num_inference_steps)
        if verbose:
            logger.info("%s: a generation of %d steps starts", type(self).__name__, num_inference_steps)

    def _check_target(self, pipeline: Any, num_inference_steps: Any = 1) -> None:
        """Raise if this cache is not on that pipeline or transformer, or if that is no number of steps."""
        engine = self._require_engine()
        known = [engine.pipeline, *(m for t in engine.transformers for m in (t.module, t.core))]
        if pipeline is not None and not any(pipeline is each for each in known):
            raise NotEnabledError(f"This cache is not on that {type(pipeline).__name__}.")
        if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, int) or num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps must be a whole number of at least 1, not {num_inference_steps!r}.")

    def disable(self) -> None:
        engine = self._require_engine()
        engine.uninstall()
        self._last_stats = engine.stats()
        self._engine, self.enabled = None, False

    def forget(self) -> None:
        """Drop the state of the running generation; the next forward starts another."""
        self._require_engine().refresh(None)

    def set_ranks(self, ranks: Ranks) -> None:
        """State the groups of ranks of the generations to come, where the transformer does not show them."""
        engine = self._require_engine()
        if not isinstance(ranks, Ranks):
            raise ConfigError(f"ranks is a holdover.Ranks, such as Ranks(sequence=group), not {ranks!r}.")
        engine.set_ranks(ranks)

    def stats(self) -> Stats:
        if self._engine is not None:
            return self._engine.stats()
        if self._last_stats is None:
            raise NotEnabledError("There are no statistics: the cache was never enabled.")
        return self._last_stats

    def __repr__(self) -> str:
        """The method with the settings that are not the defaults, the pipeline, and what has run."""
        engine = self._engine
        config = self.settings if engine is None else engine.method.config  # `using` and `off` change it
        values = ((f.name, getattr(config, f.name), f.default) for f in config.settings())
        changed = ", ".join(f"{name}={reprlib.repr(value)}" for name, value, default in values if value != default)
        method = f"{type(self).__name__}: {config.method}({changed})"
        if engine is None:
            return f"<{method}, {'not enabled' if self._last_stats is None else 'disabled'}>"
        target = engine.transformers[0].module if engine.pipeline is None else engine.pipeline
        _, _, state = str(engine.stats()).splitlines()[0].partition(": ")
        return f"<{method} on {type(target).__name__}, enabled: {state}>"

    def __getstate__(self) -> Any:
        """The state for copy and pickle; an enabled cache has none that would mean anything elsewhere."""
        if self._engine is not None:
            raise TypeError(
                "An enabled cache cannot be copied or pickled, for it belongs to its pipeline: pickle cache.stats() or "
                "cache.settings, and call holdover.enable on the other pipeline."
            )
        return super().__getstate__()

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        return self._require_engine().use(self.make_method(self.settings.replaced(**settings)))

    def off(self) -> AbstractContextManager[None]:
        return self._require_engine().use(NoneMethod(NoneConfig()))

    def reports(self) -> dict[str, ReplayReport]:
        """The replay check of each transformer that has run, by name."""
        return {t.name: t.report for t in self._require_engine().transformers if t.report is not None}

    def _require_engine(self) -> Engine:
        if self._engine is None:
            raise NotEnabledError("This cache is not enabled: call enable(pipeline) first.")
        return self._engine


class NoneBackend(EngineBackend[NoneConfig]):
    """No cache: the plain pipeline, counted and timed like the others."""

    config_class = NoneConfig

    def make_method(self, settings: NoneConfig) -> NoneMethod:
        return NoneMethod(settings)


def find_cache(target: Any) -> CacheBackend | None:
    """The cache that is on a pipeline or transformer, or on a part of it, if there is one."""
    parts = (part for module in find_transformers(target).values() for part in module.modules())
    return next((engine.owner for part in parts if (engine := find_engine(part)) is not None), None)


def check(transformer: Any, **inputs: Any) -> ReplayReport:
    """Compare a full forward with a forced hold on the same inputs, by output and by stream.

    `transformer` is a transformer, or a pipeline that has one; `inputs` are the arguments of its forward. It is not
    changed. `str(report)` is readable; `report.max_error` is relative to the largest value.
    """
    modules = find_transformers(transformer)
    if len(modules) > 1:
        raise EnableError(f"This {type(transformer).__name__} has several transformers: check {' or '.join(modules)}.")
    (module,) = modules.values()
    if find_engine(module) is not None:
        raise EnableError(f"There already is a holdover cache on this {type(module).__name__}: disable() it first.")
    cached, method = CachedTransformer("transformer", module), NoneMethod(NoneConfig())
    if not inputs:
        names = ", ".join(f"{name}=..." for name in cached.inputs.names[:3])
        raise ConfigError(f"A check runs one forward of {cached.class_name}: give its arguments, check(..., {names}).")
    try:
        inspect.signature(cached.core.forward).bind(**inputs)
    except TypeError as error:
        known = cached.inputs.names
        hints = (f" It has no argument {n!r}.{did_you_mean(n, known)}" for n in inputs if n not in known)
        raise ConfigError(f"{cached.class_name}.forward: {error}.{''.join(hints)}") from None
    reason = None if cached.family.must_compute is None else cached.family.must_compute(inputs)
    if reason is not None:
        raise EnableError(f"A forward of {cached.class_name} with these inputs is never held: it {reason}.")
    state = BranchState(AlwaysCompute(), PolicyState(), BLOCK_PASSES)
    structure = describe_structure(inputs, [])
    call = ForwardCall(Generation(method), cached, "", 0, state, module, (), inputs, structure, None)
    try:
        with torch.no_grad():
            method.make_runner(cached).run(call)
    except UnsupportedModelError as error:
        if isinstance(error.report, ReplayReport):
            return error.report
        raise
    assert cached.report is not None
    return cached.report
