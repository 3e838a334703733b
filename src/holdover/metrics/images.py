"""From what a pipeline returns to float pictures (N, C, H, W), or videos (N, F, C, H, W), in [0, 1]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from ..errors import ConfigError


def as_images(output: Any) -> torch.Tensor:
    """Pictures or videos as floats in [0, 1], whatever `output_type` they were made with.

    Tensors are "pt": (C, H, W), (N, C, H, W) or (N, F, C, H, W). Arrays are "np": the same with the channels last. A
    PIL picture, a list of them, or a list of such lists (a video each) is taken too, but is rounded to 8 bits already.
    """
    if isinstance(output, torch.Tensor):
        return _in_range(_batched(_floats(output)))
    if isinstance(output, np.ndarray):
        return _in_range(_batched(_floats(torch.from_numpy(output)).movedim(-1, -3)))
    if isinstance(output, Image.Image):
        return _from_pil(output)[None]
    if isinstance(output, Sequence) and not isinstance(output, str) and len(output):
        return _in_range(torch.cat([_entry(entry) for entry in output]))
    raise ConfigError(f"Pictures are tensors, arrays or PIL images, not {type(output).__name__}.")


def latents_as_images(latents: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Latents as pictures: `low` becomes 0 and `high` becomes 1, and what is beyond them stays beyond.

    Take both from the reference, so that two sets of latents are measured alike. Packed latents (N, tokens, channels)
    become pictures of one channel, videos (N, C, F, H, W) become (N, F, C, H, W).
    """
    if not high > low:
        raise ConfigError(f"Latents need a range: high ({high:g}) must be more than low ({low:g}).")
    scaled = (latents.detach().float() - low) / (high - low)
    if scaled.ndim == 3:
        return scaled[:, None]
    return scaled.transpose(1, 2) if scaled.ndim == 5 else scaled


def _entry(entry: Any) -> torch.Tensor:
    """One picture or video of a list, as a batch of one."""
    if isinstance(entry, (list, tuple)):
        return torch.cat([as_images(frame) for frame in entry])[None]
    images = as_images(entry)
    return images if images.ndim == 5 or len(images) == 1 else images[None]


def _from_pil(picture: Image.Image) -> torch.Tensor:
    array = np.asarray(picture if picture.mode in ("L", "RGB") else picture.convert("RGB"))
    return (torch.from_numpy(array.copy()).float() / 255).reshape(*array.shape[:2], -1).movedim(-1, -3)


def _floats(values: torch.Tensor) -> torch.Tensor:
    if not values.is_floating_point():
        raise ConfigError(
            f"Pictures of {values.dtype} are rounded; ask the pipeline for floats with output_type='pt' or 'np'."
        )
    return values.detach().to(torch.promote_types(values.dtype, torch.float32))


def _batched(values: torch.Tensor) -> torch.Tensor:
    if not 3 <= values.ndim <= 5:
        raise ConfigError(f"Pictures have 3, 4 or 5 dimensions, videos 5; this has shape {tuple(values.shape)}.")
    return values[None] if values.ndim == 3 else values


def _in_range(images: torch.Tensor) -> torch.Tensor:
    """Refuse what cannot be a picture in [0, 1]: pixels in -1..1 or 0..255, or latents."""
    low, high = images.aminmax() if images.numel() else (torch.zeros(()), torch.zeros(()))
    if low < -1e-3 or high > 1 + 1e-3:
        raise ConfigError(
            f"Pictures are floats in [0, 1], but these run from {low:.3g} to {high:.3g}; "
            "for latents use latents_as_images."
        )
    return images
