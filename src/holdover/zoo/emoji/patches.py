"""Pictures as token rows and back: a picture of H x W pixels is (H/p)(W/p) tokens of 3 p p channels."""

from __future__ import annotations

import torch


def pack(pictures: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, H, W) -> (B, H/p * W/p, C*p*p), patches in reading order."""
    batch, channels, height, width = pictures.shape
    grid = pictures.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return grid.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * patch * patch)


def unpack(tokens: torch.Tensor, height: int, width: int, patch: int) -> torch.Tensor:
    """The inverse of `pack`."""
    batch, _, size = tokens.shape
    channels = size // (patch * patch)
    grid = tokens.reshape(batch, height // patch, width // patch, channels, patch, patch)
    return grid.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels, height, width)


def position_ids(height: int, width: int, patch: int, device: torch.device | None = None) -> torch.Tensor:
    """(0, row, column) of every patch, as FluxTransformer2DModel takes it in `img_ids`."""
    rows = torch.arange(height // patch, device=device)
    columns = torch.arange(width // patch, device=device)
    grid = torch.cartesian_prod(torch.zeros(1, dtype=rows.dtype, device=device), rows, columns)
    return grid.float()
