"""Adapters for three models that need blocks of their own: BAGEL, SenseNova-U1 and Wan2.2 S2V.

None of them is in diffusers. An adapter is named in a transformer's `_cache_dit_adapter_config`, or given to
`enable_cache_for_dit`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from cache_dit.caching.cache_blocks import CachedBlocks_Pattern_0_1_2, CachedBlocks_Pattern_3_4_5
from torch import nn

from .adapters import Patches, StepAdapter
from .contexts import StepContextManager

# BAGEL: decoder layers over a packed sequence, with a KV cache object in the place of encoder states.


class BagelCachedContextManager(StepContextManager):
    """Holds the packed sequence and passes the KV cache through unchanged."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apply_cache(
        self,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        prefix: str = "Bn",
        encoder_prefix: str = "Bn_encoder",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The predicted output of the blocks, and the KV cache as it was given."""
        stream = encoder_hidden_states if isinstance(encoder_hidden_states, torch.Tensor) else None
        hidden_states, stream = super().apply_cache(hidden_states, stream, prefix, encoder_prefix)
        return hidden_states, encoder_hidden_states if stream is None else stream


class BagelCachedBlocks(CachedBlocks_Pattern_0_1_2):  # type: ignore[misc]
    """The layers of BAGEL as one block; passes that write the KV cache are always computed."""

    def forward(self, hidden_states: torch.Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        """Hold denoising passes only, never prefill or text decoding."""
        if kwargs.get("update_past_key_values") or kwargs.get("mode") == "und":
            states = self.call_blocks(hidden_states, encoder_hidden_states, *args, **kwargs)
            return self._process_forward_outputs(*states)
        return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    def call_Mn_blocks(
        self, hidden_states: torch.Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, Any, torch.Tensor, torch.Tensor | None]:
        """Run the middle layers; returns both streams and their residuals, the second only if it is a tensor."""
        before, encoder_before = hidden_states, encoder_hidden_states
        for block in self._Mn_blocks():
            output = block(hidden_states, encoder_hidden_states, *args, **kwargs)
            hidden_states, encoder_hidden_states = self._process_block_outputs(output, encoder_hidden_states)
        hidden_states = hidden_states.contiguous()
        tensors = isinstance(encoder_hidden_states, torch.Tensor) and isinstance(encoder_before, torch.Tensor)
        encoder_residual = encoder_hidden_states - encoder_before if tensors else None
        return hidden_states, encoder_hidden_states, hidden_states - before, encoder_residual

    def compute_or_prune(
        self,
        block_id: int,
        block: nn.Module,
        hidden_states: torch.Tensor,
        encoder_hidden_states: Any,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, Any]:
        """Run one layer; single layers are never pruned here."""
        output = block(hidden_states, encoder_hidden_states, *args, **kwargs)
        states: tuple[torch.Tensor, Any] = self._process_block_outputs(output, encoder_hidden_states)
        return states


class BagelCachedAdapter(StepAdapter):
    """Uses BagelCachedBlocks and BagelCachedContextManager."""

    manager_class = BagelCachedContextManager
    blocks_class = BagelCachedBlocks


# SenseNova-U1: one decoder for text and image tokens.


class SensenovaCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The layers of SenseNova-U1 as one block; passes with text tokens, or that write the cache, are computed."""

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Hold only the image tokens of denoising passes."""
        skip = kwargs.pop("cache_dit_skip", False)
        if skip or not _is_denoising(kwargs):
            return self._process_forward_outputs(*self.call_blocks(hidden_states, *args, **kwargs))
        return super().forward(hidden_states, *args, **kwargs)


class SensenovaCachedAdapter(StepAdapter):
    """Uses SensenovaCachedBlocks."""

    blocks_class = SensenovaCachedBlocks


def _is_denoising(arguments: Mapping[str, Any]) -> bool:
    """Whether a pass only reads the cache and has only image tokens; False if the arguments do not tell."""
    if arguments.get("update_cache", True):
        return False
    image, text = arguments.get("exist_gen"), arguments.get("exist_und")
    indicators = arguments.get("image_gen_indicators")
    if image is not None and text is not None:
        return bool(image) and not bool(text)
    return indicators is not None and indicators.numel() > 0 and bool(indicators.all())


# Wan2.2 S2V: the transformer, not its blocks, injects audio after some of the layers.

_INJECT = "after_transformer_block"


class Wan22S2VCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The blocks of S2V as one, with audio injected after each block as in the transformer's own loop."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # From the class: on the instance it is patched to do nothing while this block runs.
        self._inject: Callable[..., Any] | None = getattr(type(self.transformer), _INJECT, None)

    def call_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Run all blocks."""
        return self._run(0, len(self.transformer_blocks), hidden_states, *args, **kwargs), None

    def call_Fn_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Run the first blocks, which are never held."""
        return self._run(0, self.context_manager.Fn_compute_blocks(), hidden_states, *args, **kwargs), None

    def call_Mn_blocks(
        self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, None, torch.Tensor]:
        """Run the middle blocks; the residual includes the audio."""
        first = self.context_manager.Fn_compute_blocks()
        after = self._run(first, self._first_of_last(), hidden_states, *args, **kwargs).contiguous()
        return after, None, after - hidden_states

    def call_Bn_blocks(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        """Run the last blocks, which are never held."""
        return self._run(self._first_of_last(), len(self.transformer_blocks), hidden_states, *args, **kwargs), None

    def _first_of_last(self) -> int:
        return len(self.transformer_blocks) - int(self.context_manager.Bn_compute_blocks())

    def _run(self, first: int, end: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        for index in range(first, end):
            hidden_states = self._run_block(index, hidden_states, *args, **kwargs)
        return hidden_states

    def _run_block(self, index: int, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        output = self.transformer_blocks[index](hidden_states, *args, **kwargs)
        hidden: torch.Tensor = self._process_block_outputs(output)[0]
        return hidden if self._inject is None else self._inject(self.transformer, index, hidden)


class Wan22S2VCachedAdapter(StepAdapter):
    """Uses Wan22S2VCachedBlocks, and keeps the transformer's loop from injecting the audio a second time."""

    blocks_class = Wan22S2VCachedBlocks

    @classmethod
    def patches(cls, transformer: nn.Module) -> Patches:
        """While a forward runs, the transformer's own injection returns its input."""
        patches = Patches()
        if hasattr(transformer, _INJECT):
            patches.add(transformer, _INJECT, lambda block_idx, hidden_states: hidden_states)
        return patches
