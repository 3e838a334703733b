"""The backends users hold: enable, refresh, disable. The method puts policy, predictor and signal together."""

from __future__ import annotations

import logging
import reprlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar, Generic, TypeVar

import torch
from diffusers.hooks import ModelHook
from torch import nn

from ..base import CacheBackend, DiffusionCacheConfig
from ..config import ConfigT
from ..errors import ConfigError, EnableError, NotEnabledError, UnsupportedModelError
from ..models.inputs import describe_structure
from ..policies.base import AlwaysCompute, PolicyState
from ..stats import Stats
from .engine import Engine
from .install import CachedTransformer, find_engine
from .method import BLOCK_PASSES, Method, NoneConfig, NoneMethod
from .parallel import Ranks
from .state import BranchState, ForwardCall, Generation
from .verify import ReplayReport

logger = logging.getLogger(__name__)
StateT = TypeVar("StateT")


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
        if self._engine is not None:
            raise EnableError("This cache is enabled already: disable() it first, or make another one.")
        whole = None if isinstance(pipeline, nn.Module) else pipeline
        engine = Engine(whole, find_transformers(pipeline), self.make_method(self.settings), owner=self)
        engine.install()
        self._engine, self.enabled = engine, True

    def refresh(self, pipeline: Any, num_inference_steps: int, verbose: bool = True) -> None:
        engine = self._require_engine()
        known = [engine.pipeline, *(m for t in engine.transformers for m in (t.module, t.core))]
        if pipeline is not None and not any(pipeline is each for each in known):
            raise NotEnabledError(f"This cache is not on that {type(pipeline).__name__}.")
        if isinstance(num_inference_steps, bool) or not isinstance(num_inference_steps, int) or num_inference_steps < 1:
            raise ConfigError(f"num_inference_steps must be a whole number of at least 1, not {num_inference_steps!r}.")
        engine.refresh(num_inference_steps)
        if verbose:
            logger.info("%s: a generation of %d steps starts", type(self).__name__, num_inference_steps)

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
        self._require_engine().set_ranks(ranks)

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

    def using(self, **settings: Any) -> AbstractContextManager[None]:
        return self._require_engine().use(self.make_method(self.settings.replaced(**settings)))

    def off(self) -> AbstractContextManager[None]:
        return self._require_engine().use(NoneMethod(NoneConfig()))

    def reports(self) -> dict[str, ReplayReport]:
        """The replay check of each transformer that has run, by name."""
        return {t.name: t.report for t in self._require_engine().transformers if t.report is not None}

    def branch_state(self) -> Any:
        """The policy's state of the branch that runs or ran last; None between generations."""
        state = None if self._engine is None else self._engine.branch_state
        return None if state is None else state.policy_state

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
    """The cache that is on a pipeline or transformer, if there is one."""
    engines = (find_engine(module) for module in find_transformers(target).values())
    return next((engine.owner for engine in engines if engine is not None), None)


def find_transformers(target: Any) -> dict[str, nn.Module]:
    """The denoising transformers of a pipeline by attribute name, or the transformer that was given."""
    if isinstance(target, nn.Module):
        return {"transformer": target}
    components = getattr(target, "components", None)
    names = components if isinstance(components, Mapping) else vars(target) if hasattr(target, "__dict__") else ()
    modules = {}
    for name in names:
        if name.startswith("transformer") or name.endswith("transformer") or name == "prior":
            module = getattr(target, name, None)
            if isinstance(module, nn.Module):
                modules[name] = module
    if not modules:
        raise EnableError(
            f"{type(target).__name__} has no transformer to cache. Give a diffusers pipeline with a `transformer`, "
            "or the transformer itself."
        )
    return modules


def check(transformer: nn.Module, **inputs: Any) -> ReplayReport:
    """Compare a full forward with a forced hold on the same inputs, by output and by stream.

    The transformer is not changed. `str(report)` is readable; `report.max_error` is relative to the largest value.
    """
    if find_engine(transformer) is not None:
        raise EnableError(
            f"There already is a holdover cache on this {type(transformer).__name__}: disable() it first."
        )
    cached, method = CachedTransformer("transformer", transformer), NoneMethod(NoneConfig())
    reason = None if cached.family.must_compute is None else cached.family.must_compute(inputs)
    if reason is not None:
        raise EnableError(f"A forward of {cached.class_name} with these inputs is never held: it {reason}.")
    state = BranchState(AlwaysCompute(), PolicyState(), BLOCK_PASSES)
    structure = describe_structure(inputs, [])
    call = ForwardCall(Generation(method), cached, "", 0, state, transformer, (), inputs, structure, None, False)
    try:
        with torch.no_grad():
            method.make_runner(cached).run(call)
    except UnsupportedModelError as error:
        if isinstance(error.report, ReplayReport):
            return error.report
        raise
    assert cached.report is not None
    return cached.report


# The documented hook classes


class BranchStateManager(Generic[StateT]):
    """The state of the branch that runs, in the form that diffusers' hooks expect of a state manager."""

    def __init__(self, state_class: Callable[[], StateT]) -> None:
        self._state_class = state_class
        self.backend: EngineBackend[Any] | None = None  # the cache whose states are shown

    def get_state(self) -> StateT:
        """The state of the branch that runs or ran last; a new one between generations."""
        state = None if self.backend is None else self.backend.branch_state()
        return state if state is not None else self._state_class()

    def reset(self) -> None:
        """Forget everything: the next forward starts a generation."""
        if self.backend is not None and self.backend.is_enabled():
            self.backend.forget()


class MethodHook(ModelHook, Generic[StateT]):  # type: ignore[misc]
    """Base of the documented hooks: the settings of a method and the state of the branch that runs."""

    _is_stateful = True

    def __init__(self, state_manager: BranchStateManager[StateT], config: Any) -> None:
        super().__init__()
        self.state_manager = state_manager
        self.config = config

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Leaves the block as it is: the engine works on the list that holds it."""
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One call of the module; in a hook registry the cache is already around it."""
        forward = module if self.fn_ref is None else self.fn_ref.original_forward
        return forward(*args, **kwargs)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Forget everything: the next forward starts a generation."""
        self.state_manager.reset()
        return module
