"""The documented hook of TeaCache: `new_forward` is what a transformer runs while the hook is registered on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn

from ..context import CacheContext
from ..engine.blocks import BlockRunner
from ..engine.engine import Engine
from ..engine.hooks import BranchStateManager, CacheHook, forget_child_registries, register_hook, remove_hooks
from ..engine.install import CachedTransformer, find_engine
from ..engine.method import Runner
from ..engine.output import ExtractorRunner
from ..engine.state import ForwardCall, Outcome
from ..errors import EnableError, NotEnabledError
from ..grid import Grid
from ..models.registry import Extractor
from ..policies.base import Decision
from ..policies.teacache import TeaCacheState
from ..profiles import TeaCacheFit, shipped
from ..stats import Stats
from .backend import TeaCacheBackend, TeaCacheMethod, find_named_extractor, name_transformer
from .config import TeaCacheConfig


class TeaCacheHook(CacheHook[TeaCacheState]):
    """A diffusers hook that caches every forward of the transformer it is registered on.

    `rescale_func` is the rescaling polynomial, `extractor_fn` the extractor registered for `config.transformer_type`,
    or None if the blocks are traced. All three can be set, and count from the next forward on; setting `config` sets
    the other two from it.
    """

    def __init__(self, config: TeaCacheConfig) -> None:
        self.extractor_fn: Extractor | None = None
        self.rescale_func: Callable[[float], float] = np.poly1d([1.0, 0.0])
        self.engine: Engine | None = None
        self._extractor_used: Extractor | None = None
        self._rescale_found: Callable[[float], float] = self.rescale_func  # what the config led to
        super().__init__(BranchStateManager(TeaCacheState, on_reset=self._forget), config)

    @property
    def config(self) -> TeaCacheConfig:
        """The settings of TeaCache."""
        return self._config

    @config.setter
    def config(self, config: TeaCacheConfig) -> None:
        self._config = config
        if self.engine is None:
            self.rescale_func = self._rescale_found = np.poly1d(_find_fit(config).coefficients)
        else:
            self.engine.method.prepare(self.engine.transformers[0], None)
            self.rescale_func, self.extractor_fn = self._rescale_found, None
            self._adopt(self.engine)

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Find the constants and the extractor of the module."""
        if find_engine(module) is not None:
            raise EnableError(f"There already is a holdover cache on this {type(module).__name__}: disable() it first.")
        self.engine = _HookEngine(None, {"transformer": module}, _HookMethod(self))
        TeaCacheBackend(self.config).take_over(self.engine)
        self._adopt(self.engine)
        return module

    def deinitalize_hook(self, module: nn.Module) -> nn.Module:
        """Forget the module."""
        self.state_manager.reset()
        self.engine = None
        return module

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One forward of the module, computed or held."""
        if self.engine is None:
            self.initialize_hook(module)
        assert self.engine is not None
        transformer = self.engine.transformers[0]
        if self.extractor_fn is not self._extractor_used:
            self._extractor_used = self.extractor_fn
            self._forget()  # what is held was computed in another way
        transformer.extractor = None if self.extractor_fn is None else self._extract
        transformer.context.hint = self.state_manager.hint
        plain = module if self.fn_ref is None else self.fn_ref.original_forward
        return self.engine.forward(transformer, plain, args, kwargs)

    def stats(self) -> Stats:
        """The computed and held steps so far."""
        if self.engine is None:
            raise NotEnabledError("There are no statistics: the hook is not registered on a transformer.")
        return self.engine.stats()

    def _adopt(self, engine: Engine) -> None:
        """Take over the polynomial and the extractor that the config leads to, unless others were set."""
        transformer, method = engine.transformers[0], engine.method
        assert isinstance(method, _HookMethod)
        if self.rescale_func is self._rescale_found:
            self.rescale_func = self._rescale_found = np.poly1d(method.profile(transformer).fit("").coefficients)
        if self.extractor_fn is None:
            self.extractor_fn = find_named_extractor(method.config, transformer.core)

    def _extract(self, module: nn.Module, *args: Any, **kwargs: Any) -> CacheContext:
        """The extractor's context; its `extra_states` are kept with the state of the branch."""
        assert self.extractor_fn is not None
        context = self.extractor_fn(module, *args, **kwargs)
        self.state_manager.get_state().extra_states = getattr(context, "extra_states", None)
        return context

    def _forget(self) -> None:
        if self.engine is not None:
            self.engine.refresh(None)


class _HookEngine(Engine):
    """The engine of a hook, which is on the transformer in the engine's place."""

    def uninstall(self) -> None:
        remove_hooks(self.transformers[0].module)
        super().uninstall()


class _HookMethod(TeaCacheMethod):
    """TeaCache with the settings that its hook has at the moment."""

    def __init__(self, hook: TeaCacheHook) -> None:
        super().__init__(hook.config)
        self.hook = hook

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        config = name_transformer(self.hook.config, transformer.core)
        super().__init__(config.replaced(clamp=False, compute_last=False))
        return super().prepare(transformer, pipeline)

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return _HookRunner(self.hook, transformer)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Any:
        return _HookPolicy(self, transformer, branch, grid)

    def current_policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Any:
        """The policy with the hook's threshold and polynomial of the moment."""
        return replace(super().policy(transformer, branch, grid), rescale=self.hook.rescale_func)


class _HookPolicy:
    """Decides as the hook says at each step, on the state that its manager has."""

    needs_signal: ClassVar[bool] = True

    def __init__(self, method: _HookMethod, transformer: CachedTransformer, branch: str, grid: Grid) -> None:
        self._method, self._place = method, (transformer, branch, grid)

    def start(self) -> TeaCacheState:
        state: TeaCacheState = self._method.hook.state_manager.start_branch(self._place[1])
        return state

    def decide(self, step: int, signal: float | None, state: TeaCacheState) -> Decision:
        decision: Decision = self._method.current_policy(*self._place).decide(step, signal, state)
        return decision


class _HookRunner:
    """Runs a transformer through the hook's extractor, or block by block where it has none."""

    def __init__(self, hook: TeaCacheHook, transformer: CachedTransformer) -> None:
        self._hook, self._transformer = hook, transformer
        self._runners: dict[Extractor | None, Runner] = {}

    def run(self, call: ForwardCall) -> Outcome:
        extractor = self._hook.extractor_fn
        if extractor not in self._runners:
            make = BlockRunner if extractor is None else ExtractorRunner
            self._runners[extractor] = make(self._transformer)
        self._hook.state_manager.branch = call.branch
        return self._runners[extractor].run(call)


def apply_teacache_hook(module: nn.Module, config: TeaCacheConfig) -> None:
    """Register a TeaCacheHook on a transformer; `holdover.disable(module)` removes it."""
    register_hook(module, TeaCacheHook(config), "teacache")
    forget_child_registries(module)


def _find_fit(config: TeaCacheConfig) -> TeaCacheFit:
    """The given coefficients, else those of the first shipped profile of the class, else the identity."""
    if config.coefficients is not None:
        return TeaCacheFit(config.coefficients)
    of_class = (p for p in shipped("tea_cache") if p.transformer_class == config.transformer_type)
    return next((profile.fit("") for profile in of_class), TeaCacheFit((1.0, 0.0)))
