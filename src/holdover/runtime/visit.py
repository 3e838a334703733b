"""One branch at one step: the policy's decision, asked for by the seam, and what the seam computed, kept."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ..models.inputs import describe_structure, describe_tensors
from ..policies.base import NOTHING_HELD, Decision
from .calls import Call, Outcome
from .generation import Generation
from .method import Computed
from .seam import OTHER_PATH
from .seen import SeenSignal
from .signals import PlannedChanges, plan_changes, time_signal
from .unit import Unit

OTHER_INPUTS = Decision(True, "the inputs have another shape, dtype or device")


class Visit:
    """One forward of one branch on its way across the seam."""

    def __init__(
        self, generation: Generation, unit: Unit, branch: str, step: int, arguments: Mapping[str, Any]
    ) -> None:
        self._generation, self._unit, self._branch, self._step = generation, unit, branch, step
        self._method = generation.method
        self._timestep = unit.arguments.get_timestep(arguments)
        self._kind = describe_structure(arguments)
        self.track = generation.track(unit, branch)
        self._misfit = self.track.refit((self._kind, describe_tensors(arguments)))
        self._signal = self._method.signal(unit) if self.track.policy.needs_signal else None
        self._planned = self._plan()
        self._late = self._method.reads_late and self._planned is None
        self._change: float | None = None

    def _plan(self) -> PlannedChanges | None:
        """The changes of a timestep-only signal for the whole generation; made before its first step."""
        of_time = None if self._signal is None else self._signal.of_time
        if of_time is None:
            return None
        unit, grid, step, timestep = self._unit, self._generation.grid_of(self._unit), self._step, self._timestep
        return self._generation.planned(unit, lambda: plan_changes(unit, of_time, grid, step, timestep))

    def call(self, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Call:
        """The forward, with the questions the seam may ask about it."""
        at_head = self._signal.of_block if self._signal is not None and self._planned is None else None
        passes = self._method.passes(self._unit)
        see = self.see if self._late else None
        return Call(plain, args, kwargs, self._kind, at_head, self.decide, passes, self._step, self.track, see)

    def decide(self, read: torch.Tensor | None) -> Decision:
        """Ask the policy, once the signal is there if it needs one."""
        if self.track.policy.needs_signal:
            self._change = self._signal_change(read)
        decision = self.track.policy.decide(self._step, self._change, self.track.state)
        return OTHER_INPUTS if self._misfit and decision is NOTHING_HELD else decision

    def _signal_change(self, read: torch.Tensor | None) -> float | None:
        """How much the signal has changed since this branch's last step: planned, or the one scalar that is read."""
        if self._planned is not None:
            return self._planned.since(self.track.seen, self._step)
        if read is None and self._signal is not None and self._signal.of_time is not None:
            read = time_signal(self._unit, self._signal.of_time, self._timestep)
        known = self._known_change() if self._late else None
        if read is not None:
            self.see(read)
        return known if self._late or read is None or self.track.signal is None else self.track.signal.change()

    def _known_change(self) -> float | None:
        """The change at the step before, where that was computed: its blocks still run while this is read."""
        seen = self.track.signal
        return seen.change() if seen is not None and self.track.state.anchor == self.track.seen else None

    def see(self, signal: torch.Tensor) -> None:
        """Keep the signal of this step, and ask for its change."""
        self.track.signal = SeenSignal(signal, self.track.signal, self._unit.groups)

    def settle(self, outcome: Outcome) -> None:
        """Keep what was computed, and let go of what no later step needs."""
        track, generation, grid = self.track, self._generation, self._generation.grid_of(self._unit)
        track.seen = self._step
        if outcome.decision is OTHER_PATH:
            track.restart(self._step)
        if outcome.held is not None:
            track.store(self._step, outcome.held)
            generation.stats.peak_bytes = max(generation.stats.peak_bytes, generation.nbytes)
            if self._method.observes:
                main = outcome.held.main
                self._method.observe(
                    Computed(self._unit, self._branch, self._step, grid, self._change, main, outcome.output)
                )
        if self._step >= grid.last:
            track.forget()
