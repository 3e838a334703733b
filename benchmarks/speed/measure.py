"""One row (a warm-up, one measured run, one run that counts host syncs), and the result file that rows go to."""

from __future__ import annotations

import gc
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..report import cpu_model, versions
from .loop import Pipeline, Timing, read_clocks
from .methods import Candidate, Session, computing_all

# One row


WARM = 8  # enough for a held step under every method
COUNTED = 10  # steps of the run in which waits are counted
IDENTICAL = 4
JUMP = 1.3  # between held and computed steps, step times jump by at least this factor


def measure_row(pipe: Pipeline, candidate: Candidate, steps: int, stop: int | None = None) -> dict[str, Any]:
    """All figures of a candidate, or its error."""
    try:
        with candidate.enable(pipe, steps) as session, _quiet():
            return _figures(pipe, session, steps, stop)
    except Exception as error:
        if pipe.cuda:
            torch.cuda.empty_cache()
        return {"raised": first_line(error)}


def first_line(error: BaseException) -> str:
    """An exception's class and the beginning of its message."""
    lines = str(error).split("Stack trace")[0].strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _figures(pipe: Pipeline, session: Session, steps: int, stop: int | None) -> dict[str, Any]:
    gc.collect()  # memory of an earlier row must not count here
    _run(pipe, session, steps, WARM)
    if pipe.cuda:
        torch.cuda.reset_peak_memory_stats()
    timing = _run(pipe, session, steps, stop)
    ran_at = read_clocks() if pipe.cuda else None
    peak = torch.cuda.max_memory_allocated() if pipe.cuda else None
    computed = _computed(session, timing.gpu)
    return {
        "measured_steps": len(timing.gpu),
        "wall_s": timing.wall_s,
        "computed": sum(computed),
        "held": len(computed) - sum(computed),
        "trace": "".join("C" if c else "h" for c in computed),
        "step_ms": list(timing.gpu),
        "gpu_ms": _by_kind(timing.gpu, computed),
        "gpu_forward_ms": _by_kind(timing.gpu_forward, computed),
        "host_ms": _by_kind(timing.host, computed),
        "clocks": ran_at,
        "peak_bytes": peak,
        "held_bytes": session.held_bytes(),
        "waits": count_waits(lambda: _run(pipe, session, steps, COUNTED)) if pipe.cuda else None,
        "notes": session.notes(),
    }


def _run(pipe: Pipeline, session: Session, steps: int, stop: int | None) -> Timing:
    session.begin()
    return pipe(steps, stop, session.before)


def _computed(session: Session, times: Sequence[float]) -> list[bool]:
    """Which steps were computed: from the method's own trace, else by splitting the step times into two groups."""
    trace = session.trace() if session.caches else "C" * len(times)
    if trace is not None:
        return [kind == "C" for kind in trace]
    ordered = sorted(times)
    jump, below = max(((b / a, a) for a, b in pairwise(ordered)), default=(1.0, 0.0))
    return [jump < JUMP or milliseconds > below for milliseconds in times]


def _by_kind(times: Sequence[float], computed: Sequence[bool]) -> dict[str, float | None]:
    kinds = {"computed": [], "held": []}  # type: dict[str, list[float]]
    for milliseconds, was in zip(times, computed, strict=True):
        kinds["computed" if was else "held"].append(milliseconds)
    return {kind: median(values) if values else None for kind, values in kinds.items()}


def count_waits(run: Callable[[], object]) -> dict[str, int]:
    """How often the host waits for the device: synchronizing operations, and events it waits for."""
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


def check_identity(pipe: Pipeline, ratios: str, steps: int) -> dict[str, bool | str]:
    """Whether methods that compute every step give the uncached latents, bit for bit."""
    plain = pipe(steps, IDENTICAL).latent
    found: dict[str, bool | str] = {}
    for name, enable in computing_all(ratios, steps).items():
        try:
            with enable(pipe, steps), _quiet():
                found[name] = torch.equal(pipe(steps, IDENTICAL).latent, plain)
        except Exception as error:
            found[name] = first_line(error)
    return found


def compare_to_ideal(row: dict[str, Any], step_ms: float, floor_ms: float | None) -> dict[str, Any]:
    """The least time this row could take: `step_ms` per computed step, and the floor per held step."""
    floor = floor_ms if floor_ms is not None else row["gpu_ms"]["held"] or 0.0
    ideal = (row["computed"] * step_ms + row["held"] * floor) / 1e3
    return {"floor_ms": floor, "ideal_s": ideal, "over_ideal": row["wall_s"] / ideal - 1}


# The result file, written after every row so that an interrupted run can be continued


IDENTITY = ("section", "model", "shape", "batch", "steps", "mode", "by", "label")


class OutOfTimeError(Exception):
    """The time budget is spent; all finished rows are written."""


class Results:
    """The rows of a result file; an existing row is not measured again unless `again`."""

    def __init__(self, path: Path, budget_s: float, again: bool = False) -> None:
        self._path, self._again = path, again
        self._deadline = time.monotonic() + budget_s
        self._figures = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
        self._run = len(self._figures["runs"])
        self._figures["runs"].append(provenance())

    def needs(self, identity: dict[str, Any]) -> bool:
        """Whether a row still has to be measured."""
        return self._again or not any(key_of(row) == key_of(identity) for row in self._figures["rows"])

    def lacking(self, identities: Iterable[dict[str, Any]]) -> bool:
        return any(self.needs(each) for each in identities)

    def check_time(self, seconds: float = 0.0) -> None:
        """Raise OutOfTimeError if fewer than `seconds` are left."""
        if time.monotonic() + seconds > self._deadline:
            raise OutOfTimeError

    def add(self, row: dict[str, Any]) -> None:
        """Add a row or replace the older one, and write the file."""
        row = round_figures(row | {"run": self._run})
        rows = self._figures["rows"]
        place = next((i for i, old in enumerate(rows) if key_of(old) == key_of(row)), len(rows))
        rows[place : place + 1] = [row]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")
        written.write_text(_text(self._figures))
        os.replace(written, self._path)
        print(json.dumps({k: v for k, v in row.items() if k not in ("notes", "trace", "step_ms")}), flush=True)


def _text(figures: dict[str, Any]) -> str:
    """JSON with one line per run and per row, because rows contain the times of all steps."""
    lists = (f'"{name}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for name, entries in figures.items())
    return "{\n" + ",\n".join(lists) + "\n}\n"


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """The key that identifies a row."""
    return tuple(row.get(name) for name in IDENTITY)


def round_figures(value: Any) -> Any:
    """Figures rounded to six digits."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: round_figures(item) for key, item in value.items()}
    return [round_figures(item) for item in value] if isinstance(value, list) else value


def provenance() -> dict[str, Any]:
    """Date, card and versions; packages may be on the path without being installed."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda,
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "versions": versions("torch", "triton", "diffusers", "cache-dit", "torchao"),
    }
