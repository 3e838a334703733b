"""A scheduler as a linear map from outputs to latents, found by running it: no scheduler's formula is written here.

Under a deterministic scheduler every latent is a linear combination of the start and the outputs so far. Running a copy
of the scheduler on unit vectors gives the coefficients of the outputs.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from ..grid import Grid
from .kernel import Array


def response_of(scheduler: Any, grid: Grid) -> Array | None:
    """Row i: how much of each output is in the latent before step i; None for a scheduler that is not linear.

    Asked when the timesteps are set and no step is made; of a scheduler in the middle of a generation nothing is
    learnt. Steps before the grid's first do not run: the latent starts there.
    """
    if getattr(scheduler, "step_index", None) is not None:
        return None
    try:
        with torch.random.fork_rng(devices=[]):
            return _asked(scheduler, grid)
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None


def _asked(scheduler: Any, grid: Grid) -> Array | None:
    symbolic = _run(scheduler, grid, torch.eye(grid.count + 1, dtype=torch.float64))
    numbers = torch.randn(3, grid.count + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    actual = _run(scheduler, grid, numbers.T.contiguous())
    linear = torch.allclose(symbolic @ numbers.T, actual, rtol=1e-3, atol=1e-3)
    return symbolic[:, 1:].numpy() if linear else None


def _run(scheduler: Any, grid: Grid, basis: torch.Tensor) -> torch.Tensor:
    """Every latent of one generation whose start and outputs are the rows of `basis`."""
    runner = _unstarted(scheduler)
    latents = [basis[0]] * (grid.first + 1)
    for step in range(grid.first, grid.count):
        output, latent = _shaped(basis[1 + step]), _shaped(latents[-1])
        stepped = runner.step(output, runner.timesteps[step], latent, return_dict=False)[0]
        latents.append(stepped.double().flatten())
    return torch.stack(latents)


def _shaped(vector: torch.Tensor) -> torch.Tensor:
    """A vector as a picture, which is what schedulers expect."""
    return vector.reshape(1, -1, 1, 1)


def _unstarted(scheduler: Any) -> Any:
    """A copy at its first step, on the CPU."""
    runner = copy.deepcopy(scheduler)
    for name, value in vars(runner).items():
        if isinstance(value, torch.Tensor):
            setattr(runner, name, value.cpu())
    return runner


def euler(noise: Array, first: int = 0) -> Array:
    """The response of Euler steps along these noise levels to 0, where no scheduler can be asked."""
    steps = len(noise)
    moves = np.diff(np.append(noise, 0.0))
    response = np.zeros((steps + 1, steps))
    for step in range(first + 1, steps + 1):
        response[step, first:step] = moves[first:step]
    return response
