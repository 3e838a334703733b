"""Lumina-Next, Lumina-Image 2.0 and Mochi: an adaptive RMS norm at the head of each block."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's adaptive norm; in Lumina-Image 2.0 of the joint sequence of text and picture."""
    normed: torch.Tensor = block.norm1(arguments["hidden_states"], arguments["temb"])[0]
    return normed


def embedding(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding alone."""
    embedder = transformer.time_caption_embed
    embedded: torch.Tensor = embedder.timestep_embedder(embedder.time_proj(timesteps).to(transformer.dtype))
    return embedded


MODULATED = Signal("modulated", of_block=modulated)

FAMILIES = (
    Family(
        "Lumina-Image 2.0",
        ("Lumina2Transformer2DModel",),
        signals=(MODULATED, Signal("time", of_time=embedding)),
        head="layers",
        time_runs_up=True,
    ),
    Family("Lumina-Next", ("LuminaNextDiT2DModel",), signals=(MODULATED,), time_runs_up=True),
    Family(
        "Mochi",
        ("MochiTransformer3DModel",),
        signals=(MODULATED,),
        notes="The scheduler itself counts up (invert_sigmas); the model is given its timesteps as they are.",
    ),
)
