"""Adapters for three models that need blocks of their own: BAGEL, SenseNova-U1 and Wan2.2 S2V.

A transformer class names its adapter in `_cache_dit_adapter_config`, or the caller gives it to `enable_cache_for_dit`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from cache_dit.caching.cache_blocks import CachedBlocks_Pattern_0_1_2, CachedBlocks_Pattern_3_4_5
from torch import Tensor, nn

from .adapters import StepAdapter
from .contexts import StepContextManager
from .patches import Patches

# BAGEL: decoder layers over a packed sequence, with a KV cache object in the place of encoder states.


class BagelCachedContextManager(StepContextManager):
    """Holds the packed sequence and passes the KV cache through unchanged."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def apply_cache(
        self,
        hidden_states: Tensor,
        encoder_hidden_states: Any = None,
        prefix: str = "Bn",
        encoder_prefix: str = "Bn_encoder",
    ) -> tuple[Tensor, Any]:
        stream = encoder_hidden_states if isinstance(encoder_hidden_states, Tensor) else None
        hidden_states, stream = super().apply_cache(hidden_states, stream, prefix, encoder_prefix)
        return hidden_states, encoder_hidden_states if stream is None else stream


class BagelCachedBlocks(CachedBlocks_Pattern_0_1_2):  # type: ignore[misc]
    """The layers of BAGEL as one block. Prefill and text decoding, which write the KV cache, are always computed."""

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("update_past_key_values") or kwargs.get("mode") == "und":
            states = self.call_blocks(hidden_states, encoder_hidden_states, *args, **kwargs)
            return self._process_forward_outputs(*states)
        return super().forward(hidden_states, encoder_hidden_states, *args, **kwargs)

    def call_Mn_blocks(
        self, hidden_states: Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any, Tensor, Tensor | None]:
        """Run the middle layers; returns both streams and their residuals, the second only if it is a tensor."""
        before, encoder_before = hidden_states, encoder_hidden_states
        for index, block in enumerate(self._Mn_blocks()):
            states = self.compute_or_prune(index, block, hidden_states, encoder_hidden_states, *args, **kwargs)
            hidden_states, encoder_hidden_states = states
        hidden_states = hidden_states.contiguous()
        tensors = isinstance(encoder_hidden_states, Tensor) and isinstance(encoder_before, Tensor)
        encoder_residual = encoder_hidden_states - encoder_before if tensors else None
        return hidden_states, encoder_hidden_states, hidden_states - before, encoder_residual

    def compute_or_prune(
        self, block_id: int, block: Any, hidden_states: Tensor, encoder_hidden_states: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one layer and return both streams; single layers are never pruned."""
        output = block(hidden_states, encoder_hidden_states, *args, **kwargs)
        return self._process_block_outputs(output, encoder_hidden_states)


class BagelCachedAdapter(StepAdapter):
    """Uses BagelCachedBlocks and BagelCachedContextManager."""

    manager_class = BagelCachedContextManager
    blocks_class = BagelCachedBlocks


# SenseNova-U1: one decoder for text and image tokens.


class SensenovaCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The layers of SenseNova-U1 as one block; only denoising passes over image tokens may be held.

    Passes with text tokens, passes that write the KV cache, and passes whose arguments do not say so are computed.
    """

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        denoising = not kwargs.pop("cache_dit_skip", False) and not kwargs.get("update_cache", True)
        image, text, indicators = (kwargs.get(name) for name in ("exist_gen", "exist_und", "image_gen_indicators"))
        if image is not None and text is not None:
            denoising = denoising and bool(image) and not bool(text)
        else:
            denoising = denoising and indicators is not None and indicators.numel() > 0 and bool(indicators.all())
        if denoising:
            return super().forward(hidden_states, *args, **kwargs)
        return self._process_forward_outputs(*self.call_blocks(hidden_states, *args, **kwargs))


class SensenovaCachedAdapter(StepAdapter):
    """Uses SensenovaCachedBlocks."""

    blocks_class = SensenovaCachedBlocks


# Wan2.2 S2V: the transformer, not its blocks, injects audio after some of the layers.

_INJECT = "after_transformer_block"


class Wan22S2VCachedBlocks(CachedBlocks_Pattern_3_4_5):  # type: ignore[misc]
    """The blocks of S2V as one, with audio injected after each block as in the transformer's own loop."""

    def call_blocks(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self._run(0, len(self.transformer_blocks), hidden_states, *args, **kwargs), None

    def call_Fn_blocks(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        return self._run(0, self.context_manager.Fn_compute_blocks(), hidden_states, *args, **kwargs), None

    def call_Mn_blocks(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None, Tensor]:
        first = self.context_manager.Fn_compute_blocks()
        end = len(self.transformer_blocks) - self.context_manager.Bn_compute_blocks()
        after = self._run(first, end, hidden_states, *args, **kwargs).contiguous()
        return after, None, after - hidden_states

    def call_Bn_blocks(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        end = len(self.transformer_blocks)
        return self._run(end - self.context_manager.Bn_compute_blocks(), end, hidden_states, *args, **kwargs), None

    def _run(self, first: int, end: int, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        # From the class: on the instance it is patched to do nothing while this block runs.
        inject: Callable[..., Any] | None = getattr(type(self.transformer), _INJECT, None)
        for index in range(first, end):
            output = self.transformer_blocks[index](hidden_states, *args, **kwargs)
            hidden_states = self._process_block_outputs(output)[0]
            if inject is not None:
                hidden_states = inject(self.transformer, index, hidden_states)
        return hidden_states


class Wan22S2VCachedAdapter(StepAdapter):
    """Uses Wan22S2VCachedBlocks, and keeps the transformer's loop from injecting the audio a second time."""

    blocks_class = Wan22S2VCachedBlocks

    @classmethod
    def patches(cls, transformer: nn.Module) -> Patches:
        patches = Patches()
        if hasattr(transformer, _INJECT):
            patches.add(transformer, _INJECT, lambda block_idx, hidden_states: hidden_states)
        return patches
