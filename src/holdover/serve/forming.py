"""Pictures before they are finished: from latents in the middle of a generation to something to look at."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler
from PIL import Image

from ..zoo.emoji import EmojiPipeline

Size = tuple[int, int]
Decoder = Callable[[torch.Tensor, Size], torch.Tensor]


def decoder_of(pipeline: Any) -> Decoder | None:
    """How this pipeline turns latents into pictures in [0, 1]; None where only the pipeline itself knows."""
    if isinstance(pipeline, EmojiPipeline):
        return lambda latents, size: pipeline.decode_latents(latents, size[1], size[0]) / 2 + 0.5
    vae = pipeline.components.get("vae")
    if not isinstance(vae, AutoencoderKL):
        return None
    unpack = getattr(type(pipeline), "_unpack_latents", None)

    def decode(latents: torch.Tensor, size: Size) -> torch.Tensor:
        if latents.ndim == 3 and unpack is not None:
            latents = unpack(latents, size[1], size[0], pipeline.vae_scale_factor)
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pictures: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return pictures / 2 + 0.5

    return decode


class Forming:
    """Follows the latents of one generation and shows the picture they lead to."""

    def __init__(self, decode: Decoder, scheduler: Any, size: Size) -> None:
        self._decode, self._scheduler, self._size = decode, scheduler, size
        self._before: torch.Tensor | None = None
        self._latents: torch.Tensor | None = None

    def follow(self, latents: torch.Tensor) -> None:
        """A step has ended with these latents."""
        self._before, self._latents = self._latents, latents

    @torch.no_grad()
    def pictures(self, step: int) -> torch.Tensor:
        """The pictures after the step of that index, (B, 3, H, W) in bytes."""
        assert self._latents is not None
        return to_bytes(self._decode(self._led_to(step), self._size))

    def _led_to(self, step: int) -> torch.Tensor:
        """Where the straight line of a flow would end; for other schedulers the latents themselves, noise and all."""
        assert self._latents is not None
        if self._before is None or not isinstance(self._scheduler, FlowMatchEulerDiscreteScheduler):
            return self._latents
        was, now = (float(sigma) for sigma in self._scheduler.sigmas[step : step + 2])
        return self._latents - now / (now - was) * (self._latents - self._before)


def to_bytes(pictures: torch.Tensor) -> torch.Tensor:
    """Pictures in [0, 1] as bytes on the host, rounded as diffusers rounds them."""
    return (pictures.float().clamp(0, 1) * 255).round().to(torch.uint8).cpu()


def as_png(picture: torch.Tensor, size: Size) -> str:
    """One picture of bytes in that size, as a PNG file in base64."""
    image = Image.fromarray(picture.permute(1, 2, 0).numpy())
    if image.size != size:
        image = image.resize(size, Image.Resampling.LANCZOS)
    file = io.BytesIO()
    image.save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode("ascii")
