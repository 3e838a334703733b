"""BAGEL: decoder layers over a packed sequence, with a KV cache object where other models have an encoder stream."""

from __future__ import annotations

from typing import Any

import torch
from cache_dit.caching import BlockAdapter
from cache_dit.caching.cache_blocks.pattern_0_1_2 import CachedBlocks_Pattern_0_1_2
from torch import nn

from .adapters import StepAdapter
from .contexts import StepContextManager
from .unified import unified_blocks


class BagelCachedContextManager(StepContextManager):
    """Holds the packed sequence; the KV cache passes through untouched."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apply_cache(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        prefix: str = "Bn",
        encoder_prefix: str = "Bn_encoder",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """What the blocks would have made of the sequence, and the KV cache as it came."""
        stream = encoder_hidden_states if isinstance(encoder_hidden_states, torch.Tensor) else None
        hidden_states, stream = super().apply_cache(hidden_states, stream, prefix, encoder_prefix)
        return hidden_states, encoder_hidden_states if stream is None else stream


class BagelCachedBlocks(CachedBlocks_Pattern_0_1_2):  # type: ignore[misc]
    """The layers of BAGEL as one block; passes that write the KV cache run as they are."""

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Denoising passes may be held; prefill and text decoding never are."""
        if writes_kv(kwargs):
            states = self.call_blocks(hidden_states, encoder_hidden_states, *args, **kwargs)
            return self._process_forward_outputs(*states)
        return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    def call_Mn_blocks(
        self, hidden_states: torch.Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor | None]:
        """The middle layers, and what they added: to the sequence always, to the second stream if it is a tensor."""
        before, encoder_before = hidden_states, encoder_hidden_states
        for block in self._Mn_blocks():
            output = block(hidden_states, encoder_hidden_states, *args, **kwargs)
            hidden_states, encoder_hidden_states = self._process_block_outputs(output, encoder_hidden_states)
        hidden_states = hidden_states.contiguous()
        tensors = isinstance(encoder_hidden_states, torch.Tensor) and isinstance(encoder_before, torch.Tensor)
        added = encoder_hidden_states - encoder_before if tensors else None
        return hidden_states, encoder_hidden_states, hidden_states - before, added

    def compute_or_prune(
        self,
        block_id: int,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """One layer by itself: single layers are not held here, so it always runs."""
        output = block(hidden_states, encoder_hidden_states, *args, **kwargs)
        states: tuple[torch.Tensor, Any] = self._process_block_outputs(output, encoder_hidden_states)
        return states


class BagelCachedAdapter(StepAdapter):
    """Makes BagelCachedBlocks of a list of layers, over a BagelCachedContextManager."""

    manager_class = BagelCachedContextManager

    @classmethod
    def create_context(
        cls, block_adapter: BlockAdapter, **context_kwargs: Any
    ) -> tuple[list[str], list[dict[str, Any]]]:
        """The names and settings of the contexts, one for each list."""
        return super().create_context(block_adapter, **context_kwargs)

    @classmethod
    def collect_unified_blocks(
        cls, block_adapter: BlockAdapter, contexts_kwargs: list[dict[str, Any]]
    ) -> list[dict[str, nn.ModuleList]]:
        """One block for each list."""
        return unified_blocks(BagelCachedBlocks, block_adapter)


def writes_kv(arguments: dict[str, Any]) -> bool:
    """Whether a pass is prefill or text decoding: it writes keys and values, or runs in the understanding mode."""
    return bool(arguments.get("update_past_key_values")) or arguments.get("mode") == "und"
