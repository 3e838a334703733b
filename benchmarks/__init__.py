"""Benchmarks, run from the root of the repository: `python -m benchmarks.soak`. Tiny models come from tests/tiny."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))
