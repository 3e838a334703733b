"""Which functions of holdover one forward enters, and what it costs the host: `python -m benchmarks.walk`.

Runs a bare, tiny FLUX transformer under a method, counts the calls of one held and one computed forward with
`sys.setprofile` after a few warm-up generations, and prints the held forward as a call tree. Then it times forwards
without the profiler, next to a one-line passthrough around the plain model: once with all blocks, which is what a
computed step must run, and once with empty block lists, which is what a held step must run if it predicts residuals.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import CodeType, FrameType
from typing import Any

import torch

import holdover
from tiny.models import MODELS, with_timestep

from . import RESULTS
from .report import provenance, save, table
from .speed.loop import keep_first_blocks

SOURCE = Path(holdover.__file__).parent
TINY = MODELS["FluxTransformer2DModel"]
STEPS = 12
EVERY = 4  # every fourth step is computed, the others are held
WARM_UP = 3  # generations before anything is counted: the first ones trace and check the model
METHODS: dict[str, dict[str, Any]] = {
    "mag_cache": {
        "mag_ratios": [1.0],
        "mag_threshold": 1e9,
        "mag_max_skip_steps": EVERY - 1,
        "mag_retention_ratio": 0.0,
    },
    "plan": {"schedule": tuple(range(0, STEPS, EVERY)), "predictor": "newton"},
    # A constant polynomial adds 1 per step; the signal is still computed and read at every step.
    "tea_cache": {"coefficients": (0.0, 1.0), "rel_l1_thresh": EVERY - 0.5},
}
COMPREHENSIONS = ("<genexpr>", "<listcomp>", "<dictcomp>", "<setcomp>")
Begin = Callable[[], None]  # starts a generation
Forward = Callable[[int], object]


@dataclass(frozen=True)
class Call:
    """One call of a function of holdover; `depth` counts only holdover's own callers."""

    code: CodeType
    depth: int

    @property
    def file(self) -> str:
        return Path(self.code.co_filename).relative_to(SOURCE).as_posix()

    def __str__(self) -> str:
        return f"{'  ' * self.depth}{self.file}:{self.code.co_firstlineno} {self.code.co_qualname}"


@dataclass
class Walk:
    """The calls of one forward in order; `with Walk() as walk` records them."""

    calls: list[Call] = field(default_factory=list)
    _depth: int = 0
    _generators: set[FrameType] = field(default_factory=set)

    def __enter__(self) -> Walk:
        sys.setprofile(self._record)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(None)

    def _record(self, frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event not in ("call", "return") or not code.co_filename.startswith(f"{SOURCE}/"):
            return
        if code.co_name in COMPREHENSIONS:  # part of the function it stands in
            return
        if event == "call" and frame not in self._generators:  # a generator that resumes is not called again
            self.calls.append(Call(code, self._depth))
        if code.co_flags & inspect.CO_GENERATOR:
            self._generators.add(frame)
        self._depth += 1 if event == "call" else -1

    def figures(self) -> dict[str, Any]:
        files = sorted({call.file for call in self.calls})
        functions = len({call.code for call in self.calls})
        return {"functions": functions, "calls": len(self.calls), "files": len(files), "file_names": files}


def forwards(model: Any) -> Forward:
    """A function that runs the model at one step of a generation, in a named branch as pipelines do."""
    conditioning = TINY.inputs()
    inputs = [with_timestep(TINY, conditioning, 1 - step / STEPS) for step in range(STEPS)]

    def forward(step: int) -> object:
        with model.cache_context("cond"):
            return model(**inputs[step])

    return forward


def count(begin: Begin, forward: Forward, trace: str) -> dict[str, Walk]:
    """The walks of the last computed and the last held forward of a generation."""
    walks: dict[str, Walk] = {}
    begin()
    for step in range(STEPS):
        with Walk() as walk:
            forward(step)
        walks[trace[step]] = walk
    return walks


def time_forwards(begin: Begin, forward: Forward, trace: str, generations: int) -> dict[str, dict[str, float]]:
    """CPU microseconds of a forward by kind, median and least of all generations; without step 0, which starts one."""
    seconds: dict[str, list[float]] = {kind: [] for kind in trace}
    for _ in range(generations):
        begin()
        for step, kind in enumerate(trace):
            start = time.thread_time()
            forward(step)
            end = time.thread_time()
            if step:
                seconds[kind].append(end - start)
    return {
        kind: {"us": round(1e6 * median(values), 1), "least_us": round(1e6 * min(values), 1)}
        for kind, values in seconds.items()
    }


@contextmanager
def passthrough(model: Any) -> Iterator[None]:
    """Replace the model's forward by a function that only calls it."""
    plain = model.forward
    model.forward = lambda *args, **kwargs: plain(*args, **kwargs)
    try:
        yield
    finally:
        del model.forward


def measure_method(model: Any, method: str, generations: int) -> tuple[dict[str, Any], Walk]:
    """The figures of one method, and the walk of its held forward."""
    forward = forwards(model)
    with holdover.enable(model, method, **METHODS[method]) as cache:

        def begin() -> None:
            cache.refresh(model, STEPS, verbose=False)

        for _ in range(WARM_UP):
            begin()
            for step in range(STEPS):
                forward(step)
        last = cache.stats().last
        assert last is not None
        trace = last.trace(last.branches[0])
        walks = count(begin, forward, trace)
        microseconds = time_forwards(begin, forward, trace, generations)
    kinds = {"C": "computed", "h": "held"}
    figures = {name: microseconds[kind] | walks[kind].figures() for kind, name in kinds.items()}
    return {"trace": trace, **figures}, walks["h"]


def measure_passthrough(model: Any, generations: int) -> dict[str, dict[str, float]]:
    """CPU microseconds of a forward through a one-line passthrough, with all blocks and with empty block lists."""
    forward, trace = forwards(model), "C" * STEPS
    with passthrough(model):
        found = {"all blocks": time_forwards(lambda: None, forward, trace, generations)["C"]}
        with keep_first_blocks(model, 0):
            found["no blocks"] = time_forwards(lambda: None, forward, trace, generations)["C"]
    return found


@torch.no_grad()
def main() -> None:
    """Count, time, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.walk", description=__doc__)
    parser.add_argument("--method", action="append", choices=sorted(METHODS), help="repeatable; default: mag_cache")
    parser.add_argument("--generations", type=int, default=200, help="timed generations of each kind")
    parser.add_argument("--before", action="store_true", help='store the figures under "before", to compare with later')
    parser.add_argument("--output", type=Path, default=RESULTS / "walk.json", help="result file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, methods = TINY.build(), {}
    for method in options.method or ["mag_cache"]:
        methods[method], walk = measure_method(model, method, options.generations)
        print(f"A held forward under {method}:", *walk.calls, "", sep="\n")
    figures = provenance() | {"steps": STEPS, "generations": options.generations}
    figures |= {"passthrough": measure_passthrough(model, options.generations), "methods": methods}
    earlier = json.loads(options.output.read_text()) if options.output.exists() else {}
    if options.before:
        save("walk", earlier | {"before": figures}, options.output)
    else:
        save("walk", figures | {"before": earlier.get("before")}, options.output)
    rows: list[list[object]] = [
        [f"{method}, {kind}", *(found[kind][key] for key in ("us", "least_us", "functions", "calls", "files"))]
        for method, found in methods.items()
        for kind in ("computed", "held")
    ]
    rows += [[f"passthrough, {name}", *found.values(), "", "", ""] for name, found in figures["passthrough"].items()]
    print(table([["one forward", "us", "least us", "functions", "calls", "files"], *rows]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
