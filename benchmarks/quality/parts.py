"""The parts of the benchmark in the order they run, and a result file that an interrupted run continues."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from holdover.compare.runner import describe_environment
from holdover.errors import ConfigError

from . import rows, studies
from .bench import Bench, Row, Sampling, Scale
from .verdict import judge

Figures = dict[str, Any]
Part = Callable[[Bench], Figures]
Table = Callable[[Bench, Sampling, Sequence[int]], list[Row]]
OURS: dict[str, Table] = {
    "plan": rows.planned,
    "plan, polished": rows.polished,
    "plan without a profile": rows.unmeasured,
}
FEW_STEPS = {8: (5, 6, 7), 4: (3,)}  # and the budgets
OTHERS: dict[str, Table] = {
    "hold, uniform": rows.held,
    "fewer steps": rows.fewer_steps,
    "after L2P": rows.after_l2p,
    "after DPCache": rows.after_dpcache,
    "cache_dit": rows.cache_dit,
    "diffusers TaylorSeer": rows.diffusers_taylorseer,
    "diffusers first-block": rows.diffusers_first_block,
    "diffusers MagCache": rows.diffusers_mag,
    "diffusers SeaCache": rows.diffusers_sea,
    "tea_cache": rows.tea_cache,
    "mag_cache": rows.mag_cache,
    "easy_cache": rows.easy_cache,
    "sea_cache": rows.sea_cache,
    "first_block": rows.first_block,
    "taylor_seer": rows.taylor_seer,
    "spectrum": rows.spectrum,
}


def all_parts(scale: Scale) -> dict[str, Part]:
    """Every part by name; those that the verdict needs come first."""
    main, short = Sampling(scale.steps), Sampling(scale.fewer_steps)
    few = {Sampling(steps): budgets for steps, budgets in FEW_STEPS.items()}
    beyond = (*scale.budgets, *scale.beyond)
    fewer: dict[str, Table] = {"plan, transferred": rows.transferred, **OURS, **OTHERS}
    return {
        "cost": studies.measure_cost,
        **{_name(name, main): _table(table, main, scale.budgets) for name, table in OURS.items()},
        **{_name(name, main): _table(table, main, beyond) for name, table in OTHERS.items()},
        "generations": studies.calibrate_on_fewer_generations,
        "certificates": studies.check_certificates,
        "guard": studies.guard_usual_weights,
        "foreign weights": studies.guard_other_weights,
        "guidance": studies.use_at_other_guidance,
        "other steps": studies.use_at_other_steps,
        "schedulers": studies.use_under_other_schedulers,
        "residuals": studies.store_residuals,
        **{_name(name, short): _table(table, short, scale.fewer_budgets) for name, table in fewer.items()},
        _name("effort", main): _table(rows.efforts, main, scale.budgets),
        _name("effort", short): _table(rows.efforts, short, scale.fewer_budgets),
        **{_name("effort", sampling): _table(rows.efforts, sampling, budgets) for sampling, budgets in few.items()},
        **{_name("fewer steps", s): _table(rows.fewer_steps, s, budgets) for s, budgets in few.items()},
        "training": studies.train_plans,
    }


def _name(name: str, sampling: Sampling) -> str:
    return f"{name}, of {sampling.steps}"


def _table(table: Table, sampling: Sampling, budgets: Sequence[int]) -> Part:
    return lambda bench: {"rows": table(bench, sampling, budgets)}


def measure(scale: Scale, device: str, out: Path, limit: float, wanted: Sequence[str] = ()) -> Figures:
    """Run the parts that are not in the file yet; no part begins after `limit` seconds."""
    begin = time.perf_counter()
    parts = {name: part for name, part in all_parts(scale).items() if not wanted or any(w in name for w in wanted)}
    bench = Bench(scale, device)
    figures = _load(out, scale, describe_environment(bench.pipe))
    for name, part in parts.items():
        done = figures["parts"].get(name)
        if done is not None and "error" not in done:
            continue
        if time.perf_counter() - begin > limit:
            _log(f"{name}: skipped, the time limit is reached")
            continue
        figures["parts"][name] = _measure_part(name, part, bench)
        save(figures, scale, out)
    bench.folder.cleanup()
    return figures


def measure_side_by_side(scale: Scale, arguments: list[str], out: Path, wanted: Sequence[str], jobs: int) -> None:
    """Run every part in a process of its own, into a file of its own, and put the files together."""
    names = [name for name in all_parts(scale) if not wanted or any(w in name for w in wanted)]
    folder = out.with_suffix(".parts")
    folder.mkdir(parents=True, exist_ok=True)
    running: list[subprocess.Popen[bytes]] = []
    for number, name in enumerate(names):
        while sum(process.poll() is None for process in running) >= jobs:
            time.sleep(0.2)
        own = ["--jobs", "1", "--part", name, "--out", str(folder / f"{number}.json")]
        running.append(subprocess.Popen([sys.executable, "-m", "benchmarks.quality", *arguments, *own]))
    for process in running:
        process.wait()
    merge(sorted(folder.glob("*.json")), scale, out)


def merge(files: Sequence[Path], scale: Scale, out: Path) -> None:
    """Put the parts of several result files of the same setting into one."""
    found: list[Figures] = [json.loads(file.read_text()) for file in files]
    figures = (json.loads(out.read_text()) if out.exists() else found[0]) | {"parts": {}}
    for name in all_parts(scale):
        for part in (other["parts"][name] for other in found if name in other["parts"]):
            figures["parts"][name] = part
    save(figures, scale, out)


def save(figures: Figures, scale: Scale, out: Path) -> None:
    """Write the figures so far, with the verdict on them."""
    figures["verdict"] = judge(figures, scale)
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = out.with_name(f"{out.name}.unfinished")
    unfinished.write_text(json.dumps(figures, indent=1) + "\n")
    unfinished.replace(out)


def _load(out: Path, scale: Scale, where: Figures) -> Figures:
    """The figures of an earlier run with the same settings and environment, or an empty result."""
    settings = json.loads(json.dumps(scale.as_dict()))
    if out.exists():
        earlier: Figures = json.loads(out.read_text())
        if (earlier["scale"], earlier["environment"]) != (settings, where):
            raise ConfigError(f"{out} was measured with other settings, versions or another device: name another file.")
        return earlier
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "environment": where, "scale": settings, "parts": {}}


def _measure_part(name: str, part: Part, bench: Bench) -> Figures:
    """The figures of one part, or its error."""
    begin = time.perf_counter()
    try:
        found = part(bench)
    except Exception as error:
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    seconds = round(time.perf_counter() - begin, 2)
    _log(f"{name}: {found.get('error', 'done')}, {seconds:.1f} s")
    return found | {"part_seconds": seconds}


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
