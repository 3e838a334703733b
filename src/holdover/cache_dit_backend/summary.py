"""A table of what was cached, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from ..errors import NotEnabledError
from ..runtime.backend import cache_of
from ..stats import GenerationStats, Stats


def cache_summary(pipeline: Any, details: bool = True) -> None:
    """Print what was computed and held on a pipeline; with `details`, also step by step and why."""
    cache = cache_of(pipeline)
    if cache is None:
        raise NotEnabledError(f"There is no holdover cache on this {type(pipeline).__name__}.")
    stats = cache.stats()
    console = Console()
    console.print(_table(stats, details))
    for note in stats.notes if details else ():
        console.print(note, highlight=False, soft_wrap=True)


def _table(stats: Stats, details: bool) -> Table:
    columns = ("branch", "computed", "held", *(("steps", "why") if details else ()))
    table = Table(*columns, title=f"{stats.method}: {stats.computed} computed, {stats.held} held", title_justify="left")
    if stats.last is not None:
        for branch in stats.last.branches:
            row = (branch, str(stats.last.computed[branch]), str(stats.last.held[branch]))
            table.add_row(*row, *((stats.last.trace(branch), _reasons(stats.last, branch)) if details else ()))
    return table


def _reasons(generation: GenerationStats, branch: str) -> str:
    counts: dict[str, int] = {}
    for visit in generation.of_branch(branch):
        counts[visit.reason] = counts.get(visit.reason, 0) + 1
    return "; ".join(f"{count} x {reason}" for reason, count in counts.items())
