"""Stable Audio, and MiniMax-H3, which makes sound and picture in one sequence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def normed(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's norm of the latent behind its timestep token; nothing is modulated."""
    result: torch.Tensor = block.norm1(arguments["hidden_states"])
    return result


def modulated_rows(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's normalised rows times (1 + scale) plus shift, which each row's timestep and kind select."""
    table = block.adaln_proj(arguments["temb"])
    shift, scale = (values.index_select(0, arguments["adaln_indices"]) for values in table[:2])
    result: torch.Tensor = block.norm1(arguments["hidden_states"]) * (1 + scale) + shift
    return result


FAMILIES = (
    Family("Stable Audio", ("StableAudioDiTModel",), signals=(Signal("normed", of_block=normed),)),
    Family(
        "MiniMax-H3",
        ("MiniMaxH3Transformer3DModel",),
        signals=(Signal("modulated", of_block=modulated_rows),),
        conditioning=("encoder_hidden_states",),
        notes="The scheduler itself counts up; conditioning rows are at timestep 1, which is clean.",
    ),
)
