"""CogVideoX and ConsisID: the signal is the timestep embedding alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..family import Family, Signal

_OFS = 2.0  # what the image-to-video pipeline always passes to CogVideoX 1.5


def embedding(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding, with the constant `ofs` embedding where the model has one."""
    emb = _embedded(transformer.time_proj, transformer.time_embedding, timesteps, transformer.dtype)
    if getattr(transformer, "ofs_embedding", None) is None:
        return emb
    ofs = torch.full_like(timesteps[:1], _OFS)
    return emb + _embedded(transformer.ofs_proj, transformer.ofs_embedding, ofs, transformer.dtype)


def _embedded(proj: nn.Module, embedder: nn.Module, values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    embedded: torch.Tensor = embedder(proj(values).to(dtype))
    return embedded


FAMILIES = (
    Family(
        "CogVideoX",
        ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
        signals=(Signal("time", of_time=embedding),),
    ),
)
