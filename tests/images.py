"""Images of two processes that loaded the same weights: equal but for rounding.

Loaded tensors may lie at another alignment, for which a CPU chooses another kernel that sums in another order.
"""

from __future__ import annotations

import base64
import io

import numpy as np
from PIL import Image

ROUNDING = 1  # of 255


def assert_same_image(a: Image.Image | str, b: Image.Image | str) -> None:
    """Two images, or two PNG files in base64, differ by rounding at most."""
    first, second = (np.asarray(_open(image), dtype=np.int16) for image in (a, b))
    assert first.shape == second.shape
    assert np.abs(first - second).max() <= ROUNDING


def _open(image: Image.Image | str) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(image))) if isinstance(image, str) else image
