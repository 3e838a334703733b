"""SenseNova-U1: one decoder for text and image tokens; only the image tokens of a denoising pass are held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from cache_dit.caching import BlockAdapter
from cache_dit.caching.cache_blocks.pattern_3_4_5 import CachedBlocks_Pattern_3_4_5
from torch import nn

from .adapters import StepAdapter
from .unified import unified_blocks


class SensenovaCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The layers of SenseNova-U1 as one block; a pass with text tokens, or one that writes its cache, runs as it is."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Image tokens of a denoising pass may be held, nothing else."""
        skip = kwargs.pop("cache_dit_skip", False)
        if skip or not denoises(kwargs):
            return self._process_forward_outputs(*self.call_blocks(hidden_states, *args, **kwargs))
        return super().forward(hidden_states, *args, **kwargs)


class SensenovaCachedAdapter(StepAdapter):
    """Makes SensenovaCachedBlocks of a list of layers."""

    @classmethod
    def collect_unified_blocks(
        cls, block_adapter: BlockAdapter, contexts_kwargs: list[dict[str, Any]]
    ) -> list[dict[str, nn.ModuleList]]:
        """One block for each list."""
        return unified_blocks(SensenovaCachedBlocks, block_adapter)


def denoises(arguments: Mapping[str, Any]) -> bool:
    """Whether a pass leaves the cache alone and has image tokens only; what is not said is not assumed."""
    if arguments.get("update_cache", True):
        return False
    image, text = arguments.get("exist_gen"), arguments.get("exist_und")
    marks = arguments.get("image_gen_indicators")
    if image is not None and text is not None:
        return bool(image) and not bool(text)
    return marks is not None and marks.numel() > 0 and bool(marks.all())
