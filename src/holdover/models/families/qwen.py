"""Qwen-Image, its editing and layered variants, and Qwen-Image 2.1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal
from .kv import writes_cache


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's modulated image input; tokens of a picture to edit may have a modulation of their own."""
    first, _ = block.img_mod(arguments["temb"]).chunk(2, dim=-1)
    normed = block.img_norm1(arguments["hidden_states"])
    result: torch.Tensor = block._modulate(normed, first, arguments.get("modulate_index"))[0]
    return result


def modulated_21(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The same for 2.1, where text and pictures are one sequence and all blocks share one modulation."""
    first, _ = arguments["modulation"].chunk(2, dim=-1)
    normed = block.img_norm1(arguments["hidden_states"])
    result: torch.Tensor = block._modulate(normed, first, arguments.get("target_token_mask"))[0]
    return result


FAMILIES = (
    Family("Qwen-Image", ("QwenImageTransformer2DModel",), (Signal("modulated", of_block=modulated),)),
    Family(
        "Qwen-Image 2.1",
        ("QwenImage21Transformer2DModel",),
        signals=(Signal("modulated", of_block=modulated_21),),
        must_compute=writes_cache,
    ),
)
