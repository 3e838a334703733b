"""Time to the first image in a new process, with the built-in model: `python -m benchmarks.first_image`.

Each turn is a new process, with one thread and with two; the clock starts before anything is imported. Reported are
the median of the turns, the fastest turn, and CPU time, for machines with other work.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from typing import Any

from .report import provenance, save, table

STEPS = 30
PROGRAM = f"""
import json, sys, time
begin = time.perf_counter()
import torch
import holdover
torch.set_num_threads(int(sys.argv[1]))
imported = time.perf_counter()
pipe = holdover.load("emoji")
pipe.set_progress_bar_config(disable=True)
loaded, before = time.perf_counter(), time.process_time()
pipe("red apple, glossy 3d style", num_inference_steps={STEPS}, generator=torch.Generator().manual_seed(0))
end = time.perf_counter()
print(json.dumps({{"import": imported - begin, "load": loaded - imported, "draw": end - loaded,
                  "draw_cpu": time.process_time() - before}}))
"""


def turn(threads: int) -> dict[str, float]:
    """Seconds to import, to load and to generate, in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(threads)],
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    seconds: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return seconds


def measure(threads: int, repeats: int) -> dict[str, Any]:
    """The median and the fastest of several turns."""
    turns = [turn(threads) for _ in range(repeats)]
    parts = {part: round(statistics.median(seconds[part] for seconds in turns), 2) for part in turns[0]}
    from_load = [seconds["load"] + seconds["draw"] for seconds in turns]
    return {
        "threads": threads,
        **parts,
        "load_and_draw": round(statistics.median(from_load), 2),
        "quickest": round(min(from_load), 2),
    }


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.first_image", description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    rows = [measure(threads, options.repeats) for threads in (1, 2)]
    figures = provenance(2) | {"steps": STEPS, "repeats": options.repeats, "rows": rows}
    save("first_image", figures)
    print(table([list(rows[0]), *([*row.values()] for row in rows)]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
