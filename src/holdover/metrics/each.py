"""A metric over a batch, with one value for a picture and one for a video."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .distances import nonwhite_error, psnr

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_OVER_PIXELS: tuple[Distance, ...] = (psnr, nonwhite_error)


def each(metric: Distance, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """One value for each picture of (N, C, H, W), or for each video of (N, F, C, H, W).

    What is a mean over pixels is one over the pixels of all frames; of other metrics the frames' mean is taken.
    """
    if a.ndim < 5:
        return metric(a, b)
    return metric(_tall(a), _tall(b)) if metric in _OVER_PIXELS else metric(a, b).mean(-1)


def _tall(videos: torch.Tensor) -> torch.Tensor:
    """The frames of each video one below the other."""
    return videos.transpose(1, 2).flatten(2, 3)
