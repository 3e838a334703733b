"""HiDream-I1: the timestep embedding for the full model, the embedded latent for the distilled ones."""

from __future__ import annotations

from typing import Any

import torch

from ..family import Family, Signal
from ..registry import INPUT


def embedding(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding, before the pooled prompt is added."""
    embedded: torch.Tensor = transformer.t_embedder(timesteps, transformer.dtype)
    return embedded


FAMILIES = (
    Family(
        "HiDream-I1",
        ("HiDreamImageTransformer2DModel",),
        signals=(Signal("time", of_time=embedding), INPUT),
    ),
)
