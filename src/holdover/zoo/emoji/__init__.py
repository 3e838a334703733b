"""A small text-to-emoji model whose weights ship with the package (recipe and model card: training/emoji)."""

from __future__ import annotations

from pathlib import Path

import torch

from .pipeline import EmojiPipeline
from .text import STYLES, caption

__all__ = ["STYLES", "WEIGHTS", "EmojiPipeline", "caption", "load"]

WEIGHTS = Path(__file__).parent / "weights"


def load(dtype: torch.dtype = torch.float32) -> EmojiPipeline:
    """The shipped model, read from the package folder: no network, safetensors and JSON alone."""
    pipeline: EmojiPipeline = EmojiPipeline.from_pretrained(
        WEIGHTS, dtype=dtype, local_files_only=True, use_safetensors=True
    )
    return pipeline
