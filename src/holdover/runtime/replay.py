"""Does a held step replay a computed one? Same input, same output, or the model is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models.graph import Stack
from ..models.inputs import iter_tensors


@dataclass(frozen=True)
class ReplayReport:
    """One full forward and one forced hold on the same inputs, compared; and what the check found a held step can do
    without: children that it need not run, streams that nobody reads after the blocks.
    """

    model: str
    cut: Stack | str
    lumped: bool
    outputs: tuple[float, ...]
    streams: tuple[tuple[str, float], ...]
    tolerance: float
    left_out: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest difference, relative to the largest value of that output or stream."""
        return max((*self.outputs, *(error for _, error in self.streams)), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether the hold is the same as the forward, up to the rounding of its dtype."""
        return self.max_error <= self.tolerance

    def with_other_ranks(self, error: float) -> ReplayReport:
        """The report with the largest error any rank has found."""
        if error <= self.max_error:
            return self
        return replace(self, streams=(*self.streams, ("on another rank", error)))

    def __str__(self) -> str:
        verdict = "replays" if self.ok else "does not replay"
        lines = [f"{self.model} {verdict}: largest relative error {self.max_error:.1e} (allowed {self.tolerance:.0e})"]
        lumped = ", held as one a stream" if self.lumped else ""
        lines.append(f"  cut: {self.cut}{lumped}")
        if self.left_out:
            lines.append(f"  not run at a held step: {', '.join(self.left_out)}")
        if self.unread:
            lines.append(f"  not held, for nobody reads it after the blocks: {', '.join(self.unread)}")
        lines += [f"  output {i}: {error:.1e}" for i, error in enumerate(self.outputs)]
        lines += [f"  stream {name}: {error:.1e}" for name, error in self.streams]
        return "\n".join(lines)


def compare(
    model: str,
    computed: tuple[Any, Mapping[int, torch.Tensor]],
    held: tuple[Any, Mapping[int, torch.Tensor]],
    cut: Stack | str,
    lumped: bool = False,
) -> ReplayReport:
    """Compare output and streams of a computed and a held forward."""
    (output, streams), (held_output, held_streams) = computed, held
    before, after = list(iter_tensors(_plain(output))), list(iter_tensors(_plain(held_output)))
    names = {} if isinstance(cut, str) else cut.group_names
    errors = tuple(
        (names.get(group, str(group)), relative_error(streams[group], held_streams[group]))
        for group in streams.keys() & held_streams.keys()
    )
    dtypes = [t.dtype for t in (*before, *streams.values()) if t.is_floating_point()]
    outputs = tuple(relative_error(a, b) for a, b in zip(before, after, strict=True))
    return ReplayReport(model, cut, lumped, outputs, errors, _tolerance(dtypes))


def relative_error(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference over the largest absolute value; equal NaNs are equal."""
    if reference.shape != other.shape:
        return float("inf")
    a, b = reference.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    scale = a.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.max() / scale) if a.numel() else 0.0


def _tolerance(dtypes: list[torch.dtype]) -> float:
    """Adding a residual back rounds once: a few units in the last place, and 1e-3 where there are many digits."""
    return max([1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])


def _plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
