"""Schedules that are given, not found."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Decision, PolicyState

ASKED = Decision(True, "every step is computed")


@dataclass(frozen=True)
class AlwaysCompute:
    """Compute every step; `needs_signal` asks for the signal all the same, for those who measure it."""

    needs_signal: bool = False

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        state.anchor = step
        return ASKED
