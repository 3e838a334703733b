"""All that is remembered between the first step and the last, and not longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..grid import Grid
from ..policies.base import Policy
from ..predictors import Hold, Predictor
from ..stats import GenerationStats, StepRecord
from .branches import Branches
from .method import Method
from .packing import AS_IS, Packing
from .residuals import Held
from .seen import SeenSignal
from .signals import PlannedChanges
from .unit import Unit


@dataclass
class Track:
    """One branch of one transformer: its policy's state and the last computed residuals."""

    policy: Policy
    state: Any
    predictor: Predictor = field(default_factory=Hold)
    packing: Packing = AS_IS
    fits: Any = None
    signal: SeenSignal | None = None
    seen: int | None = None
    anchors: list[int] = field(default_factory=list)
    residuals: list[Held] = field(default_factory=list)

    def refit(self, fits: Any) -> bool:
        """Forget what was held for inputs of another kind; says whether there was any."""
        changed = self.fits is not None and self.fits != fits
        if changed:
            self.forget()
        self.fits = fits
        return changed

    def forget(self) -> None:
        """What was held does not fit any more."""
        self.anchors.clear()
        self.residuals.clear()
        self.signal = None
        self.state.anchor = None

    def restart(self, step: int) -> None:
        """A step was computed that the policy meant to hold."""
        self.state = self.policy.start()
        self.state.anchor = step

    def store(self, step: int, held: Held) -> None:
        """Remember a computed step, and no more steps than the predictor needs; none that went another way."""
        if self.residuals and not held.like(self.residuals[-1]):
            self.anchors.clear()
            self.residuals.clear()
        self.anchors.append(step)
        self.residuals.append(held if self.packing is AS_IS else held.mapped(self.packing.pack))
        depth = self.predictor.depth
        del self.anchors[:-depth], self.residuals[:-depth]

    def predicted(self, step: int) -> Held:
        """What the blocks would add at a held step."""
        if not self.residuals:
            raise RuntimeError("The policy holds a step before any was computed.")
        *others, last = (
            self.residuals if self.packing is AS_IS else [held.mapped(self.packing.unpack) for held in self.residuals]
        )
        held: Held = last.weighted(others, self.predictor.weights(step, self.anchors))
        return held

    @property
    def nbytes(self) -> int:
        signal = 0 if self.signal is None else self.signal.nbytes
        return signal + sum(residuals.nbytes for residuals in self.residuals)


class Generation:
    """One run of the denoising loop."""

    def __init__(self, method: Method) -> None:
        self.method = method
        self.stats = GenerationStats(method.name, method.config.as_dict())
        self.step = -1
        self._open = True
        self._grids: dict[Unit, Grid] = {}
        self._planned: dict[Unit, PlannedChanges | None] = {}
        self._branches: dict[Unit, Branches] = {}
        self._tracks: dict[tuple[Unit, str], Track] = {}

    def branches(self, unit: Unit) -> Branches:
        """The branches of one transformer."""
        if unit not in self._branches:
            self._branches[unit] = Branches(unit.groups.branch)
        return self._branches[unit]

    def settle_grid(self, unit: Unit, whole: Callable[[], Grid], pipeline: Any) -> None:
        """Settle at its first forward which steps one transformer handles, of those that `whole` says."""
        if unit not in self._grids:
            grid = whole()
            if grid.bounded and self.stats.steps is None:
                self.stats.steps = grid.length
            self._grids[unit] = unit.family.range_of(pipeline, unit.module, grid)

    def grid_of(self, unit: Unit) -> Grid:
        """The steps one transformer handles."""
        return self._grids[unit]

    def planned(self, unit: Unit, plan: Callable[[], PlannedChanges | None]) -> PlannedChanges | None:
        """What `plan` found at this transformer's first forward."""
        if unit not in self._planned:
            self._planned[unit] = plan()
        return self._planned[unit]

    def track(self, unit: Unit, branch: str) -> Track:
        """One branch of one transformer."""
        track = self._tracks.get((unit, branch))
        if track is None:
            grid = self._grids[unit]
            policy, predictor = self.method.policy(unit, branch, grid), self.method.predictor(unit, branch, grid)
            track = self._tracks[unit, branch] = Track(policy, policy.start(), predictor, self.method.packing)
        return track

    def note(self, record: StepRecord, unit: Unit) -> None:
        """A forward has returned."""
        self.stats.visits.append(record)
        if record.step >= self._grids[unit].count - 1:
            self.stats.finished = True

    def drop(self) -> None:
        """Let go of every tensor."""
        self._tracks.clear()
        self._branches.clear()
        self._planned.clear()

    def close(self) -> bool:
        """End the generation; says whether it had begun and was still open."""
        self.drop()
        was_open, self._open = self._open, False
        return was_open and bool(self.stats.visits)

    @property
    def nbytes(self) -> int:
        return sum(track.nbytes for track in self._tracks.values())
