"""The example runs as its first lines say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_draws_the_picture_of_one_process_over_two() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*torchrun, str(ROOT / "examples" / "parallel.py")],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert [line[:4] for line in lines] == [
        [method, "rank", rank, branch]
        for method in ("tea_cache", "cache_dit", "plan")
        for rank, branch in (("0", "cond"), ("1", "uncond"))
    ]
    assert all({"C", "h"} == set(line[4]) and len(line[4]) == 20 for line in lines)
    assert all(" ".join(line[5:]) == "bit for bit the picture of one process" for line in lines)
