"""The least a held step can cost on the device: what runs live whoever holds the rest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from .loop import Marks, Pipeline

STEPS = 8
LEAD_CYCLES = 400_000_000  # the device sleeps about 0.2 s, so that the host is ahead and no launch is waited for


def floors(pipe: Pipeline) -> dict[str, float]:
    """Milliseconds of a step that only steps, that runs no block, and that runs the first block of each list."""
    found = {"scheduler": _typical(pipe, forward=False)}
    for name, kept in (("no blocks", 0), ("first block", 1)):
        with shortened(pipe.transformer, kept):
            found[name] = _typical(pipe, forward=True)
    return found


@contextmanager
def shortened(transformer: nn.Module, kept: int) -> Iterator[None]:
    """Keep only the first blocks of each list for a while."""
    lists = {name: child for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    for name, blocks in lists.items():
        setattr(transformer, name, nn.ModuleList(list(blocks)[:kept]))
    try:
        yield
    finally:
        for name, blocks in lists.items():
            setattr(transformer, name, blocks)


@torch.no_grad()
def _typical(pipe: Pipeline, forward: bool) -> float:
    times: list[float] = []
    for _ in range(3):  # the first turn warms up
        times = _turn(pipe, forward)
    return median(times)


def _turn(pipe: Pipeline, forward: bool) -> list[float]:
    timesteps: Any = pipe.begin(STEPS)
    latent, marks = pipe.inputs.latent, Marks(STEPS, pipe.cuda)
    velocity: Tensor = torch.zeros_like(latent)
    marks.wait()
    if pipe.cuda:
        torch.cuda._sleep(LEAD_CYCLES)  # type: ignore[no-untyped-call]
    marks.mark()
    for t in timesteps:
        velocity = pipe.forward(latent, t) if forward else velocity
        marks.mark()
        latent = pipe.scheduler.step(velocity, t, latent, return_dict=False)[0]
        marks.mark()
    marks.wait()
    return marks.device()[0]
