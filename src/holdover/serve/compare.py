"""Two pictures beside each other, in decibels."""

from __future__ import annotations

import base64
import binascii
import io
import math

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError

from ..metrics import psnr
from .errors import invalid, too_large
from .schemas import Comparison


def compared(a: str, b: str, max_size: int) -> Comparison:
    """The PSNR of two PNG files in base64."""
    first, second = _picture("a", a, max_size), _picture("b", b, max_size)
    if first.shape != second.shape:
        raise invalid(f"The pictures have different sizes: {_size(first)} and {_size(second)}.", "b")
    decibels = float(psnr(first, second))
    return Comparison(psnr=decibels if math.isfinite(decibels) else None, equal=bool(torch.equal(first, second)))


def _picture(name: str, text: str, max_size: int) -> torch.Tensor:
    try:
        image = Image.open(io.BytesIO(base64.b64decode(text, validate=True)), formats=["PNG"])
        if max(image.size) > max_size:
            raise too_large(f"{name} is {image.width}x{image.height}; the longest side may have {max_size}.", name)
        pixels = np.array(image.convert("RGB"))
    except (binascii.Error, UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError):
        raise invalid(f"{name} is not a PNG in base64.", name) from None
    return torch.from_numpy(pixels).permute(2, 0, 1).double() / 255


def _size(picture: torch.Tensor) -> str:
    return f"{picture.shape[2]}x{picture.shape[1]}"
