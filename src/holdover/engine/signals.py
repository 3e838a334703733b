"""How much a signal has changed since the last step: read from a tensor, or known for all steps before the first."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from ..grid import Grid
from ..models.inputs import gather_weights
from ..models.registry import TimeSignal
from .clock import noisiest
from .parallel import SINGLE_PROCESS, Groups

if TYPE_CHECKING:
    from .install import CachedTransformer


def relative_change(signal: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """Mean absolute change over the mean absolute value."""
    return absolute_sum(signal - before) / absolute_sum(before)


def absolute_sum(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of absolute values, in one kernel and at least in float32."""
    dtype = torch.promote_types(tensor.dtype, torch.float32)
    total: torch.Tensor = torch.linalg.vector_norm(tensor, 1, dtype=dtype)
    return total


def change_across_ranks(groups: Groups, signal: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The relative change over all ranks that must decide alike; NaN, which makes a policy compute, where unknown.

    Ranks of the sequence group have a part of one signal each: their sums are added, so a longer part counts for more.
    Ranks of the other groups have a whole signal each: the largest change decides. Nothing is read on the host.
    """
    if before is not None and before.shape != signal.shape:
        before = None
    if groups.sequence is not None:
        unknown = torch.full((2,), math.nan, device=signal.device)
        sums = unknown if before is None else torch.stack([absolute_sum(signal - before), absolute_sum(before)]).float()
        dist.all_reduce(sums, dist.ReduceOp.SUM, groups.sequence)
        change = sums[0] / sums[1]
    elif before is not None:
        change = relative_change(signal, before).float()
    else:
        change = torch.tensor(math.inf, device=signal.device)
    change = change.nan_to_num(nan=math.inf, posinf=math.inf)  # a maximum does not keep NaN
    for group in (groups.tensor, groups.shards):
        if group is not None:
            dist.all_reduce(change, dist.ReduceOp.MAX, group)
    return torch.where(change.isfinite(), change, math.nan)


class AsyncCopy:
    """A copy of a device tensor on the host, made asynchronously."""

    def __init__(self, value: torch.Tensor) -> None:
        if value.device.type == "cuda":
            self._host = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
            self._host.copy_(value, non_blocking=True)
            self._copied: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(value.device))
        else:
            self._host, self._copied = value.clone(), None

    @property
    def ready(self) -> bool:
        """Whether reading it now does not wait."""
        return self._copied is None or bool(self._copied.query())

    def wait(self) -> torch.Tensor:
        """The copy, when it is done."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


class AsyncScalar(AsyncCopy):
    """One value of a device tensor, copied to the host asynchronously."""

    def read(self) -> float:
        """The value; waits for the copy if it is not done."""
        return float(self.wait())


class SignalReading:
    """The signal of a branch at one step, and its change since the step before, on its way to the host."""

    def __init__(self, value: torch.Tensor, before: SignalReading | None, groups: Groups = SINGLE_PROCESS) -> None:
        self.value = value
        self._change: AsyncScalar | None = None
        if groups.synchronized:  # an exchange all ranks enter, whether they have something to compare or not
            change = change_across_ranks(groups, value, None if before is None else before.value)
            self._change = None if before is None else AsyncScalar(change)
        elif before is not None:
            self._change = AsyncScalar(absolute_sum(value - before.value) / before._magnitude)
        self._magnitude: torch.Tensor = absolute_sum(value)  # for the next step, while the change is on its way

    def change(self) -> float | None:
        """The change since the step before; None where there was none."""
        return None if self._change is None else self._change.read()

    @property
    def nbytes(self) -> int:
        return self.value.nbytes


def compute_changes(
    transformer: CachedTransformer, signal: TimeSignal, grid: Grid, step: int, timestep: Any
) -> tuple[float, ...] | None:
    """The change of a timestep-only signal at every step, read once; None where the later timesteps are not known.

    A pipeline may scale its timesteps before the model sees them: the first timestep shows by how much.
    """
    value = noisiest(timestep, transformer.family.time_runs_up)
    if value is None or not grid.noise or not isinstance(timestep, torch.Tensor):
        return None
    noise = grid.noise[step]
    scale = next((s for s in (1.0, 1000.0) if noise > 0 and abs(value / s - noise) <= 0.01 * noise), None)
    if scale is None:
        return None
    times = torch.tensor(grid.noise, dtype=torch.float32) * scale
    with gather_weights(transformer.core):
        rows = signal(transformer.core, times.to(_embedder_device(transformer, timestep), timestep.dtype)).flatten(1)
    changes = (rows[1:] - rows[:-1]).abs().mean(1) / rows[:-1].abs().mean(1)
    return (0.0, *(float(c) for c in changes.float().tolist()))


def read_time_signal(transformer: CachedTransformer, signal: TimeSignal, timestep: Any) -> torch.Tensor | None:
    """A timestep-only signal at one step, where the later timesteps are not known."""
    value = noisiest(timestep, transformer.family.time_runs_up)
    if value is None or not isinstance(timestep, torch.Tensor):
        return None
    device = _embedder_device(transformer, timestep)
    with gather_weights(transformer.core):
        return signal(transformer.core, torch.tensor([value], device=device, dtype=timestep.dtype))


def _embedder_device(transformer: CachedTransformer, timestep: torch.Tensor) -> torch.device:
    """The current device of the weights: those of an offloaded model are not where its inputs are."""
    parameter = next(transformer.core.parameters(), None)
    return timestep.device if parameter is None or parameter.device.type == "meta" else parameter.device


@contextlib.contextmanager
def onloaded(block: nn.Module) -> Iterator[None]:
    """Bring a block's offloaded or sharded weights to the device while its signal is read."""
    registry = getattr(block, "_diffusers_hook", None)
    hook = registry.get_hook("group_offloading") if registry is not None else None
    hook = hook or getattr(block, "_hf_hook", None)  # diffusers' hook, or accelerate's
    if hook is None:
        with gather_weights(block):
            yield
        return
    hook.pre_forward(block)
    try:
        yield
    finally:
        hook.post_forward(block, None)
        group = getattr(hook, "group", None)
        if group is not None and group.offload_leader is not block:
            group.offload_()  # the last block of the group would do that, and on a held step it does not run
