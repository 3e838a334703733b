"""Video files: MP4 with PyAV, GIF and WebP with pillow; frames that are written while the VAE still decodes others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from PIL import Image

from .errors import ConfigError, HoldoverError, WriteError

__all__ = ["FORMATS", "VideoFile", "default_rate", "read_frames", "stream_frames", "write_video"]

FORMATS = (".mp4", ".gif", ".webp")
_H264 = {"crf": "18"}  # the rate factor at which a difference is hardly visible
if torch.backends.cpu.get_cpu_capability() == "AVX512":
    _H264["x264-params"] = "asm=avx2"  # x264's AVX-512 code does not always give the same bits for the same frames

Pixels = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]


class VideoFile:
    """A video file that is written frame by frame, in a `with` block; its name ends with one of `FORMATS`.

    The frames of an MP4 are encoded as they come and not kept; those of GIF and WebP, which pillow writes, are kept in
    8 bits until the end. The file appears under its name only when it is complete. `comment` is stored in it; WebP has
    no place for one.
    """

    def __init__(self, path: Path, fps: float, comment: str = "") -> None:
        self.kind = path.suffix.lower()
        if self.kind not in FORMATS:
            raise ConfigError(f"A video file ends with {' or '.join(FORMATS)}, not {path.name!r}.")
        self.path, self.fps, self.comment, self.count = path, fps, comment, 0
        self._temporary = path.with_name(f".{path.name}.new{path.suffix}")
        self._images: list[Image.Image] = []
        self._container: Any = None
        self._stream: Any = None

    def __enter__(self) -> Self:
        if self.kind == ".mp4":
            try:
                import av
            except ImportError:
                raise HoldoverError("An MP4 file needs av: pip install 'holdover[video]'.") from None
            with self._clear_errors():
                self._container = av.open(str(self._temporary), "w", options={"movflags": "+faststart"})
            self._container.metadata["comment"] = self.comment
        return self

    def add(self, frame: torch.Tensor) -> None:
        """Write the next frame: (3, H, W) or (1, H, W) in [0, 1]."""
        pixels = to_pixels(frame)
        self.count += 1
        if self.kind != ".mp4":
            self._images.append(Image.fromarray(pixels))
            return
        with self._clear_errors():
            self._encode(pixels)

    def _encode(self, pixels: Pixels) -> None:
        """H.264 with 4:2:0 chroma, which every browser plays; an odd side is extended by one row or column."""
        import av

        height, width = pixels.shape[:2]
        even = np.pad(pixels, ((0, height % 2), (0, width % 2), (0, 0)), "edge")
        if self._stream is None:
            rate = Fraction(self.fps).limit_denominator(1001)
            self._stream = self._container.add_stream("libx264", rate=rate, options=_H264)
            self._stream.height, self._stream.width, self._stream.pix_fmt = *even.shape[:2], "yuv420p"
        self._container.mux(self._stream.encode(av.VideoFrame.from_ndarray(even, format="rgb24")))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            with self._clear_errors():
                if kind is None:
                    self._finish()
                    self._temporary.replace(self.path)
        finally:
            if self._container is not None:
                with suppress(OSError):  # what could not be written before
                    self._container.close()
            self._temporary.unlink(missing_ok=True)

    def _finish(self) -> None:
        if not self.count:
            raise ConfigError("A video needs at least one frame.")
        if self._container is not None:
            self._container.mux(self._stream.encode())
            self._container.close()
            return
        # GIF counts in hundredths of a second, and players slow down a frame of less than two.
        gif = self.kind == ".gif"
        duration = max(20, round(100 / self.fps) * 10) if gif else max(1, round(1000 / self.fps))
        more: dict[str, Any] = {"comment": self.comment.encode()} if gif else {"lossless": True}
        first, *rest = self._images
        first.save(self._temporary, save_all=True, append_images=rest, duration=duration, loop=0, **more)

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Errors of the disk and of the encoder in words."""
        try:
            yield
        except OSError as error:  # those of PyAV are, too
            raise WriteError(f"Cannot write {self.path}: {error.strerror or error}.") from None


def write_video(path: Path, frames: Iterable[torch.Tensor], fps: float, comment: str = "") -> None:
    """Write float frames (3, H, W) to a video file; frames may come from a generator."""
    with VideoFile(path, fps, comment) as file:
        for frame in frames:
            file.add(frame)


def to_pixels(frame: torch.Tensor) -> Pixels:
    """A frame as (H, W, 3) bytes."""
    rounded = (frame.detach().float().clamp(0, 1) * 255).round().to(torch.uint8)
    return np.ascontiguousarray(rounded.expand(3, -1, -1).movedim(0, -1).cpu().numpy())


def read_frames(path: Path) -> Iterator[Image.Image]:
    """The frames of a video file, one at a time."""
    if path.suffix.lower() == ".mp4":
        import av

        with av.open(str(path)) as container:
            for frame in container.decode(video=0):
                yield Image.fromarray(frame.to_ndarray(format="rgb24"))
        return
    with Image.open(path) as image:
        for index in range(getattr(image, "n_frames", 1)):
            image.seek(index)
            yield image.convert("RGB")


# Rates

_RATES = {"CogVideoX": 8.0, "HunyuanVideo": 24.0, "Mochi": 30.0, "Allegro": 15.0, "SkyReels": 24.0, "Sana": 16.0}
_OTHER_RATE = 16.0  # Wan's


def default_rate(pipe: Any, parameters: dict[str, Any]) -> float:
    """Frames per second of the videos of a pipeline: the default of its `frame_rate` or `fps`, else that of its model.

    `parameters` are the defaults of its call by name.
    """
    given = next((parameters[name] for name in RATE_KEYWORDS if parameters.get(name)), None)
    own = getattr(pipe, "frame_rate", None)
    known = (rate for name, rate in _RATES.items() if type(pipe).__name__.startswith(name))
    return float(given or own or next(known, _OTHER_RATE))


RATE_KEYWORDS = ("frame_rate", "fps")  # of pipelines that generate motion for a rate


# Frames as they are decoded

# Pipelines that decode once and return what is decoded.
_PIPELINES = {"WanPipeline", "WanImageToVideoPipeline", "WanVACEPipeline"}
_PIPELINES |= {"CogVideoXPipeline", "CogVideoXImageToVideoPipeline", "HunyuanVideoPipeline"}
_PIPELINES |= {"HunyuanSkyreelsImageToVideoPipeline", "LTXPipeline", "LTXImageToVideoPipeline", "LTXConditionPipeline"}
_JOINED = ("AutoencoderKLWan", "AutoencoderKLCogVideoX")  # VAEs that decode a few frames at a time and only join them
_BLENDED = {  # VAEs that decode tiles of frames and blend each with the next one; the frames that a later tile keeps
    "AutoencoderKLHunyuanVideo": slice(1, None),
    "AutoencoderKLLTXVideo": slice(None, -1),
}


@contextmanager
def stream_frames(pipe: Any, take: Callable[[torch.Tensor], None]) -> Iterator[bool]:
    """Calls of the pipeline pass each frame (3, H, W) to `take` when it is final, and return frames of one pixel.

    Yields whether this pipeline can: its VAE must decode a few frames at a time, without tiles in space, and the
    pipeline must return them as they are. Where it cannot, nothing is changed. It is for one call with one video.
    """
    vae: Any = getattr(pipe, "vae", None)
    kind, classes = type(vae).__name__, {cls.__name__ for cls in type(pipe).__mro__}
    can = kind in _JOINED or (kind in _BLENDED and vae.use_framewise_decoding)
    if not can or not classes & _PIPELINES or vae.use_tiling:
        yield False
        return
    finish = _TileBlender(vae, _BLENDED[kind]) if kind in _BLENDED else _unpatchify(vae)

    def pass_on(decoder: torch.nn.Module, arguments: Any, output: Any) -> Any:
        decoded = output[0] if isinstance(output, tuple) else output
        for frame in finish(decoded, arguments[0])[0].unbind(1):
            take((frame.clamp(-1, 1) * 0.5 + 0.5).clamp(0, 1))
        corner = decoded[..., :1, :1].clone()  # the VAE and the pipeline go on with this
        return (corner, *output[1:]) if isinstance(output, tuple) else corner

    handle = vae.decoder.register_forward_hook(pass_on)
    try:
        yield True
    finally:
        handle.remove()


def _unpatchify(vae: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A function from an output and input of the decoder to frames; Wan's VAE may decode patches of pixels."""
    patch = getattr(vae.config, "patch_size", None)
    if patch is None:
        return lambda decoded, latents: decoded
    from diffusers.models.autoencoders.autoencoder_kl_wan import unpatchify

    return lambda decoded, latents: unpatchify(decoded, patch_size=patch)


class _TileBlender:
    """From each tile that the decoder returns to its final frames: its first ones are blended with the last tile."""

    def __init__(self, vae: Any, later: slice) -> None:
        self._vae, self._later = vae, later
        self._last: torch.Tensor | None = None

    def __call__(self, tile: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        length, stride = self._vae.tile_sample_min_num_frames, self._vae.tile_sample_stride_num_frames
        if self._last is None:
            whole = latents.shape[2] <= length // self._vae.temporal_compression_ratio  # a clip of one tile
            self._last = tile
            return tile if whole else tile[:, :, : stride + 1]
        self._last = self._vae.blend_t(self._last, tile[:, :, self._later], length - stride)
        return self._last[:, :, :stride]
