"""The documented hook classes are roles at the seam, not a second mechanism: what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

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
