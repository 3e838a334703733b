"""LPIPS (Zhang et al. 2018), where its weights already are on this machine. Nothing is ever downloaded."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import torch

from ..errors import HoldoverError
from .distances import paired

_BACKBONE = "alexnet-owt-7be5be79.pth"


def lpips_missing() -> str | None:
    """Why LPIPS cannot be measured here, or None where it can."""
    for package in ("torchmetrics", "torchvision"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed: pip install 'holdover[lpips]'"
    weights = Path(torch.hub.get_dir()) / "checkpoints" / _BACKBONE
    return None if weights.exists() else f"its weights are not at {weights}"


def lpips(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Distance of AlexNet's features, one for each colour picture (3, H, W) or (..., 3, H, W); 0 where equal."""
    missing = lpips_missing()
    if missing is not None:
        raise HoldoverError(f"LPIPS is not available: {missing}.")
    from torchmetrics.functional.image import learned_perceptual_image_patch_similarity as distance

    a, b = paired(a, b)
    one = (-1, 1, *a.shape[-3:])
    pairs = zip(a.float().clamp(0, 1).reshape(one), b.float().clamp(0, 1).reshape(one), strict=True)
    values = [distance(x, y, "alex", normalize=True) for x, y in pairs]
    return torch.stack(values).reshape(a.shape[:-3])
