"""CPU seconds of every row of the main table: one prompt on one thread, because the machine of the table was shared.

Rows are made again from their settings, with the shipped profile of the model where they need one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch

from holdover.selector import BACKENDS

from ..report import cpu_model
from .bench import Bench, Method, Sampling, Scale, cached, diffusers_cache, fewer, sea_cache_of_diffusers, uncached
from .verdict import rows_of

REPEATS = 2


def add_seconds(figures: dict[str, Any], write: Callable[[], None]) -> None:
    """Write `cpu_seconds` into the rows of the main table that lack them, and the time of an uncached image."""
    torch.set_num_threads(1)
    model, sampling = figures["scale"].get("model", "emoji"), Sampling(figures["scale"]["steps"])
    known: dict[str, float] = {}
    with TemporaryDirectory() as shared:
        bench = Bench(Scale(model=model), "cpu", Path(shared))
        if "timing" not in figures:
            figures["timing"] = {"uncached": _seconds(bench, uncached(), sampling), "processor": cpu_model()}
        for row in rows_of(figures, sampling.steps):
            if "cpu_seconds" in row or "kind" not in row:
                continue
            method = remake(row, model)
            if method.key not in known:
                known[method.key] = _seconds(bench, method, sampling)
                print(f"{method.title}, {row['wanted']}: {known[method.key]:.2f} s", file=sys.stderr, flush=True)
            row["cpu_seconds"] = known[method.key]
            write()


def remake(row: dict[str, Any], profile: str) -> Method:
    """The method of a row."""
    title, kind, settings = row["method"], row["kind"], dict(row["settings"])
    if kind in BACKENDS and kind != "none":
        if kind in ("tea_cache", "mag_cache") or settings.get("profile", "none") != "none":
            settings["profile"] = profile
        return cached(title, kind, **settings)
    if kind == diffusers.SeaCacheConfig.__name__:  # which needs more than its config
        return sea_cache_of_diffusers(**settings)
    if kind != "none":
        return diffusers_cache(title, getattr(diffusers, kind), **settings)
    return fewer(settings["steps"], 2 if title.endswith("second order") else 1)


def _seconds(bench: Bench, method: Method, sampling: Sampling) -> float:
    """The least processor time of one image; the first generation, which sets up, does not count."""
    found = []
    with method.around(bench.pipe):
        for _ in range(REPEATS + 1):
            begin = time.process_time()
            bench.generate_batch(bench.prompts[:1], 0, sampling, method.steps)
            found.append(time.process_time() - begin)
    return round(min(found[1:]), 3)
