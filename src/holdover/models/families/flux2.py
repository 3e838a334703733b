"""FLUX.2 and FLUX.2 klein: one modulation for all blocks, and reference pictures kept as keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal
from .kv import writes_cache


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's image stream, normalised, times (1 + scale) plus shift."""
    modulation = arguments["temb_mod_img"]
    if modulation.ndim == 2:
        modulation = modulation.unsqueeze(1)
    shift, scale = modulation.chunk(6, dim=-1)[:2]
    normed: torch.Tensor = (1 + scale) * block.norm1(arguments["hidden_states"]) + shift
    return normed


FAMILIES = (
    Family(
        "FLUX.2",
        ("Flux2Transformer2DModel",),
        signals=(Signal("modulated", of_block=modulated),),
        must_compute=writes_cache,
    ),
)
