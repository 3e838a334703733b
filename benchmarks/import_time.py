"""Import time of holdover, relative to torch and diffusers: `python -m benchmarks.import_time`.

Each statement runs in processes of its own, in turns; reported is the least CPU time. What holdover adds to torch and
diffusers is timed inside a process that has imported them: their own time varies more than ours takes.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from typing import Any

from .report import provenance, save, table

BASE = "import torch, diffusers; diffusers.FluxPipeline"
STATEMENTS = {
    "nothing": "pass",
    "torch, diffusers": BASE,
    "holdover": "import holdover",
    "holdover --help": "import sys; sys.argv = ['holdover', '--help']; from holdover.cli import main; main()",
}
ADDED = {"import holdover": "import holdover", "every name of holdover": "from holdover import *"}
LISTS_HEAVY = "; import sys; print([m for m in ('torch', 'diffusers') if m in sys.modules])"


def seconds(statement: str) -> float:
    """The CPU time of a process that runs only this statement."""
    begin = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", statement], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end = resource.getrusage(resource.RUSAGE_CHILDREN)
    return end.ru_utime + end.ru_stime - begin.ru_utime - begin.ru_stime


def added_seconds(statement: str) -> float:
    """The CPU time of this statement in a process that has imported torch and diffusers."""
    timed = f"import time; {BASE}; begin = time.process_time(); {statement}; print(time.process_time() - begin)"
    output = subprocess.run([sys.executable, "-c", timed], check=True, capture_output=True, text=True).stdout
    return float(output)


def heavy_modules(statement: str) -> list[str]:
    """Which of torch and diffusers the statement imports; it may exit as a command does."""
    ran = f"try:\n {statement}\nexcept SystemExit: pass\n{LISTS_HEAVY[2:]}"
    output = subprocess.run([sys.executable, "-c", ran], check=True, capture_output=True, text=True).stdout
    listed: list[str] = json.loads(output.splitlines()[-1].replace("'", '"'))
    return listed


def measure(repeats: int) -> dict[str, Any]:
    """The least time of each statement."""
    best = dict.fromkeys([*STATEMENTS, *ADDED], float("inf"))
    for _ in range(repeats):
        for name, statement in STATEMENTS.items():
            best[name] = min(best[name], seconds(statement))
        for name, statement in ADDED.items():
            best[name] = min(best[name], added_seconds(statement))
    own = {name: best[name] - best["nothing"] for name in STATEMENTS}
    base = own["torch, diffusers"]
    return {
        "seconds": {name: round(value, 3) for name, value in (own | {name: best[name] for name in ADDED}).items()},
        "interpreter_seconds": round(best["nothing"], 3),
        "holdover_over_base": round(best["import holdover"] / base, 4),
        "every_name_over_base": round(best["every name of holdover"] / base, 4),
        "imported_by_holdover": heavy_modules(STATEMENTS["holdover"]),
        "imported_by_help": heavy_modules(STATEMENTS["holdover --help"]),
    }


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.import_time", description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    options = parser.parse_args()
    figures = provenance() | {"repeats": options.repeats} | measure(options.repeats)
    save("import_time", figures)
    print(table([["imported", "seconds"], *([name, value] for name, value in figures["seconds"].items())]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
