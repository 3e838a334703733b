"""One row: a short warm-up, one measured run, one short run that counts how often the host waits."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from .clocks import clocks
from .loop import Course, Pipeline
from .methods import Candidate, Session, computing_all

WARM = 8  # enough for a held step under every method
COUNTED = 10  # steps of the run in which waits are counted
IDENTICAL = 4
APART = 1.3  # held steps are told from computed ones where step times jump by this factor


def measured(pipe: Pipeline, candidate: Candidate, steps: int, stop: int | None = None) -> dict[str, Any]:
    """All figures of a candidate, or how it raised."""
    try:
        with candidate.put_on(pipe, steps) as session, _quiet():
            return _figures(pipe, session, steps, stop)
    except Exception as error:
        if pipe.cuda:
            torch.cuda.empty_cache()
        return {"raised": first_line(error)}


def first_line(error: BaseException) -> str:
    """An exception's class and the beginning of what it says."""
    lines = str(error).split("Stack trace")[0].strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _figures(pipe: Pipeline, session: Session, steps: int, stop: int | None) -> dict[str, Any]:
    gc.collect()  # what an earlier row left must not count here
    _run(pipe, session, steps, WARM)
    if pipe.cuda:
        torch.cuda.reset_peak_memory_stats()
    course = _run(pipe, session, steps, stop)
    ran_at = clocks() if pipe.cuda else None
    peak = torch.cuda.max_memory_allocated() if pipe.cuda else None
    computed = _computed(session, course.gpu)
    return {
        "measured_steps": len(course.gpu),
        "wall_s": course.wall_s,
        "computed": sum(computed),
        "held": len(computed) - sum(computed),
        "trace": "".join("C" if c else "h" for c in computed),
        "step_ms": list(course.gpu),
        "gpu_ms": _by_kind(course.gpu, computed),
        "gpu_forward_ms": _by_kind(course.gpu_forward, computed),
        "host_ms": _by_kind(course.host, computed),
        "clocks": ran_at,
        "peak_bytes": peak,
        "held_bytes": session.held_bytes(),
        "waits": waits(lambda: _run(pipe, session, steps, COUNTED)) if pipe.cuda else None,
        "notes": session.notes(),
    }


def _run(pipe: Pipeline, session: Session, steps: int, stop: int | None) -> Course:
    session.begin()
    return pipe(steps, stop, session.before)


def _computed(session: Session, times: Sequence[float]) -> list[bool]:
    """Which steps were computed: by the method's own record, else by where step times fall into two kinds."""
    trace = session.trace() if session.caches else "C" * len(times)
    if trace is not None:
        return [kind == "C" for kind in trace]
    ordered = sorted(times)
    jump, below = max(((b / a, a) for a, b in pairwise(ordered)), default=(1.0, 0.0))
    return [jump < APART or time > below for time in times]


def _by_kind(times: Sequence[float], computed: Sequence[bool]) -> dict[str, float | None]:
    kinds = {"computed": [], "held": []}  # type: dict[str, list[float]]
    for time, was in zip(times, computed, strict=True):
        kinds["computed" if was else "held"].append(time)
    return {kind: median(values) if values else None for kind, values in kinds.items()}


def waits(run: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device: operations that synchronise, and events that are waited for."""
    plain, events = torch.cuda.Event.synchronize, 0

    def synchronize(event: Any) -> None:
        nonlocal events
        events += 1
        plain(event)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.Event.synchronize = synchronize  # type: ignore[method-assign, assignment]
        torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.Event.synchronize = plain  # type: ignore[method-assign]
    operations = sum("synchronizing CUDA operation" in str(w.message) for w in caught)
    return {"steps": COUNTED, "operations": operations, "events": events}


def identity(pipe: Pipeline, ratios: str, steps: int) -> dict[str, bool | str]:
    """Whether methods that compute every step give the uncached latents, bit for bit."""
    plain = pipe(steps, IDENTICAL).latent
    found: dict[str, bool | str] = {}
    for name, put_on in computing_all(ratios, steps).items():
        try:
            with put_on(pipe, steps), _quiet():
                found[name] = torch.equal(pipe(steps, IDENTICAL).latent, plain)
        except Exception as error:
            found[name] = first_line(error)
    return found


def against_ideal(row: dict[str, Any], step_ms: float, floor_ms: float | None) -> dict[str, Any]:
    """The least this row could take: so long for each computed step, and the floor for those that are held."""
    floor = floor_ms if floor_ms is not None else row["gpu_ms"]["held"] or 0.0
    ideal = (row["computed"] * step_ms + row["held"] * floor) / 1e3
    return {"floor_ms": floor, "ideal_s": ideal, "over_ideal": row["wall_s"] / ideal - 1}
