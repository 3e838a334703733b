"""Video files: MP4 with PyAV, GIF with pillow. Knows no pipeline."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from .errors import ConfigError, HoldoverError

__all__ = ["FORMATS", "write_video"]

FORMATS = (".mp4", ".gif")
_QUALITY = "18"  # the rate factor of H.264 at which a difference is hardly visible


def write_video(path: Path, frames: Iterable[torch.Tensor], fps: float, comment: str = "") -> None:
    """Write float frames (3, H, W) to an MP4 or GIF file, whose name ends accordingly.

    Frames are taken one at a time: those of an MP4 may come from a generator and are not kept; pillow collects those
    of a GIF. A file appears under its name only when it is complete. `comment` is stored in the file.
    """
    if path.suffix.lower() not in FORMATS:
        raise ConfigError(f"A video file ends with {' or '.join(FORMATS)}, not {path.name!r}.")
    temporary = path.with_name(f".{path.name}.new{path.suffix}")
    pixels = (_to_pixels(frame) for frame in frames)
    try:
        if path.suffix.lower() == ".mp4":
            _write_mp4(temporary, pixels, fps, comment)
        else:
            _write_gif(temporary, pixels, fps, comment)
        temporary.replace(path)
    except OSError as error:
        raise HoldoverError(f"Cannot write {path}: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _to_pixels(frame: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    """A frame as (H, W, 3) bytes."""
    rounded = (frame.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return np.ascontiguousarray(rounded.expand(3, -1, -1).movedim(0, -1).cpu().numpy())


def _write_mp4(
    path: Path, frames: Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]], fps: float, comment: str
) -> None:
    """H.264 with 4:2:0 chroma, which every browser plays; an odd side is extended by one row or column."""
    try:
        import av
    except ImportError:
        raise HoldoverError("An MP4 file needs av: pip install 'holdover[video]'.") from None
    with av.open(str(path), "w", options={"movflags": "+faststart"}) as container:
        container.metadata["comment"] = comment
        stream = None
        for pixels in frames:
            height, width = pixels.shape[:2]
            even = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
            if stream is None:
                rate = Fraction(fps).limit_denominator(1001)
                stream = container.add_stream("libx264", rate=rate, options={"crf": _QUALITY})
                stream.height, stream.width, stream.pix_fmt = even.shape[0], even.shape[1], "yuv420p"
            container.mux(stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))
        if stream is None:
            raise ConfigError("A video needs at least one frame.")
        container.mux(stream.encode())


def _write_gif(
    path: Path, frames: Iterator[np.ndarray[tuple[int, ...], np.dtype[np.uint8]]], fps: float, comment: str
) -> None:
    images = (Image.fromarray(pixels) for pixels in frames)
    first = next(images, None)
    if first is None:
        raise ConfigError("A video needs at least one frame.")
    # GIF counts in hundredths of a second, and players slow down a frame of less than two.
    duration = max(20, round(100 / fps) * 10)
    first.save(path, save_all=True, append_images=images, duration=duration, loop=0, comment=comment.encode())
