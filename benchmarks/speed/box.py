"""The model in the box on a card: CUDA graphs where launches dominate."""

from __future__ import annotations

import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from statistics import median
from typing import Any

import torch

import holdover

from .measure import first_line
from .methods import MAG
from .results import Results

STEPS = 50
WARM = 12
BUDGET = 10
PROMPT = "red apple, glossy 3d style"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "no cache": ("", {}),
    "every step computed": ("plan", {"budget": "1x", "guard": False}),
    "plan, K = 10 of 50": ("plan", {"budget": BUDGET, "guard": False}),
    "mag_cache 0.24/5/0.1": ("mag_cache", MAG),
}


def graphs(results: Results, tiny: bool = False, repeats: int = 5) -> None:
    """Eager, compiled, and compiled with CUDA graphs, one picture at a time; a tiny run only traces."""
    device = "cpu" if tiny else "cuda"
    modes: dict[str, dict[str, Any]] = {"eager": {}, "compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    lacking = [mode for mode in modes if results.lacking(_identity(device, mode, label) for label in METHODS)]
    if not lacking:
        return
    runs = (1, WARM) if tiny else (repeats, STEPS)
    plain = _row(loaded(device), METHODS["no cache"], *runs)
    for mode in lacking:
        results.check_time(0 if mode == "eager" or tiny else 40)
        torch._dynamo.reset()
        pipe = loaded(device)
        if mode != "eager":
            pipe.transformer = torch.compile(pipe.transformer, **(modes[mode] | ({"backend": "eager"} if tiny else {})))
        for label, method in METHODS.items():
            row = plain if (mode, label) == ("eager", "no cache") else _row(pipe, method, *runs)
            results.add(_identity(device, mode, label) | row | _speedup(row, plain))


def _identity(device: str, mode: str, label: str) -> dict[str, Any]:
    by = "" if label == "no cache" else "holdover"
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


def loaded(device: str) -> Any:
    """The pipeline without its progress bar."""
    pipe: Any = holdover.load("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _row(pipe: Any, method: tuple[str, dict[str, Any]], repeats: int, steps: int) -> dict[str, Any]:
    try:
        with _on(pipe, *method) as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            drawn(pipe, WARM)
            walls = [drawn(pipe, steps) for _ in range(repeats)]
            last = None if cache is None else cache.stats().last
            counts = {} if last is None else {"computed": last.computed_total, "held": last.held_total}
            return {"wall_s": median(walls), **counts}
    except Exception as error:
        return {"raised": first_line(error)}


def _on(pipe: Any, method: str, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    return holdover.enable(pipe, method, **settings) if method else nullcontext()


def drawn(pipe: Any, steps: int) -> float:
    """Seconds of one picture."""
    begin = time.perf_counter()
    pipe(PROMPT, num_inference_steps=steps, generator=torch.Generator().manual_seed(0))
    return time.perf_counter() - begin


def _speedup(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Over the eager run without a cache in this process."""
    return {"speedup": plain["wall_s"] / row["wall_s"]} if "wall_s" in row else {}
