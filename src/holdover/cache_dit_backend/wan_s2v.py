"""Wan2.2 S2V: audio is injected after certain layers, by the transformer and not by its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from cache_dit.caching import BlockAdapter
from cache_dit.caching.cache_blocks.pattern_3_4_5 import CachedBlocks_Pattern_3_4_5
from torch import nn

from .adapters import StepAdapter
from .patches import Patches
from .unified import unified_blocks

_AFTER = "after_transformer_block"


class Wan22S2VCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The blocks of S2V as one, with the audio injected after each as the transformer's own loop would."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # The class's own: on the instance it does nothing while this block runs.
        self._inject: Callable[..., Any] | None = getattr(type(self.transformer), _AFTER, None)

    def call_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Every block, nothing held."""
        return self._run(range(len(self.transformer_blocks)), hidden_states, *args, **kwargs), None

    def call_Fn_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """The first blocks, which always run."""
        return self._run(range(self.context_manager.Fn_compute_blocks()), hidden_states, *args, **kwargs), None

    def call_Mn_blocks(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """The blocks between, and what they and the audio add."""
        first, last = self.context_manager.Fn_compute_blocks(), self._last()
        after = self._run(range(first, last), hidden_states, *args, **kwargs).contiguous()
        return after, None, after - hidden_states

    def call_Bn_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """The last blocks, which always run."""
        return self._run(range(self._last(), len(self.transformer_blocks)), hidden_states, *args, **kwargs), None

    def _last(self) -> int:
        return len(self.transformer_blocks) - int(self.context_manager.Bn_compute_blocks())

    def _run(self, which: Sequence[int], hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for index in which:
            hidden_states = self._run_block(index, hidden_states, *args, **kwargs)
        return hidden_states

    def _run_block(self, index: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.transformer_blocks[index](hidden_states, *args, **kwargs)
        hidden: torch.Tensor = self._process_block_outputs(output)[0]
        return hidden if self._inject is None else self._inject(self.transformer, index, hidden)


class Wan22S2VCachedAdapter(StepAdapter):
    """Makes Wan22S2VCachedBlocks of the blocks, and keeps the transformer's loop from injecting a second time."""

    @classmethod
    def collect_unified_blocks(
        cls, block_adapter: BlockAdapter, contexts_kwargs: list[dict[str, Any]]
    ) -> list[dict[str, nn.ModuleList]]:
        """One block for each list."""
        return unified_blocks(Wan22S2VCachedBlocks, block_adapter)

    @classmethod
    def patches(cls, transformer: nn.Module) -> Patches:
        """While a forward runs, the transformer's own injection gives back what it gets."""
        patches = Patches()
        if hasattr(transformer, _AFTER):
            patches.put(transformer, _AFTER, lambda block_idx, hidden_states: hidden_states)
        return patches
