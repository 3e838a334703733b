"""The command: `python -m benchmarks.soak --generations 1000 --seed 0`."""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import holdover

from ..report import provenance, save, table
from .plan import make_plan
from .run import ALLOWED, Outcome, soak


def main() -> int:
    """Run, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__)
    parser.add_argument("--generations", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compare-every", type=int, default=25, help="repeat every Nth image in a fresh process")
    parser.add_argument("--output", type=Path, default=None, help="result file instead of benchmarks/results/soak.json")
    options = parser.parse_args()
    warnings.simplefilter("error", holdover.HoldoverWarning)
    plan = make_plan(options.generations, options.seed, compare_every=options.compare_every)
    outcome = soak(plan, progress=lambda outcome: show_progress(outcome, len(plan)))
    print(file=sys.stderr)
    figures = provenance() | {"seed": options.seed} | figures_of(outcome)
    save("soak", figures, options.output)
    print(table([["figure", "value"], *rows(figures)]))
    print(json.dumps({key: value for key, value in figures.items() if key not in ("samples", "comparisons")}))
    return len(outcome.faults())


def show_progress(outcome: Outcome, of: int) -> None:
    """One line that is overwritten on a terminal; otherwise a line every 50 generations."""
    screen = sys.stderr.isatty()
    if not screen and outcome.generations % 50:
        return
    counts = outcome.counts
    line = f"{outcome.generations}/{of} generations, {counts['aborted']} aborted, {outcome.equal} of "
    line += f"{len(outcome.comparisons)} comparisons equal, {outcome.seconds:.0f} s"
    print(f"\r{line}" if screen else line, end="" if screen else "\n", file=sys.stderr, flush=True)


def figures_of(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON values."""
    return {
        "generations": outcome.generations,
        "aborts": outcome.counts["aborted"],
        "interrupts": outcome.counts["interrupted"],
        "prompts_switched": outcome.counts["prompts switched"],
        "through_other_pipelines": outcome.counts["through other pipelines"],
        "comparisons_equal": outcome.equal,
        "comparisons_total": len(outcome.comparisons),
        "forwards_computed": outcome.counts["computed"],
        "forwards_held": outcome.counts["held"],
        "caches_disabled": outcome.counts["disabled"],
        "overrides": outcome.counts["overrides"],
        "prompts_found": outcome.counts["prompts found"],
        "lora_changes": outcome.counts["lora changes"],
        "at_rest_start": asdict(outcome.samples[0]),
        "at_rest_end": asdict(outcome.samples[-1]),
        "growth": outcome.growth(),
        "growth_allowed": ALLOWED,
        "seconds": round(outcome.seconds),
        "faults": outcome.faults(),
        "by_pipeline": dict(outcome.by_pipeline),
        "comparisons": outcome.comparisons,
        "samples": [asdict(sample) for sample in outcome.samples],
    }


def rows(figures: dict[str, Any]) -> list[list[object]]:
    """The figures that fit in a short table."""
    start, end, grown = figures["at_rest_start"], figures["at_rest_end"], figures["growth"]
    equal = f"{figures['comparisons_equal']} of {figures['comparisons_total']}"
    return [
        ["generations (aborted)", f"{figures['generations']} ({figures['aborts']})"],
        ["interrupts, prompt switches", f"{figures['interrupts']}, {figures['prompts_switched']}"],
        ["through another pipeline", figures["through_other_pipelines"]],
        ["images equal to those of a fresh process", equal],
        ["forwards computed / held", f"{figures['forwards_computed']} / {figures['forwards_held']}"],
        ["caches enabled and disabled, overrides", f"{figures['caches_disabled']}, {figures['overrides']}"],
        ["LoRA changes, prompts found", f"{figures['lora_changes']}, {figures['prompts_found']}"],
        *([f"{key}, first and last sample (growth)", f"{start[key]}, {end[key]} ({grown[key]:+g})"] for key in grown),
        ["seconds", figures["seconds"]],
        ["faults", "; ".join(figures["faults"]) or "none"],
    ]


if __name__ == "__main__":
    sys.exit(main())
