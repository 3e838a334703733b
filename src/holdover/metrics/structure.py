"""SSIM (Wang, Bovik, Sheikh, Simoncelli 2004): luminance, contrast and structure under a Gaussian window."""

from __future__ import annotations

import torch
from torch.nn.functional import conv2d

from ..errors import ConfigError
from .distances import paired

_SIGMA, _RADIUS = 1.5, 5
_C1, _C2 = 0.01**2, 0.03**2


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Structural similarity, one for each picture (C, H, W) or (..., C, H, W); 1 where the two are equal.

    The mean over the channels and over the places where the whole window of 11 x 11 lies in the picture: nothing is
    padded, and the five pixels at each border count only as neighbours.
    """
    a, b = paired(a, b)
    height, width = a.shape[-2:]
    if min(height, width) <= 2 * _RADIUS:
        raise ConfigError(f"SSIM has a window of 11 x 11; the pictures are {height} x {width}.")
    mean_a, mean_b = _blurred(a), _blurred(b)
    variance_a = _blurred(a * a) - mean_a**2
    variance_b = _blurred(b * b) - mean_b**2
    covariance = _blurred(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _C1) / (mean_a**2 + mean_b**2 + _C1)
    structure = (2 * covariance + _C2) / (variance_a + variance_b + _C2)
    return (luminance * structure).mean((-3, -2, -1))


def _blurred(images: torch.Tensor) -> torch.Tensor:
    """Each plane under the Gaussian window, along rows and then along columns."""
    offsets = torch.arange(-_RADIUS, _RADIUS + 1, dtype=images.dtype, device=images.device)
    window = torch.exp(-(offsets**2) / (2 * _SIGMA**2))
    window = window / window.sum()
    planes = images.reshape(-1, 1, *images.shape[-2:])
    planes = conv2d(conv2d(planes, window.view(1, 1, 1, -1)), window.view(1, 1, -1, 1))
    return planes.reshape(*images.shape[:-2], *planes.shape[-2:])
