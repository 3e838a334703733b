"""How many functions of holdover one forward enters; `python -m benchmarks.walk` prints which."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.walk import METHODS, TINY, measure_method

FUNCTIONS, FILES = 25, 8  # of a held forward under mag_cache


@pytest.mark.parametrize("method", sorted(METHODS))
def test_a_walk_starts_at_the_transformer_and_comes_back(method: str) -> None:
    with torch.no_grad():
        figures, walk = measure_method(TINY.build(), method, generations=1)
    assert figures["trace"].startswith("ChhhChhhChh")
    assert {call.depth for call in walk.calls} >= {0, 1, 2}
    assert figures["held"]["calls"] == len(walk.calls) >= figures["held"]["functions"] > 0
    if method == "mag_cache":
        assert figures["held"]["functions"] <= FUNCTIONS
        assert figures["held"]["files"] <= FILES
