"""What the documented hooks of TeaCache and MagCache share: diffusers hooks with one state per branch.

A hook registered on a transformer or its blocks does by itself what a backend has the engine do. The two are for
different users: hooks are what code written for diffusers or vLLM-Omni registers, the engine is what works with
compiled and offloaded transformers.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from diffusers.hooks import HookRegistry, ModelHook
from diffusers.hooks.hooks import StateManager
from torch import nn

from .install import NO_HINT, ContextHint, iter_registries

try:
    from diffusers.hooks.hooks import CacheContext as HookContext
except ImportError:  # diffusers 0.40: the context of a hook is its name
    HookContext = str

NO_BRANCH = "inference"  # the name of a branch outside of any context, as in diffusers' hooks
StateT = TypeVar("StateT")


class BranchStateManager(StateManager, Generic[StateT]):  # type: ignore[misc]
    """One state per branch, for all hooks of one transformer: diffusers' StateManager that works without a context too.

    `set_context` takes a branch's name or diffusers' context object; `cache_context` of the transformer calls it.
    """

    def __init__(
        self,
        state_cls: Callable[..., StateT],
        init_args: Sequence[Any] = (),
        init_kwargs: Mapping[str, Any] | None = None,
        on_reset: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(state_cls, init_args, init_kwargs)
        self._make_state = functools.partial(state_cls, *init_args, **(init_kwargs or {}))
        self._states: dict[str, StateT] = {}
        self._on_reset = on_reset
        self.hint = NO_HINT
        self.branch = NO_BRANCH  # the branch that runs or ran last

    def set_context(self, context: Any) -> None:
        """Name the branch of the forwards to come; None for no name."""
        self.hint = as_hint(context)
        if self.hint.name is not None:
            self.branch = self.hint.name

    def get_state(self) -> StateT:
        """The state of the branch that runs or ran last: the same object until `reset`."""
        if self.branch not in self._states:
            self.start_branch(self.branch)
        return self._states[self.branch]

    def start_branch(self, branch: str) -> StateT:
        """A new state for a branch."""
        self.branch, state = branch, self._make_state()
        self._states[branch] = state
        return state

    def forget_states(self) -> None:
        """Forget the states of all branches."""
        self._states.clear()

    def reset(self, *args: Any, **kwargs: Any) -> None:
        """Forget everything: the next forward starts a generation."""
        self.forget_states()
        self.hint, self.branch = NO_HINT, NO_BRANCH
        if self._on_reset is not None:
            self._on_reset()


def as_hint(context: Any) -> ContextHint:
    """A hook's context, which is a name, diffusers' context object or None, as the engine has it."""
    if context is None or isinstance(context, str):
        return ContextHint(context or None)
    return ContextHint(context.name, context.step_index, context.num_inference_steps)


def enter_branch(manager: StateManager) -> tuple[ContextHint, Any]:
    """The context and the state of the forward that starts; `manager` may be diffusers' own StateManager."""
    if isinstance(manager, BranchStateManager):
        manager.branch = manager.hint.name or NO_BRANCH
        return manager.hint, manager.get_state()
    context = getattr(manager, "_context", None) or getattr(manager, "_current_context", None)
    if context is None:
        context = HookContext(NO_BRANCH)
        manager.set_context(context)
    return as_hint(context), manager.get_state()


class CacheHook(ModelHook, Generic[StateT]):  # type: ignore[misc]
    """Base of the documented hooks: a config, and a state per branch that hooks of one transformer share."""

    _is_stateful = True

    def __init__(self, state_manager: StateManager, config: Any) -> None:
        super().__init__()
        self.state_manager = state_manager
        self.config = config

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Forget everything: the next forward starts a generation."""
        self.state_manager.reset()
        return module


def register_hook(module: nn.Module, hook: CacheHook[Any], name: str) -> None:
    """Register a hook on a module in diffusers' registry, in place of an earlier one of that name."""
    registry = HookRegistry.check_if_exists_or_initialize(module)
    if registry.get_hook(name) is not None:
        registry.remove_hook(name, recurse=False)
    registry.register_hook(hook, name)


def forget_child_registries(transformer: nn.Module) -> None:
    """Let `cache_context` look for hooks again: diffusers remembers which modules have some."""
    for _, registry in iter_registries(transformer):
        registry._child_registries_cache = None


def has_hooks(transformer: nn.Module) -> bool:
    """Whether documented hooks of a cache are registered on a transformer or its blocks."""
    registries = (registry for _, registry in iter_registries(transformer))
    return any(isinstance(hook, CacheHook) for registry in registries for hook in registry.hooks.values())


def remove_hooks(transformer: nn.Module) -> None:
    """Remove the documented hooks from a transformer and its blocks; modules without other hooks are what they were."""
    for module, registry in iter_registries(transformer):
        ours = [name for name, hook in registry.hooks.items() if isinstance(hook, CacheHook)]
        for name in ours:
            registry.remove_hook(name, recurse=False)
        if ours and not registry.hooks:
            del module._diffusers_hook
            if module.forward == types.MethodType(type(module).forward, module):
                del vars(module)["forward"]
    forget_child_registries(transformer)
