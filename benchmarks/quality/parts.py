"""The parts of the benchmark in the order they run, and a result file that can be taken up where it ended."""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from holdover.compare.generation import describe_environment
from holdover.errors import ConfigError

from . import certificate, cost, dependence, guard, peers, plans
from .bench import Bench, Course, Row
from .scale import Scale
from .verdict import verdict

Figures = dict[str, Any]
Part = Callable[[Bench], Figures]
Table = Callable[[Bench, Course, Sequence[int]], list[Row]]
OURS: dict[str, Table] = {
    "plan": plans.planned,
    "plan, polished": plans.polished,
    "plan without a profile": plans.unmeasured,
}
OTHERS: dict[str, Table] = {
    "hold, uniform": plans.held,
    "fewer steps": plans.fewer_steps,
    "cache_dit": peers.cache_dit,
    "diffusers TaylorSeer": peers.diffusers_taylorseer,
    "diffusers first-block": peers.diffusers_first_block,
    "diffusers MagCache": peers.diffusers_mag,
    "tea_cache": peers.tea_cache,
    "mag_cache": peers.mag_cache,
}


def all_parts(scale: Scale) -> dict[str, Part]:
    """Every part by name, those first that the verdict needs."""
    main, short = Course(scale.steps), Course(scale.fewer_steps)
    beyond = (*scale.budgets, *scale.beyond)
    fewer: dict[str, Table] = {"plan, transferred": plans.transferred, **OURS, **OTHERS}
    return {
        "cost": cost.costs,
        **{_titled(name, main): _table(table, main, scale.budgets) for name, table in OURS.items()},
        **{_titled(name, main): _table(table, main, beyond) for name, table in OTHERS.items()},
        "generations": dependence.generations,
        "certificates": certificate.certificates,
        "guard": guard.ordinary,
        "foreign weights": guard.foreign,
        "guidance": dependence.guidance,
        "other steps": dependence.steps,
        "schedulers": dependence.schedulers,
        "residuals": dependence.residuals,
        **{_titled(name, short): _table(table, short, scale.fewer_budgets) for name, table in fewer.items()},
    }


def _titled(name: str, course: Course) -> str:
    return f"{name}, of {course.steps}"


def _table(table: Table, course: Course, budgets: Sequence[int]) -> Part:
    return lambda bench: {"rows": table(bench, course, budgets)}


def measure(scale: Scale, device: str, out: Path, limit: float, wanted: Sequence[str] = ()) -> Figures:
    """Run the parts that are not in the file yet; no part begins after `limit` seconds."""
    begin = time.perf_counter()
    parts = {name: part for name, part in all_parts(scale).items() if not wanted or any(w in name for w in wanted)}
    bench = Bench(scale, device)
    figures = _begun(out, scale, describe_environment(bench.pipe))
    for name, part in parts.items():
        done = figures["parts"].get(name)
        if done is not None and "error" not in done:
            continue
        if time.perf_counter() - begin > limit:
            _say(f"{name}: left out, the time is up")
            continue
        figures["parts"][name] = _measured(name, part, bench)
        save(figures, scale, out)
    bench.folder.cleanup()
    return figures


def save(figures: Figures, scale: Scale, out: Path) -> None:
    """Write what is there so far, with what it says."""
    figures["verdict"] = verdict(figures, scale)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    unfinished.write_text(json.dumps(figures, indent=1) + "\n")
    unfinished.replace(out)


def _begun(out: Path, scale: Scale, where: Figures) -> Figures:
    """The figures of an earlier run of the same benchmark at the same place, or none yet."""
    settings = json.loads(json.dumps(scale.as_dict()))
    if out.exists():
        earlier: Figures = json.loads(out.read_text())
        if (earlier["scale"], earlier["environment"]) != (settings, where):
            raise ConfigError(f"{out} was measured with other settings, versions or another device: name another file.")
        return earlier
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "environment": where, "scale": settings, "parts": {}}


def _measured(name: str, part: Part, bench: Bench) -> Figures:
    """One part; where it fails, why."""
    begin = time.perf_counter()
    try:
        found = part(bench)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    _clean()
    seconds = round(time.perf_counter() - begin, 2)
    _say(f"{name}: {found.get('error', 'done')}, {seconds:.1f} s")
    return found | {"part_seconds": seconds}


def _clean() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
