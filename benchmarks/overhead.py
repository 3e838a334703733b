"""Host time that holdover adds to computed forwards, and that held forwards take: `python -m benchmarks.overhead`.

Uses tiny models on one CPU thread, where host time matters most. Seconds are CPU time of that thread, so that a shared
machine disturbs them less; everything that is compared takes turns on the same weights.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import diffusers
import torch
from torch import nn

import holdover
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import FLUX_FLOW, flow, model, noise, pipeline

from .report import provenance, save, table

STEPS = 28
UNREACHED = 1e9  # a threshold that is never reached
Build = Callable[[], Any]
Call = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A method on a model, set to compute as few steps as possible; with `threshold` at 0 it computes all."""

    name: str
    build: Build
    call: Call
    method: str
    threshold: str
    settings: dict[str, Any]


def small_flux() -> Any:
    """FLUX with 4 + 8 blocks and a width of 128."""
    sizes = {"num_layers": 4, "num_single_layers": 8, "attention_head_dim": 32, "num_attention_heads": 4}
    text = {"joint_attention_dim": 64, "pooled_projection_dim": 32, "axes_dims_rope": (8, 12, 12)}
    transformer = model(diffusers.FluxTransformer2DModel, **sizes, **text, in_channels=16, guidance_embeds=True)
    return pipeline(diffusers.FluxPipeline, transformer=transformer, scheduler=flow(**FLUX_FLOW))


def small_flux_call() -> dict[str, Any]:
    common = {"num_inference_steps": STEPS, "generator": torch.Generator().manual_seed(0), "output_type": "latent"}
    return common | {
        "prompt_embeds": noise(1, 64, 64, seed=1),
        "pooled_prompt_embeds": noise(1, 32, seed=2),
        "height": 128,
        "width": 128,
    }


def cases() -> list[Case]:
    mag = ("mag_cache", "mag_threshold", {"mag_ratios": [1.0], "mag_max_skip_steps": STEPS, "mag_retention_ratio": 0.0})
    tea = ("tea_cache", "rel_l1_thresh", {"coefficients": [1.0, 0.0]})
    models: list[tuple[str, Build, Call, tuple[Any, ...]]] = []
    for name in ("FluxPipeline", "CogVideoXPipeline", "WanPipeline"):
        entry = PIPELINES[name]
        label = f"{entry.name.removesuffix('Pipeline')} tiny"
        methods = (mag, tea) if name == "FluxPipeline" else (tea,)
        models.append((label, entry.build, lambda entry=entry: entry.call(steps=STEPS), methods))
    models.insert(1, ("Flux 4+8, 128 wide", small_flux, small_flux_call, (mag, tea)))
    return [
        Case(f"{label}, {method}", build, call, method, threshold, settings)
        for label, build, call, methods in models
        for method, threshold, settings in methods
    ]


class TimedTransformer:
    """Wraps a pipeline's transformer and times its forwards from outside."""

    def __init__(self, transformer: nn.Module) -> None:
        self._transformer = transformer
        self.seconds: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        begin = time.thread_time()
        output = self._transformer(*args, **kwargs)
        self.seconds.append(time.thread_time() - begin)
        return output

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transformer, name)


@contextmanager
def timed(pipe: Any) -> Iterator[TimedTransformer]:
    """Time the forwards of generations in this context; bypasses the pipeline's own __setattr__."""
    transformer = pipe.transformer
    vars(pipe)["transformer"] = wrapper = TimedTransformer(transformer)
    try:
        yield wrapper
    finally:
        vars(pipe)["transformer"] = transformer


def generation(pipe: Any, call: Call) -> tuple[list[float], float]:
    """Run one generation; returns the seconds of each forward, and of the whole generation."""
    with timed(pipe) as transformer:
        begin = time.thread_time()
        run(pipe, **call())
        return transformer.seconds, time.thread_time() - begin


@contextmanager
def without_blocks(transformer: nn.Module) -> Iterator[None]:
    """Empty the block lists, and restore them at the end: what is left runs on every held step under any method."""
    lists = {name: child for name, child in transformer.named_children() if isinstance(child, nn.ModuleList)}
    for name in lists:
        setattr(transformer, name, nn.ModuleList())
    try:
        yield
    finally:
        for name, blocks in lists.items():
            setattr(transformer, name, blocks)


def turn(case: Case, pipe: Any) -> dict[str, tuple[float, float]]:
    """One generation of each kind on the same weights: its median forward, and its total time per forward."""
    times = {"plain": _typical(*generation(pipe, case.call))}
    for kind, threshold in (("computed", 0.0), ("held", UNREACHED)):
        with holdover.enable(pipe, case.method, **case.settings | {case.threshold: threshold}) as cache:
            generation(pipe, case.call)  # traces and checks
            seconds, whole = generation(pipe, case.call)
            forwards = cache.stats().generations[-1].forwards
        wanted = [s for s, forward in zip(seconds, forwards, strict=True) if forward.computed == (kind == "computed")]
        times[kind] = _typical(wanted, whole * len(wanted) / len(seconds))
    with without_blocks(pipe.transformer):
        times["live"] = _typical(*generation(pipe, case.call))
    return times


def _typical(seconds: list[float], whole: float) -> tuple[float, float]:
    return median(seconds), whole / len(seconds)


def measure(case: Case, repeats: int) -> dict[str, Any]:
    """All figures of one case."""
    pipe = case.build()
    generation(pipe, case.call)
    turns = [turn(case, pipe) for _ in range(repeats)]
    forwards = {kind: [t[kind][0] for t in turns] for kind in turns[0]}
    return {
        "case": case.name,
        **figures_of({kind: median(values) for kind, values in forwards.items()}),
        "quietest": figures_of({kind: min(values) for kind, values in forwards.items()}),
        "added_us_per_forward_of_the_whole_generation": micro(median(t["computed"][1] - t["plain"][1] for t in turns)),
        "first_generation_extra_forwards": round(first_extra(case, pipe), 2),
    }


def figures_of(times: dict[str, float]) -> dict[str, Any]:
    """The figures that follow from the times of four kinds of forward."""
    return {
        "forward_ms": {kind: round(seconds * 1e3, 4) for kind, seconds in times.items()},
        "held_over_plain": round(times["held"] / times["plain"], 4),
        "live_over_plain": round(times["live"] / times["plain"], 4),
        "host_us_per_held_forward": micro(times["held"] - times["live"]),
        "added_us_per_computed_forward": micro(times["computed"] - times["plain"]),
    }


def micro(seconds: float) -> float:
    return round(seconds * 1e6, 1)


def first_extra(case: Case, pipe: Any, repeats: int = 9) -> float:
    """Extra time of the first forward after `enable` (trace and replay check), in usual forwards."""
    extra = []
    for _ in range(repeats):
        with holdover.enable(pipe, case.method, **case.settings | {case.threshold: 0.0}):
            first, *others = generation(pipe, case.call)[0]
        extra.append(first / median(others) - 1)
    return median(extra)


def profile(case: Case, generations: int = 20) -> None:
    """Print where the host time of held forwards goes."""
    pipe = case.build()
    with holdover.enable(pipe, case.method, **case.settings | {case.threshold: UNREACHED}):
        run(pipe, **case.call())
        profiler = cProfile.Profile(time.thread_time)
        for _ in range(generations):
            call = case.call()
            profiler.runcall(run, pipe, **call)
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(30)


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--repeats", type=int, default=20, help="turns per case")
    parser.add_argument(
        "--profile", type=int, default=None, metavar="CASE", help="profile this case (0, 1, ...) instead"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile is not None:
        profile(cases()[options.profile])
        return
    measured = [measure(case, options.repeats) for case in cases()]
    figures = provenance() | {"steps": STEPS, "repeats": options.repeats, "cases": measured}
    save("overhead_cpu", figures)
    head = ["ms per forward", "plain", "computed", "added us", "held", "live", "held/plain", "first, forwards"]
    rows = [
        [
            c["case"],
            *(c["forward_ms"][kind] for kind in ("plain", "computed")),
            c["added_us_per_computed_forward"],
            *(c["forward_ms"][kind] for kind in ("held", "live")),
            f"{c['held_over_plain']:.1%}",
            c["first_generation_extra_forwards"],
        ]
        for c in measured
    ]
    print(table([head, *rows]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
