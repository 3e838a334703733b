"""Schedules that are given, not found."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from .base import FIRST, NOTHING_HELD, Decision, PolicyState

ASKED = Decision(True, "every step is computed")
SCHEDULED = Decision(True, "scheduled")
ADDED = Decision(True, "added: harder than expected")
BETWEEN = Decision(False, "between scheduled steps")


@dataclass(frozen=True)
class AlwaysCompute:
    """Compute every step; `needs_signal` asks for the signal all the same, for those who measure it."""

    needs_signal: bool = False

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        state.anchor = step
        return ASKED


@dataclass(frozen=True)
class Scheduled:
    """Compute the scheduled steps and hold the others; steps may be `added` while the generation runs."""

    computed: frozenset[int]
    added: Collection[int] = field(default_factory=frozenset)
    needs_signal: bool = False

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        decision = self._decided(step, state.anchor)
        if decision.compute:
            state.anchor = step
        return decision

    def _decided(self, step: int, anchor: int | None) -> Decision:
        if anchor is None:
            return FIRST if step == min(self.computed, default=0) else NOTHING_HELD
        if step in self.computed:
            return SCHEDULED
        return ADDED if step in self.added else BETWEEN
