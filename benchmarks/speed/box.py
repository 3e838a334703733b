"""The built-in model: CUDA graphs on a card, where launches dominate, and a plan on two CPU cores."""

from __future__ import annotations

import json
import time
import warnings
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import torch

import holdover

from ..first_image import turn as first_image
from ..report import provenance, save
from .measure import Results, first_line, round_figures
from .methods import MAG

# On a card


STEPS = 50
WARM = 12
BUDGET = 10
PROMPT = "red apple, glossy 3d style"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "no cache": ("", {}),
    "every step computed": ("plan", {"budget": "1x"}),
    "plan, K = 10 of 50": ("plan", {"budget": BUDGET}),
    "mag_cache 0.24/5/0.1": ("mag_cache", MAG),
}


def measure_on_card(results: Results, tiny: bool = False, repeats: int = 5) -> None:
    """Eager, compiled, and compiled with CUDA graphs, one image at a time; a tiny run only traces."""
    device = "cpu" if tiny else "cuda"
    modes: dict[str, dict[str, Any]] = {"eager": {}, "compiled": {}, "reduce-overhead": {"mode": "reduce-overhead"}}
    lacking = [mode for mode in modes if results.lacking(_identity(device, mode, label) for label in METHODS)]
    if not lacking:
        return
    runs = (1, WARM) if tiny else (repeats, STEPS)
    plain = _row(load(device), METHODS["no cache"], *runs)
    for mode in lacking:
        results.check_time(0 if mode == "eager" or tiny else 40)
        torch._dynamo.reset()
        pipe = load(device)
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


def load(device: str) -> Any:
    """The built-in model without its progress bar."""
    pipe: Any = holdover.load("emoji")
    pipe.set_progress_bar_config(disable=True)
    return pipe.to(device)


def _row(pipe: Any, method: tuple[str, dict[str, Any]], repeats: int, steps: int) -> dict[str, Any]:
    try:
        with _on(pipe, *method) as cache, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            time_image(pipe, WARM)
            walls = [time_image(pipe, steps) for _ in range(repeats)]
            last = None if cache is None else cache.stats().last
            counts = {} if last is None else {"computed": last.computed_total, "held": last.held_total}
            return {"wall_s": median(walls), **counts}
    except Exception as error:
        return {"raised": first_line(error)}


def _on(pipe: Any, method: str, settings: dict[str, Any]) -> AbstractContextManager[Any]:
    return holdover.enable(pipe, method, **settings) if method else nullcontext()


def time_image(pipe: Any, steps: int, side: int | None = None) -> float:
    """Seconds to generate one image."""
    begin = time.perf_counter()
    pipe(PROMPT, height=side, width=side, num_inference_steps=steps, generator=torch.Generator().manual_seed(0))
    return time.perf_counter() - begin


def _speedup(row: dict[str, Any], plain: dict[str, Any]) -> dict[str, Any]:
    """Speedup over the eager run without a cache in this process."""
    return {"speedup": plain["wall_s"] / row["wall_s"]} if "wall_s" in row else {}


# On the processor


THREADS = 2


def measure_on_cpu(
    out: Path, turns: int = 3, steps: int = STEPS, threads: int = THREADS, side: int | None = None
) -> None:
    """Measure, write the result file, and print it.

    A plan is made during its first image, which is timed separately; every further image takes as long as the second.
    The least ratio of the turns is reported next to the median, because other work on the machine slows single turns.
    """
    torch.set_num_threads(threads)
    pipe = load("cpu")
    taken = [_turn(pipe, steps, side) for _ in range(turns)]
    ratios = [each["uncached_s"] / each["plan_s"] for each in taken]
    figures = provenance(threads) | {
        "steps": steps,
        "budget": BUDGET,
        "turns": taken,
        "ratio": {"median": median(ratios), "least": min(ratios)},
        "first_picture": first_image(threads),
    }
    save("speed_cpu", round_figures(figures), out)
    print(json.dumps(round_figures(figures)))


def _turn(pipe: Any, steps: int, side: int | None) -> dict[str, float | int]:
    """Seconds of one image without a cache, of the image during which a plan is made, and of the next one."""
    time_image(pipe, min(WARM, steps), side)
    uncached = time_image(pipe, steps, side)
    with holdover.enable(pipe, "plan", budget=BUDGET) as cache:
        time_image(pipe, min(WARM, steps), side)
        first, after = time_image(pipe, steps, side), time_image(pipe, steps, side)
        last = cache.stats().last
        assert last is not None
        computed = last.computed_total // len(last.branches)
    return {"uncached_s": uncached, "plan_first_s": first, "plan_s": after, "computed": computed}
