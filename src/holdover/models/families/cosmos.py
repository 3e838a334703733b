"""Cosmos 1, 2 and 2.5, and Cosmos 3."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's adaptive norm, after the learned positions that Cosmos 1 adds in every block."""
    hidden, positions = arguments["hidden_states"], arguments.get("extra_pos_emb")
    if positions is not None:
        hidden = hidden + positions
    normed: torch.Tensor = block.norm1(hidden, arguments["embedded_timestep"], arguments.get("temb"))[0]
    return normed


def generated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """What enters block 0 of the stream that is generated, not of the one that is understood."""
    hidden: torch.Tensor = arguments["gen_seq"]
    return hidden


FAMILIES = (
    Family(
        "Cosmos",
        ("CosmosTransformer3DModel",),
        signals=(Signal("modulated", of_block=modulated),),
        notes="A ControlNet's residuals enter inside the blocks: a held step holds their effect too.",
    ),
    Family(
        "Cosmos 3",
        ("Cosmos3OmniTransformer",),
        signals=(Signal("input", of_block=generated),),
        conditioning=("input_ids",),
    ),
)
