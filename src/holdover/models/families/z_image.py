"""Z-Image and FIBO 2: refiner stacks first, then one stack over the joint sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Layer 0's normalised sequence times (1 + scale); clean tokens may have a scale of their own."""
    mask = arguments.get("noise_mask")
    if mask is None:
        scale = _scale(block, arguments["adaln_input"])
    else:
        noisy, clean = _scale(block, arguments["adaln_noisy"]), _scale(block, arguments["adaln_clean"])
        scale = torch.where(mask.unsqueeze(-1) == 1, noisy, clean)
    normed: torch.Tensor = block.attention_norm1(arguments["x"])
    return normed * (1 + scale)


def _scale(block: Any, embedding: torch.Tensor) -> torch.Tensor:
    scale: torch.Tensor = block.adaLN_modulation(embedding).unsqueeze(1).chunk(4, dim=-1)[0]
    return scale


MODULATED = Signal("modulated", of_block=modulated)

FAMILIES = (
    Family("Z-Image", ("ZImageTransformer2DModel",), signals=(MODULATED,), head="layers", time_runs_up=True),
    Family("FIBO 2", ("BriaFibo2Transformer2DModel",), signals=(MODULATED,), head="layers"),
)
