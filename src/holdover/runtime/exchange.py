"""The few numbers that ranks exchange, so that those which meet inside the blocks decide alike.

Every rank of a group enters each of these at the same forward, whatever it would decide by itself: the numbers decide,
and they are the same on all ranks.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from .ranks import Groups
from .replay import ReplayReport
from .signals import magnitude, relative_change

NOBODY_KNOWS = math.nan  # a change that makes every policy compute


def change_over(groups: Groups, signal: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """How much a signal has changed, over all ranks that must decide alike; NaN where one has nothing to compare with.

    Ranks of the sequence group have a part of one signal each: their sums are added, and a longer part counts for more.
    Those of the other groups have a signal each: the one that has changed most decides. Nothing is read here.
    """
    fits = before is not None and before.shape == signal.shape
    change = _of_parts(groups, signal, before if fits else None)
    for group in (groups.tensor, groups.shards):
        if group is not None:
            dist.all_reduce(change, dist.ReduceOp.MAX, group)
    return torch.where(change.isfinite(), change, NOBODY_KNOWS)


def _of_parts(groups: Groups, signal: torch.Tensor, before: torch.Tensor | None) -> torch.Tensor:
    """The relative change of the whole signal; infinite where it is not known, as no NaN survives a maximum."""
    if groups.sequence is not None:
        unknown = torch.full((2,), math.nan, device=signal.device)
        sums = unknown if before is None else torch.stack([magnitude(signal - before), magnitude(before)]).float()
        dist.all_reduce(sums, dist.ReduceOp.SUM, groups.sequence)
        change = sums[0] / sums[1]
    elif before is not None:
        change = relative_change(signal, before).float()
    else:
        change = torch.tensor(math.inf, device=signal.device)
    return change.nan_to_num(nan=math.inf, posinf=math.inf)


def largest(groups: Groups, value: torch.Tensor) -> torch.Tensor:
    """The largest of one number over all ranks of the request, left on the device; a NaN counts as infinite."""
    if groups.every:
        value = value.float().nan_to_num(nan=math.inf, posinf=math.inf)
    for group in groups.every:
        dist.all_reduce(value, dist.ReduceOp.MAX, group)
    return value


def worst(groups: Groups, value: float) -> float:
    """The largest of one number over the ranks that run the same blocks."""
    for group in groups.in_step:
        value = max(_gathered(value, group))
    return value


def everywhere(groups: Groups, holds: bool) -> bool:
    """Whether something holds on every rank that runs the same blocks."""
    return worst(groups, 0.0 if holds else 1.0) == 0.0


def known_to_all(groups: Groups, known: bool) -> bool:
    """Whether no rank that shares the weights has yet to trace or check this kind of forward.

    Ranks of one request are given the same arguments and know the same; those that share weights may have others.
    """
    return known if groups.shards is None else all(_gathered(known, groups.shards))


def agreed(groups: Groups, report: ReplayReport) -> ReplayReport:
    """The report with the largest error of any rank in it: all refuse, or none."""
    return report.with_other_ranks(worst(groups, report.max_error)) if groups.in_step else report


def _gathered(value: float, group: dist.ProcessGroup) -> list[float]:
    values = [value] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group)
    return values
