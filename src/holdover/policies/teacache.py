"""TeaCache (Liu et al., "Timestep Embedding Tells: It's Time to Cache for Video Diffusion Model", arXiv:2411.19108).

The signal's relative change since the last step, rescaled by a polynomial, is added up; while the sum stays below the
threshold the step is held. The first step is always computed, the last one with `compute_last`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ..grid import Grid
from .base import FIRST, LAST, NOTHING_HELD, OFF, RETAINED, Decision, PolicyState

HELD = Decision(False, "signal has changed little")
CHANGED = Decision(True, "signal has changed enough")
UNKNOWN = Decision(True, "no change of the signal is known yet")
_SAMPLES = 1000


@dataclass(frozen=True)
class Polynomial:
    """A rescaling polynomial, highest power first.

    The argument is clamped to `low..high`, the range it was fitted on, and the value to at least 0. Published
    polynomials come without their range: `trusted` finds where they turn down and are no longer meaningful.
    """

    coefficients: tuple[float, ...]
    low: float = 0.0
    high: float = 1.0

    def __call__(self, change: float) -> float:
        if math.isnan(change):
            return math.inf  # the change is unknown: compute
        return max(0.0, self.raw(min(max(change, self.low), self.high)))

    def raw(self, x: float) -> float:
        """The polynomial itself, unclamped."""
        value = 0.0
        for coefficient in self.coefficients:
            value = value * x + coefficient
        return value

    def minimum(self) -> float:
        """The least it can add in one step: thresholds at or below it never hold."""
        width = self.high - self.low
        return min(self(self.low + width * i / _SAMPLES) for i in range(_SAMPLES + 1))

    @classmethod
    def trusted(cls, coefficients: Sequence[float]) -> Polynomial:
        """A polynomial without a stated range, cut off at its last peak before it falls for good."""
        whole = cls(tuple(coefficients))
        values = [whole.raw(i / _SAMPLES) for i in range(_SAMPLES + 1)]
        rises = next((i for i, v in enumerate(values) if v > 0), None)
        if rises is None:
            return whole
        falls = next((i for i in range(rises, _SAMPLES + 1) if values[i] <= 0), None)
        if falls is None and values[-1] >= values[-2]:
            return whole
        inside = range(rises + 1, (falls or _SAMPLES + 1) - 1)
        peaks = [i for i in inside if values[i - 1] <= values[i] > values[i + 1]]
        if peaks:
            return cls(whole.coefficients, 0.0, peaks[-1] / _SAMPLES)
        return whole if falls is None else cls(whole.coefficients, 0.0, rises / _SAMPLES)


@dataclass
class TeaCacheState(PolicyState):
    """The sum since the last computed step, and the change that each step is taken to add when reading late.

    `extra_states` are those of the CacheContext of the last forward, if an extractor gives any.
    """

    accumulated_rel_l1_distance: float = 0.0
    assumed: float | None = None
    extra_states: dict[str, Any] | None = None


@dataclass(frozen=True)
class TeaCachePolicy:
    """Hold while the accumulated, rescaled change of the signal is below `threshold`.

    `compute_last`: the last step is always computed, as in the published code. `late`: a change comes only after a
    computed step, and counts for the held steps that follow too.
    """

    needs_signal: ClassVar[bool] = True
    threshold: float
    rescale: Callable[[float], float]
    grid: Grid
    retained: int = 1
    late: bool = False
    compute_last: bool = True

    def start(self) -> TeaCacheState:
        return TeaCacheState()

    def decide(self, step: int, signal: float | None, state: TeaCacheState) -> Decision:
        decision = self._decision(step, signal, state)
        if decision.compute:
            state.anchor = step
            state.accumulated_rel_l1_distance = 0.0
        return decision

    def _decision(self, step: int, signal: float | None, state: TeaCacheState) -> Decision:
        if step == self.grid.first:
            return FIRST
        if step == self.grid.last and self.compute_last:
            return LAST
        if step < self.grid.first + self.retained:
            return RETAINED
        if self.threshold <= 0:
            return OFF
        if state.anchor is None or (signal is None and not self.late):
            state.assumed = None
            return NOTHING_HELD
        if self.late:
            state.assumed = signal = state.assumed if signal is None else signal
        if signal is None:
            return UNKNOWN
        state.accumulated_rel_l1_distance += abs(self.rescale(signal))
        return HELD if state.accumulated_rel_l1_distance < self.threshold else CHANGED
