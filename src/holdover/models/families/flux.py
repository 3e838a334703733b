"""FLUX.1 and the models whose first block normalises the image stream the same way."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..family import Family, Signal


def modulated(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """Block 0's adaptive norm of the image stream."""
    normed: torch.Tensor = block.norm1(arguments["hidden_states"], emb=arguments["temb"])[0]
    return normed


def pruned(block: Any, arguments: Mapping[str, Any]) -> torch.Tensor:
    """The same where the norm has no weights: the embedding's first six rows are the image's."""
    normed: torch.Tensor = block.norm1(arguments["hidden_states"], emb=arguments["temb"][:, :6])[0]
    return normed


MODULATED = Signal("modulated", of_block=modulated)

FAMILIES = (
    Family("FLUX.1", ("FluxTransformer2DModel",), signals=(MODULATED,)),
    Family("Stable Diffusion 3", ("SD3Transformer2DModel",), signals=(MODULATED,)),
    Family("LongCat-Image", ("LongCatImageTransformer2DModel",), signals=(MODULATED,)),
    Family("Ovis-Image", ("OvisImageTransformer2DModel",), signals=(MODULATED,)),
    Family("Bria", ("BriaTransformer2DModel", "BriaFiboTransformer2DModel"), signals=(MODULATED,)),
    Family("AuraFlow", ("AuraFlowTransformer2DModel",), signals=(MODULATED,)),
    Family("Motif-Video", ("MotifVideoTransformer3DModel",), signals=(MODULATED,)),
    Family("Chroma", ("ChromaTransformer2DModel",), signals=(Signal("modulated", of_block=pruned),)),
)
