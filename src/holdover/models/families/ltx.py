"""LTX-Video, Latte, PixArt, Allegro: one modulation for all blocks and a learned table in each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def modulated_tokens(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's normalised hidden states times (1 + scale) plus shift, which tokens may have of their own."""
    table = block.scale_shift_table
    shift, scale = (table + arguments["temb"].unflatten(2, table.shape)).unbind(dim=2)[:2]
    normed: torch.Tensor = block.norm1(arguments["hidden_states"]) * (1 + scale) + shift
    return normed


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The same with one shift and scale a sample; diffusers' basic block calls the modulation `timestep`."""
    table = block.scale_shift_table
    modulation = arguments["temb"] if "temb" in arguments else arguments["timestep"]
    shift, scale = (table + modulation.unflatten(1, table.shape)).split(1, dim=1)[:2]
    normed: torch.Tensor = block.norm1(arguments["hidden_states"]) * (1 + scale) + shift
    return normed


FAMILIES = (
    Family("LTX-Video", ("LTXVideoTransformer3DModel",), (Signal("modulated", of_block=modulated_tokens),)),
    Family(
        "Latte, PixArt, Allegro",
        ("LatteTransformer3DModel", "PixArtTransformer2DModel", "AllegroTransformer3DModel"),
        signals=(Signal("modulated", of_block=modulated),),
    ),
)
