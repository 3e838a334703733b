"""HunyuanVideo, FramePack, HunyuanVideo 1.5, HunyuanImage 2.1 and Hunyuan-DiT."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal
from ..registry import INPUT
from .flux import MODULATED, modulated


def modulated_video(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's adaptive norm; in image-to-video the first frame may have an embedding of its own."""
    if "token_replace_emb" not in arguments:
        return modulated(block, arguments)
    first = arguments["token_replace_emb"], arguments["num_tokens"]
    normed: torch.Tensor = block.norm1(arguments["hidden_states"], arguments["temb"], *first)[0]
    return normed


FAMILIES = (
    Family(
        "HunyuanVideo",
        ("HunyuanVideoTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel"),
        signals=(Signal("modulated", of_block=modulated_video),),
    ),
    Family(
        "HunyuanImage 2.1, HunyuanVideo 1.5",
        ("HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"),
        signals=(MODULATED,),
        conditioning=("encoder_hidden_states", "encoder_hidden_states_2"),
    ),
    Family(
        "Hunyuan-DiT",
        ("HunyuanDiT2DModel",),
        signals=(INPUT,),
        conditioning=("encoder_hidden_states", "encoder_hidden_states_t5"),
    ),
)
