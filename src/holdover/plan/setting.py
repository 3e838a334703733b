"""The kind of generation a plan is for, as it shows before its first step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from ..grid import Grid
from ..runtime.identity import adapters
from ..runtime.unit import Unit
from .kernel import Array
from .response import euler, response_of
from .rollout import Ranges


@dataclass(frozen=True, eq=False)
class Setting:
    """A grid, the steps of it that run, and where the scheduler takes the latents.

    `ranges` has one entry, or one for each of two experts.
    """

    noise: Array
    ranges: Ranges
    response: Array
    scheduler: str = ""
    guidance: float | None = None
    adapters: tuple[str, ...] = ()

    @property
    def length(self) -> int:
        """How many steps run."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def last(self) -> int:
        """The last step that runs."""
        return self.ranges[-1][1]


def setting_of(pipeline: Any, units: Sequence[Unit], grid: Grid) -> Setting:
    """Asked at the first forward, when the scheduler is set and has not stepped yet."""
    scheduler = getattr(pipeline, "scheduler", None)
    whole = grid.between(grid.first, grid.count - 1)
    noise = np.array(grid.noise) if grid.noise else np.linspace(1.0, 1.0 / grid.count, grid.count)
    response = None if scheduler is None else response_of(scheduler, whole)
    guidance: Any = getattr(pipeline, "guidance_scale", None)
    return Setting(
        noise,
        ranges_of(pipeline, units, whole),
        euler(noise, whole.first) if response is None else response,
        "" if scheduler is None else type(scheduler).__name__,
        float(guidance) if isinstance(guidance, (int, float)) else None,
        tuple(adapter for unit in units for adapter in adapters(unit.core)),
    )


def key_of(pipeline: Any, units: Sequence[Unit], grid: Grid) -> Any:
    """What tells kinds of generation apart, without asking the scheduler to run."""
    scheduler = getattr(pipeline, "scheduler", None)
    config, guidance = str(getattr(scheduler, "config", None)), getattr(pipeline, "guidance_scale", None)
    attached = tuple(adapter for unit in units for adapter in adapters(unit.core))
    return grid.count, grid.noise, grid.first, type(scheduler), config, str(guidance), attached


def ranges_of(pipeline: Any, units: Sequence[Unit], whole: Grid) -> Ranges:
    """The steps of each expert; one range where there is one transformer, or both run at every step."""
    grids = [unit.family.range_of(pipeline, unit.module, whole) for unit in units]
    ranges = sorted({(g.first, g.last) for g in grids})
    apart = all(a[1] < b[0] for a, b in pairwise(ranges))
    return tuple(ranges) if apart and ranges else ((whole.first, whole.last),)
