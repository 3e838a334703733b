"""Does a held step replay a computed one? Same input, same output, or the model is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..models.arguments import tensors_in
from ..models.cut import Cut
from .parallel import Groups, largest


@dataclass(frozen=True)
class ReplayReport:
    """A full forward and a forced hold on the same inputs, compared.

    `merged` says that one residual is held per stream. `unread` names streams that nothing reads after the blocks, so
    that they are not held.
    """

    model: str
    cut: Cut | str
    merged: bool
    outputs: tuple[float, ...]
    streams: tuple[tuple[str, float], ...]
    tolerance: float
    unread: tuple[str, ...] = ()

    @property
    def max_error(self) -> float:
        """The largest difference, relative to the largest value of that output or stream."""
        return max((*self.outputs, *(error for _, error in self.streams)), default=0.0)

    @property
    def ok(self) -> bool:
        """Whether the hold equals the forward up to the rounding of its dtype."""
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "replays" if self.ok else "does not replay"
        lines = [f"{self.model} {verdict}: largest relative error {self.max_error:.1e} (allowed {self.tolerance:.0e})"]
        lines.append(f"  stack: {self.cut}{', one residual per stream' if self.merged else ''}")
        if self.unread:
            lines.append(f"  not held, because nothing reads it after the blocks: {', '.join(self.unread)}")
        lines += [f"  output {i}: {error:.1e}" for i, error in enumerate(self.outputs)]
        lines += [f"  stream {name}: {error:.1e}" for name, error in self.streams]
        return "\n".join(lines)


def compare_replay(
    model: str,
    groups: Groups,
    computed: tuple[Any, Mapping[int, torch.Tensor]],
    held: tuple[Any, Mapping[int, torch.Tensor]],
    cut: Cut | str,
    merged: bool = False,
) -> ReplayReport:
    """Compare outputs and streams of a computed and a held forward; ranks that run the same blocks agree."""
    (output, streams), (held_output, held_streams) = computed, held
    before, after = list(tensors_in(_as_plain(output))), list(tensors_in(_as_plain(held_output)))
    names = {} if isinstance(cut, str) else cut.group_names
    errors = tuple(
        (names.get(group, str(group)), relative_error(streams[group], held_streams[group]))
        for group in streams.keys() & held_streams.keys()
    )
    # Adding a residual back rounds once: a few units in the last place, and 1e-3 where there are many digits.
    dtypes = [t.dtype for t in (*before, *streams.values()) if t.is_floating_point()]
    tolerance = max([1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])
    outputs = tuple(relative_error(a, b) for a, b in zip(before, after, strict=True))
    report = ReplayReport(model, cut, merged, outputs, errors, tolerance)
    worst = largest(groups, report.max_error)
    if worst > report.max_error:
        report = replace(report, streams=(*report.streams, ("on another rank", worst)))
    return report


def relative_error(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference over the largest absolute value; equal NaNs are equal."""
    if reference.shape != other.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = reference.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    scale = a.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.max() / scale)


def equal_outputs(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, bit for bit."""
    pairs = list(zip(tensors_in([one]), tensors_in([other]), strict=True))
    return all(a.dtype == b.dtype and relative_error(a, b) == 0.0 for a, b in pairs)


def _as_plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output
