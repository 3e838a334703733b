"""The documented hook classes are roles at the seam, not a second mechanism: what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

from diffusers.hooks import ModelHook
from torch import nn

from ..base import CacheBackend
from .engine import Engine

S = TypeVar("S")


class BranchStates(Generic[S]):
    """The state of the branch that runs, in the form diffusers' hooks expect of a state manager."""

    def __init__(self, state_class: Callable[[], S]) -> None:
        self._state_class = state_class
        self._engine: Engine | None = None

    def follow(self, backend: CacheBackend) -> None:
        """Show the states of this cache."""
        self._engine = getattr(backend, "engine", None)

    def get_state(self) -> S:
        """The state of the branch that runs or ran last; a fresh one between generations."""
        state: Any = None if self._engine is None else self._engine.branch_state
        return state if state is not None else self._state_class()

    def reset(self) -> None:
        """Forget: the next forward begins a generation."""
        if self._engine is not None:
            self._engine.refresh(None)


class Role(ModelHook, Generic[S]):  # type: ignore[misc]
    """A documented hook: a place at the seam with its settings and the state of the branch that runs."""

    _is_stateful = True

    def __init__(self, state_manager: BranchStates[S], config: Any) -> None:
        super().__init__()
        self.state_manager = state_manager
        self.config = config

    def initialize_hook(self, module: nn.Module) -> nn.Module:
        """Nothing is put on a block: the cut is on the list that holds it."""
        return module

    def new_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """One call of the module; in a hook registry the cache is already around it."""
        forward = module if self.fn_ref is None else self.fn_ref.original_forward
        return forward(*args, **kwargs)

    def reset_state(self, module: nn.Module) -> nn.Module:
        """Forget everything: the next forward begins a generation."""
        self.state_manager.reset()
        return module
