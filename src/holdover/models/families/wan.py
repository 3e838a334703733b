"""Wan 2.1 and 2.2 and the models that keep Wan's timestep embedding."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ...grid import Grid
from ..family import Family, Signal
from ..wrapping import unwrapped


def embedding(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding e, in the precision of its embedder."""
    embedder = transformer.condition_embedder
    return _applied(embedder.time_embedder, embedder.timesteps_proj(timesteps))


def projection(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """Its projection e0: the modulation of every block."""
    embedder = transformer.condition_embedder
    return _applied(embedder.time_proj, embedder.act_fn(embedding(transformer, timesteps)))


def _applied(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """The module's output in its own precision; quantised weights choose theirs themselves."""
    dtype = next(module.parameters()).dtype
    output: torch.Tensor = module(values.to(dtype) if dtype.is_floating_point else values)
    return output


def expert_range(pipeline: Any, transformer: nn.Module, grid: Grid) -> Grid:
    """Wan 2.2: `transformer` handles the steps at or above the boundary, `transformer_2` those below it."""
    boundary = _boundary(pipeline)
    if boundary is None or not grid.noise:
        return grid
    low = unwrapped(transformer) is unwrapped(getattr(pipeline, "transformer_2", None))
    steps = [i for i in range(grid.first, grid.last + 1) if (grid.noise[i] < boundary) == low]
    return grid.between(steps[0], steps[-1]) if steps else grid


def _boundary(pipeline: Any) -> float | None:
    """The boundary the pipeline itself uses: of its config, or its own where it has no config."""
    config: Any = getattr(pipeline, "config", None)
    found: float | None = config.get("boundary_ratio") if isinstance(config, Mapping) else None
    return found if found is not None or pipeline is None else vars(pipeline).get("boundary_ratio")


SIGNALS = (Signal("e", of_time=embedding), Signal("e0", of_time=projection))

FAMILIES = (
    Family("Wan", ("WanTransformer3DModel",), signals=SIGNALS, range_of=expert_range),
    Family("Wan-VACE", ("WanVACETransformer3DModel",), signals=SIGNALS, head="blocks", range_of=expert_range),
    Family(
        "Wan-Animate, ChronoEdit, SkyReels-V2",
        ("WanAnimateTransformer3DModel", "ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel"),
        signals=SIGNALS,
    ),
)
