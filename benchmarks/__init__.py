"""Run from the root of the repository, `python -m benchmarks.soak`; the models are the tiny ones of the tests."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

if str(ROOT / "tests") not in sys.path:
    sys.path.append(str(ROOT / "tests"))
