"""The signature of every policy, and the two that need no rule: compute every step, or a given schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from ..grid import Grid


@dataclass(frozen=True, slots=True)
class Decision:
    """Compute this step, or hold it, and why."""

    compute: bool
    reason: str


# Reasons shared by all policies and by the engine's guards.
FIRST = Decision(True, "first step")
LAST = Decision(True, "last step")
NOTHING_HELD = Decision(True, "nothing to hold yet")
OFF = Decision(True, "threshold is 0")
RETAINED = Decision(True, "one of the first steps, always computed")
ALWAYS = Decision(True, "every step is computed")
SCHEDULED = Decision(True, "scheduled")
BETWEEN = Decision(False, "between scheduled steps")


@dataclass
class PolicyState:
    """What a policy remembers of one branch in one generation.

    `anchor` is the step whose result may be held. The engine sets it to None when that result no longer fits (another
    shape, another batch, an exception); the policy moves it whenever it decides to compute.
    """

    anchor: int | None = None


class Policy(Protocol):
    """Decides for one branch of one transformer in one generation."""

    @property
    def needs_signal(self) -> bool:
        """Whether `decide` must be given how much the signal changed."""

    def start(self) -> Any:
        """A fresh state for one branch of one generation."""

    def decide(self, step: int, signal: float | None, state: Any) -> Decision:
        """Compute or hold `step`, given the change of the signal since this branch's last step."""


def schedule(policy: Policy, grid: Grid) -> list[Decision]:
    """All decisions of a policy that needs no signal, made before step 0."""
    state = policy.start()
    return [policy.decide(step, None, state) for step in range(grid.first, grid.last + 1)]


@dataclass(frozen=True)
class AlwaysCompute:
    """Compute every step; with `needs_signal`, the signal is read all the same, to be measured."""

    needs_signal: bool = False

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        state.anchor = step
        return ALWAYS


@dataclass(frozen=True)
class Scheduled:
    """Compute the scheduled steps and hold the others."""

    computed: frozenset[int]
    needs_signal: bool = False

    def start(self) -> PolicyState:
        return PolicyState()

    def decide(self, step: int, signal: float | None, state: PolicyState) -> Decision:
        if state.anchor is None:
            decision = FIRST if step == min(self.computed, default=0) else NOTHING_HELD
        else:
            decision = SCHEDULED if step in self.computed else BETWEEN
        if decision.compute:
            state.anchor = step
        return decision
