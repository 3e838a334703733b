"""Quantized and offloaded weights: computing every step changes nothing, held steps replay, undo leaves nothing behind.

`python -m benchmarks.combinations` runs all combinations; these are one of each kind of weights and of placements.
"""

from __future__ import annotations

import pytest
import torch
from benchmarks.combinations import Combination, outcome, try_combination

CHOSEN = [
    ("as they are", "model offload", "eager"),
    ("layerwise casting to float8", "sequential offload", "eager"),
    ("torchao int8", "group offload, blocks", "eager"),
    ("torchao int8 dynamic", "on the device", "compiled"),
    ("bitsandbytes nf4", "on the device", "eager"),
    ("GGUF Q8_0", "on the device", "eager"),
]


@pytest.mark.parametrize(("weights", "placement", "mode"), CHOSEN, ids=[weights for weights, _, _ in CHOSEN])
def test_combination(weights: str, placement: str, mode: str) -> None:
    row = try_combination(Combination(weights, placement, mode), torch.device("cpu"))
    if "not_here" in row:
        pytest.skip(row["not_here"])
    assert outcome(row) == "ok"
