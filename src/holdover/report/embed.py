"""Pictures as data inside the page."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from PIL import Image

_LARGEST = 448
_SMALL = 160


def data_uri(path: Path) -> str:
    """A picture as a data URI: small ones as they are, large ones reduced to what a screen shows."""
    with Image.open(path) as picture:
        if max(picture.size) <= _SMALL:
            return _uri("image/png", path.read_bytes())
        picture.thumbnail((_LARGEST, _LARGEST), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        picture.save(buffer, "WEBP", quality=88, method=6)
    return _uri("image/webp", buffer.getvalue())


def _uri(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode('ascii')}"
