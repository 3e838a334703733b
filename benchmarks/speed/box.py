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
from holdover.plan.schedules import growing

from ..first_image import turn
from .measure import first_line
from .methods import MAG
from .results import Results

STEPS = 50
PROMPT = "red apple, glossy 3d style"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "no cache": ("", {}),
    "plan, K = 10 of 50": ("plan", {"schedule": growing(STEPS, 10), "predictor": "newton", "guard": False}),
    "mag_cache 0.24/5/0.1": ("mag_cache", MAG),
}


def graphs(results: Results, device: str = "cuda", repeats: int = 5) -> None:
    """Eager, compiled, and compiled with CUDA graphs, one picture at a time; without a card it only traces."""
    for mode, how in (("eager", None), ("compiled", {}), ("reduce-overhead", {"mode": "reduce-overhead"})):
        lacking = {label: method for label, method in METHODS.items() if results.needs(_identity(device, mode, label))}
        if not lacking:
            continue
        results.check_time(0 if how is None else 60)
        pipe: Any = _loaded(device)
        if how is not None:
            pipe.transformer = torch.compile(pipe.transformer, **(how if device == "cuda" else {"backend": "eager"}))
        seconds: dict[str, float] = {}
        for label, method in METHODS.items():
            row = _row(pipe, method, repeats)
            seconds |= {label: row["wall_s"]} if "wall_s" in row else {}
            results.add(_identity(device, mode, label) | row | _speedup(row, seconds))


def on_the_processor(results: Results, repeats: int = 3) -> None:
    """The same without a card, with one thread and with two, and how long a first picture takes."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        pipe = _loaded("cpu")
        labels = list(METHODS.items())[:2]
        turns = [{label: _row(pipe, method, 1) for label, method in labels} for _ in range(repeats)]
        seconds: dict[str, float] = {}
        for label, _ in labels:
            row = min((each[label] for each in turns), key=lambda row: float(row.get("wall_s", 0)))
            seconds |= {label: row["wall_s"]} if "wall_s" in row else {}
            results.add(_identity("cpu", f"{threads} threads", label) | row | _speedup(row, seconds))
        results.add(_identity("cpu", f"{threads} threads", "first picture") | {"first_image_s": turn(threads)})


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


def _row(pipe: Any, method: tuple[str, dict[str, Any]], repeats: int) -> dict[str, Any]:
    try:
        with _on(pipe, *method) as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            walls = list(_walls(pipe, repeats))
            last = None if cache is None else cache.stats().last
            counts = {} if last is None else {"computed": last.computed_total, "held": last.held_total}
            return {"wall_s": median(walls), **counts}
    except Exception as error:
        return {"raised": first_line(error)}


def _on(pipe: Any, method: str, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    return holdover.enable(pipe, method, **settings) if method else nullcontext()


def _walls(pipe: Any, repeats: int) -> Iterator[float]:
    """Seconds of each picture after one that warms up."""
    for index in range(repeats + 1):
        begin = time.perf_counter()
        pipe(PROMPT, num_inference_steps=STEPS, generator=torch.Generator().manual_seed(0))
        if index:
            yield time.perf_counter() - begin


def _speedup(row: dict[str, Any], seconds: dict[str, float]) -> dict[str, Any]:
    return {"speedup": seconds["no cache"] / row["wall_s"]} if "wall_s" in row and "no cache" in seconds else {}
