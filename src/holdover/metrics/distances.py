"""Distances that are means over pixels."""

from __future__ import annotations

import torch

from ..errors import ConfigError

_WHITE = 254.5 / 255  # from here on a pixel is shown as white


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in decibels, one for each picture; infinite where the two are equal.

    The pictures are (C, H, W), or (..., C, H, W) for one value each, with a peak of 1.
    """
    a, b = paired(a, b)
    return -10 * torch.log10(((a - b) ** 2).mean((-3, -2, -1)))


def nonwhite_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean absolute error over the pixels that are not white in both pictures; 0 where all are.

    A white ground is equal without anybody's merit and hides what happened to the thing that stands on it.
    """
    a, b = paired(a, b)
    drawn = ((a < _WHITE) | (b < _WHITE)).any(-3)
    error = (a - b).abs().mean(-3) * drawn
    return error.sum((-2, -1)) / drawn.sum((-2, -1)).clamp(min=1)


def paired(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in double precision on the device of the first, if they are float pictures of one shape."""
    for picture in (a, b):
        if not picture.is_floating_point():
            raise ConfigError(f"Pictures are floats in [0, 1], not {picture.dtype}; see holdover.metrics.as_images.")
    if a.shape != b.shape or a.ndim < 3:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ConfigError(f"Two pictures (..., C, H, W) of one shape are compared, not {shapes}.")
    return a.detach().double(), b.detach().to(a.device).double()
