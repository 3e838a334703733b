"""The model in the box: CUDA graphs where launches dominate, and a plan on a processor."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch

import holdover

from ..first_image import turn
from .measure import first_line
from .methods import MAG
from .results import Results

STEPS = 50
WARM = 12
PROMPT = "red apple, glossy 3d style"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "no cache": ("", {}),
    "plan, K = 10 of 50": ("plan", {"budget": 10, "guard": False}),
    "mag_cache 0.24/5/0.1": ("mag_cache", MAG),
}


def graphs(results: Results, tiny: bool = False, repeats: int = 5) -> None:
    """Eager, compiled, and compiled with CUDA graphs, one picture at a time; a tiny run only traces."""
    device = "cpu" if tiny else "cuda"
    modes: dict[str, dict[str, Any]] = {"eager": {}, "compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    for mode, how in modes.items():
        if not results.lacking(_identity(device, mode, label) for label in METHODS):
            continue
        results.check_time(0 if mode == "eager" or tiny else 60)
        pipe = _loaded(device)
        if mode != "eager":
            pipe.transformer = torch.compile(pipe.transformer, **(how | ({"backend": "eager"} if tiny else {})))
        seconds: dict[str, float] = {}
        for label, method in METHODS.items():
            row = _row(pipe, method, *((1, WARM) if tiny else (repeats, STEPS)))
            seconds |= {label: row["wall_s"]} if "wall_s" in row else {}
            results.add(_identity(device, mode, label) | row | _speedup(row, seconds))


def on_the_processor(results: Results, repeats: int = 2) -> None:
    """The same without a card, with one thread and with two, and how long a first picture takes.

    What is compared takes turns, and the least speed-up of the turns counts: other work on the machine only adds time.
    """
    for threads in (1, 2):
        torch.set_num_threads(threads)
        mode, pipe = f"threads: {threads}", _loaded("cpu")
        plain, planned = list(METHODS)[:2]
        turns = [{label: _row(pipe, METHODS[label], 1, STEPS) for label in (plain, planned)} for _ in range(repeats)]
        for label in (plain, planned):
            least = min((each[label] for each in turns), key=lambda row: float(row.get("wall_s", 0)))
            speedups = [_speedup(each[label], {plain: each[plain].get("wall_s", 0.0)}) for each in turns]
            results.add(_identity("cpu", mode, label) | least | min(speedups, key=lambda s: float(s.get("speedup", 0))))
        results.add(_identity("cpu", mode, "first picture") | {"first_image_s": turn(threads)})


def _identity(device: str, mode: str, label: str) -> dict[str, Any]:
    by = "" if label in ("no cache", "first picture") else "holdover"
    return {
        "section": "box",
        "model": "emoji",
        "shape": device,
        "batch": 1,
        "steps": STEPS,
        "mode": mode,
        "by": by,
        "label": label,
    }


def _loaded(device: str) -> Any:
    pipe: Any = holdover.load("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _row(pipe: Any, method: tuple[str, dict[str, Any]], repeats: int, steps: int) -> dict[str, Any]:
    try:
        with _on(pipe, *method) as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            walls = list(_walls(pipe, repeats, steps))
            last = None if cache is None else cache.stats().last
            counts = {} if last is None else {"computed": last.computed_total, "held": last.held_total}
            return {"wall_s": median(walls), **counts}
    except Exception as error:
        return {"raised": first_line(error)}


def _on(pipe: Any, method: str, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    return holdover.enable(pipe, method, **settings) if method else nullcontext()


def _walls(pipe: Any, repeats: int, steps: int) -> Iterator[float]:
    """Seconds of each picture after one of fewer steps that warms up."""
    for index in range(repeats + 1):
        begin = time.perf_counter()
        pipe(PROMPT, num_inference_steps=steps if index else WARM, generator=torch.Generator().manual_seed(0))
        if index:
            yield time.perf_counter() - begin


def _speedup(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    return {"speedup": seconds["no cache"] / row["wall_s"]} if "wall_s" in row and "no cache" in seconds else {}
