"""How much has a signal changed? Read off a tensor at each step, or known for all steps before the first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..grid import Grid
from ..models.inputs import gather_weights
from ..models.registry import TimeSignal
from .clock import noisiest
from .unit import Unit


def relative_change(signal: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mean absolute change over the mean absolute value."""
    return magnitude(signal - before) / magnitude(before)


def magnitude(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of absolute values, in one kernel and with the digits of float32 at least."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    total: torch.Tensor = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    return total


@dataclass(frozen=True)
class PlannedChanges:
    """The changes of a signal that depends on the timestep alone."""

    changes: tuple[float, ...]

    def since(self, seen: int | None, step: int) -> float | None:
        """The change between the step a branch last ran at and this one."""
        return None if seen is None else sum(self.changes[seen + 1 : step + 1])


def plan_changes(unit: Unit, signal: TimeSignal, grid: Grid, step: int, timestep: Any) -> PlannedChanges | None:
    """All changes of a timestep-only signal, read once; None where the timesteps to come are not known.

    The pipeline may scale its timesteps before the model sees them: the first one tells how.
    """
    value = noisiest(timestep, unit.family.time_runs_up)
    if value is None or not grid.noise or not isinstance(timestep, torch.Tensor):
        return None
    scale = _scale(value, grid.noise[step])
    if scale is None:
        return None
    times = torch.tensor(grid.noise, dtype=torch.float32) * scale
    with gather_weights(unit.core):
        rows = signal(unit.core, times.to(_device(unit, timestep), timestep.dtype)).flatten(1)
    changes = (rows[1:] - rows[:-1]).abs().mean(1) / rows[:-1].abs().mean(1)
    return PlannedChanges((0.0, *(float(c) for c in changes.float().tolist())))


def _scale(value: float, noise: float) -> float | None:
    """1 where the model is given noise levels, 1000 where it is given training timesteps."""
    return next((s for s in (1.0, 1000.0) if noise > 0 and abs(value / s - noise) <= 0.01 * noise), None)


def time_signal(unit: Unit, signal: TimeSignal, timestep: Any) -> torch.Tensor | None:
    """A timestep-only signal at one step, where the steps to come are not known."""
    value = noisiest(timestep, unit.family.time_runs_up)
    if value is None or not isinstance(timestep, torch.Tensor):
        return None
    with gather_weights(unit.core):
        return signal(unit.core, torch.tensor([value], device=_device(unit, timestep), dtype=timestep.dtype))


def _device(unit: Unit, timestep: torch.Tensor) -> torch.device:
    """Where the embedder's weights are at the moment: an offloaded model's are not where its inputs are."""
    device = unit.device
    return timestep.device if device is None or device.type == "meta" else device
