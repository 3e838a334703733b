"""Small transformers with the contracts of three models that are not in diffusers, and pipelines that run them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from cache_dit import ForwardPattern
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn

from holdover.cache_dit_backend import BagelCachedAdapter, CacheDiTAdapterConfig, SensenovaCachedAdapter

WIDTH = 8


class NaiveCache:
    """Keys and values by layer: grows in prefill and text decoding, is read in denoising."""

    def __init__(self) -> None:
        self.keys: dict[int, torch.Tensor] = {}

    def write(self, layer: int, keys: torch.Tensor) -> None:
        before = self.keys.get(layer)
        self.keys[layer] = keys if before is None else torch.cat([before, keys])

    def read(self, layer: int) -> torch.Tensor:
        return self.keys[layer].mean(0) if layer in self.keys else torch.zeros(WIDTH)


class BagelLayer(nn.Module):
    """Takes the packed sequence and the KV cache, gives both back."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.net, self.keys = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(
        self, packed_query_sequence: torch.Tensor, past_key_values: NaiveCache, update_past_key_values: bool, mode: str
    ) -> tuple[torch.Tensor, NaiveCache]:
        if update_past_key_values:
            past_key_values.write(self.index, self.keys(packed_query_sequence))
        context = past_key_values.read(self.index)
        return packed_query_sequence + 0.2 * torch.tanh(self.net(packed_query_sequence) + context), past_key_values


class BagelTransformer(nn.Module):
    """BAGEL's language model: prefill, text decoding and denoising go through the same layers."""

    _cache_dit_adapter_config = CacheDiTAdapterConfig(
        block_forward_patterns={"layers": ForwardPattern.Pattern_0},
        cached_adapter_cls=BagelCachedAdapter,
        check_forward_pattern=False,
        has_separate_cfg=True,
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(BagelLayer(i) for i in range(4))
        self.time, self.norm = nn.Linear(1, WIDTH), nn.LayerNorm(WIDTH)

    def forward(
        self,
        packed_sequence: torch.Tensor,
        past_key_values: NaiveCache,
        update_past_key_values: bool = True,
        mode: str = "und",
        timestep: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = packed_sequence if timestep is None else packed_sequence + self.time(timestep[:, None])
        for layer in self.layers:
            hidden, past_key_values = layer(
                hidden, past_key_values, update_past_key_values=update_past_key_values, mode=mode
            )
        return self.norm(hidden)


class SensenovaLayer(nn.Module):
    """Takes hidden states and keywords, gives hidden states back."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, cache: list, update_cache: bool = True, **tokens: Any) -> Any:
        marks = tokens.get("image_gen_indicators")
        if marks is None:
            marks = torch.zeros(hidden_states.shape[0], dtype=torch.bool)
        if update_cache:
            cache.append(self.text(hidden_states))
        made = torch.where(marks[:, None], self.image(hidden_states), self.text(hidden_states))
        seen = sum(kept.mean(0) for kept in cache) if cache else 0.0
        return hidden_states + 0.2 * torch.tanh(made + seen)


class SensenovaTransformer(nn.Module):
    """SenseNova-U1's decoder."""

    _cache_dit_adapter_config = CacheDiTAdapterConfig(
        block_forward_patterns={"layers": ForwardPattern.Pattern_3},
        cached_adapter_cls=SensenovaCachedAdapter,
        check_forward_pattern=False,
        has_separate_cfg=True,
    )

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(SensenovaLayer() for _ in range(4))
        self.time = nn.Linear(1, WIDTH)

    def forward(self, inputs_embeds: torch.Tensor, timestep: torch.Tensor | None = None, **layer: Any) -> torch.Tensor:
        hidden = inputs_embeds if timestep is None else inputs_embeds + self.time(timestep[:, None])
        for each in self.layers:
            hidden = each(hidden, **layer)
        return hidden


class S2VBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden_states: torch.Tensor, e: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        return hidden_states + 0.2 * torch.tanh(self.net(hidden_states) + e + context.mean(1, keepdim=True))


class S2VTransformer(nn.Module):
    """Wan2.2 S2V: block(hidden_states, **kwargs), and audio injected after some of the blocks."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(S2VBlock() for _ in range(4))
        self.time, self.head = nn.Linear(1, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.injected: list[int] = []
        self.audio = torch.zeros(())

    def after_transformer_block(self, block_idx: int, hidden_states: torch.Tensor) -> torch.Tensor:
        if block_idx not in (0, 2):
            return hidden_states
        self.injected.append(block_idx)
        return hidden_states + self.audio

    def forward(
        self,
        hidden_states: torch.Tensor,
        timestep: torch.Tensor,
        encoder_hidden_states: torch.Tensor,
        audio: torch.Tensor,
    ) -> torch.Tensor:
        self.audio = audio
        kwargs = {"e": self.time(timestep[:, None])[:, None], "context": encoder_hidden_states}
        for idx, block in enumerate(self.blocks):
            hidden_states = block(hidden_states, **kwargs)
            hidden_states = self.after_transformer_block(idx, hidden_states)
        return self.head(hidden_states)


class Wan22S2VPipeline:
    """A loop over a scheduler's steps with guidance, as S2V's own pipeline runs it."""

    def __init__(self) -> None:
        self.transformer = S2VTransformer().eval()
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    @torch.no_grad()
    def __call__(self, steps: int = 12, seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(seed)
        latent = torch.randn(1, 5, WIDTH, generator=generator)
        words = [torch.randn(1, 3, WIDTH, generator=generator) for _ in range(2)]
        audio = 0.3 * torch.randn(1, 1, WIDTH, generator=generator)
        self.scheduler.set_timesteps(steps)
        for t in self.scheduler.timesteps:
            cond, uncond = (
                self.transformer(latent, timestep=t.expand(1) / 1000, encoder_hidden_states=w, audio=audio)
                for w in words
            )
            latent = self.scheduler.step(uncond + 2 * (cond - uncond), t, latent, return_dict=False)[0]
        return latent


def pipeline_of(transformer: nn.Module) -> SimpleNamespace:
    """The smallest pipeline: only a transformer."""
    return SimpleNamespace(transformer=transformer.eval())
