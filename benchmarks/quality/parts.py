"""The parts of the benchmark in the order they run, and a result file that an interrupted run continues."""

from __future__ import annotations

import gc
import json
import logging
import multiprocessing
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from holdover.compare.runner import describe_environment
from holdover.errors import ConfigError, HoldoverWarning

from . import rows, studies
from .bench import Bench, Row, Sampling, Scale
from .verdict import judge

Figures = dict[str, Any]
Part = Callable[[Bench], Figures]
Table = Callable[[Bench, Sampling, Sequence[int]], list[Row]]
EFFORT: dict[str, Table] = {f"effort {each}": partial(rows.planned_with, each) for each in ("standard", "quick")}
FEW: dict[int, tuple[int, ...]] = {8: (5, 6, 7), 4: (2, 3)}  # steps of distilled models, with budgets
OTHERS: dict[str, Table] = {  # those that take longest first; the last ones need a profile
    "cache_dit": rows.cache_dit,
    "diffusers TaylorSeer": rows.diffusers_taylorseer,
    "taylor_seer": rows.taylor_seer,
    "spectrum": rows.spectrum,
    "diffusers SeaCache": rows.diffusers_sea,
    "diffusers MagCache": rows.diffusers_mag,
    "easy_cache": rows.easy_cache,
    "sea_cache": rows.sea_cache,
    "first_block": rows.first_block,
    "diffusers first-block": rows.diffusers_first_block,
    "fewer steps": rows.fewer_steps,
    "hold, uniform": rows.held,
    "mag_cache": rows.mag_cache,
    "tea_cache": rows.tea_cache,
    "after L2P": rows.after_l2p,
    "after DPCache": rows.after_dpcache,
}


def all_parts(scale: Scale) -> dict[str, Part]:
    """Every part by name, the most important first."""
    main, short = Sampling(scale.steps), Sampling(scale.fewer_steps)
    plans: dict[str, Table] = {"plan": rows.planned, "plan without a profile": rows.unmeasured}
    fewer: dict[str, Table] = {"fewer steps": rows.fewer_steps}
    few = [_parts(EFFORT | fewer, Sampling(steps), budgets) for steps, budgets in FEW.items()]
    tables = {scale.steps: scale.budgets, scale.fewer_steps: scale.fewer_budgets, **FEW}
    thorough = [  # a part for each budget, because it costs many times as much
        _parts({f"effort thorough at {budget}": partial(rows.planned_with, "thorough")}, Sampling(steps), (budget,))
        for steps, budgets in tables.items()
        for budget in budgets
    ]
    return {
        **_parts(EFFORT, main, scale.budgets),
        **_parts(OTHERS, main, (*scale.budgets, *scale.beyond)),
        **_parts(plans, main, scale.budgets),
        **_parts(EFFORT | OTHERS | plans, short, scale.fewer_budgets),
        **{name: part for parts in (*few, *thorough) for name, part in parts.items()},
        "training": studies.train_plans,
        "generations": studies.calibrate_on_fewer_generations,
        "guidance": studies.use_at_other_guidance,
        "other steps": studies.use_at_other_steps,
        "schedulers": studies.use_under_other_schedulers,
        "residuals": studies.store_residuals,
        "cost": studies.measure_cost,
        **_parts({"plan, transferred": rows.transferred}, short, scale.fewer_budgets),
        "certificates": studies.check_certificates,
        "expected quality": studies.estimate_quality,
        "late steps": studies.add_late_steps,
        "foreign weights": studies.run_on_other_weights,
    }


def _parts(tables: dict[str, Table], sampling: Sampling, budgets: Sequence[int]) -> dict[str, Part]:
    return {f"{name}, of {sampling.steps}": _table(table, sampling, budgets) for name, table in tables.items()}


def _table(table: Table, sampling: Sampling, budgets: Sequence[int]) -> Part:
    return lambda bench: {"rows": table(bench, sampling, budgets)}


def measure(
    scale: Scale, device: str, out: Path, limit: float = float("inf"), wanted: Sequence[str] = (), jobs: int = 1
) -> Figures:
    """Run the parts that are not in the file yet, `jobs` at a time; no part begins after `limit` seconds.

    Each process builds the pipeline once; they share references and profiles. The file is written after each part.
    """
    begin = time.perf_counter()
    names = [name for name in all_parts(scale) if not wanted or any(each in name for each in wanted)]
    running: dict[Future[Figures], str] = {}
    spawn = multiprocessing.get_context("spawn")
    with (
        TemporaryDirectory() as shared,
        ProcessPoolExecutor(jobs, spawn, _start_worker, (scale, device, Path(shared))) as workers,
    ):
        described = [workers.submit(_describe) for _ in range(jobs)]  # starts all processes
        figures = _load(out, scale, described[0].result())
        lacking = [name for name in names if "error" in figures["parts"].get(name, {"error": "not measured"})]
        while lacking or running:
            if lacking and time.perf_counter() - begin > limit:
                _log(f"skipped, the time limit is reached: {', '.join(lacking)}")
                lacking = []
            while lacking and len(running) < jobs:
                name = lacking.pop(0)
                running[workers.submit(_measure_part, name)] = name
            for done in wait(running, return_when=FIRST_COMPLETED).done if running else ():
                figures["parts"][running.pop(done)] = done.result()
                save(figures, scale, out)
    return figures


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


# In the processes that measure

_bench: Bench


def _start_worker(scale: Scale, device: str, shared: Path) -> None:
    global _bench
    torch.set_num_threads(1)
    logging.getLogger("diffusers").setLevel(logging.ERROR)
    warnings.simplefilter("ignore", HoldoverWarning)
    _bench = Bench(scale, device, shared)


def _describe() -> Figures:
    return describe_environment(_bench.pipe)


def _measure_part(name: str) -> Figures:
    """The figures of one part, or its error."""
    begin = time.perf_counter()
    try:
        found = all_parts(_bench.scale)[name](_bench)
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
