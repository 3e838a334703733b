"""Quality metrics: float images or videos in, one value per image or video out. Knows no pipeline."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch.nn.functional import conv2d, max_pool2d, normalize

from .errors import ConfigError

__all__ = [
    "METRICS",
    "PSNR_CAP",
    "Metric",
    "Summary",
    "as_images",
    "each",
    "get_images",
    "latents_as_images",
    "lpips",
    "nonwhite_error",
    "psnr",
    "ssim",
    "worst_frame",
]

PSNR_CAP = 100.0
"""The PSNR in decibels that equal images count for in a mean; differences far below this are invisible."""

SSIM_WINDOW = 11  # the side of the window of SSIM in pixels; smaller images have no SSIM

_WHITE = 254.5 / 255  # a pixel of at least this value is displayed as white
_SSIM_SIGMA, _SSIM_C1, _SSIM_C2 = 1.5, 0.01**2, 0.03**2
LPIPS_SIDE = 31  # the shortest side in pixels that AlexNet can take; smaller images have no LPIPS
_ALEXNET = Path(__file__).with_name("lpips_alexnet.safetensors")  # made by training/lpips/convert.py
_ALEXNET_LAYERS = ((4, 2), (1, 2), (1, 1), (1, 1), (1, 1))  # stride and padding
_ALEXNET_MEAN, _ALEXNET_STD = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of LPIPS, for pixels in [-1, 1]
_FRAMES_AT_ONCE = 8


def psnr(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Peak signal-to-noise ratio in decibels, one value per image; infinite where the two are equal.

    The images are (C, H, W), or (..., C, H, W) for one value each, with a peak of 1.
    """
    a, b = _check_pair(a, b)
    return -10 * torch.log10(((a - b) ** 2).mean((-3, -2, -1)))


def nonwhite_error(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Mean absolute error over the pixels that are not white in both images; 0 where all are white.

    A white background is equal in every image and would hide an error in the subject.
    """
    error, pixels = _sum_nonwhite(*_check_pair(a, b))
    return error / pixels.clamp(min=1)


def _sum_nonwhite(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of the errors of the pixels that are not white in both images, and the number of these pixels."""
    subject = ((a < _WHITE) | (b < _WHITE)).any(-3)
    error = (a - b).abs().mean(-3) * subject
    return error.sum((-2, -1)), subject.sum((-2, -1))


def ssim(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Structural similarity (Wang et al. 2004), one value per image (C, H, W) or (..., C, H, W); 1 where equal.

    The mean over the channels and over all positions where the Gaussian window of 11 x 11 lies inside the image:
    nothing is padded.
    """
    a, b = _check_pair(a, b)
    height, width = a.shape[-2:]
    if min(height, width) < SSIM_WINDOW:
        raise ConfigError(f"SSIM has a window of 11 x 11; the images are {height} x {width}.")
    mean_a, mean_b = _blur(a), _blur(b)
    variance_a = _blur(a * a) - mean_a**2
    variance_b = _blur(b * b) - mean_b**2
    covariance = _blur(a * b) - mean_a * mean_b
    luminance = (2 * mean_a * mean_b + _SSIM_C1) / (mean_a**2 + mean_b**2 + _SSIM_C1)
    structure = (2 * covariance + _SSIM_C2) / (variance_a + variance_b + _SSIM_C2)
    return (luminance * structure).mean((-3, -2, -1))


def lpips(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """LPIPS (Zhang et al. 2018) with AlexNet, one value per RGB image (3, H, W) or (..., 3, H, W); 0 where equal.

    Version 0.1 of its weights, in single precision. Images with a side of less than 31 pixels are refused.
    """
    a, b = (images.float().clamp(0, 1) for images in _check_pair(a, b))
    channels, height, width = a.shape[-3:]
    if channels != 3 or min(height, width) < LPIPS_SIDE:
        raise ConfigError(
            f"LPIPS compares RGB images of at least {LPIPS_SIDE} x {LPIPS_SIDE} pixels; "
            f"these have {channels} channels and are {height} x {width}."
        )
    weights, distances = _load_alexnet(a.device), []
    flat = (torch.split(images.reshape(-1, 3, height, width), _FRAMES_AT_ONCE) for images in (a, b))
    for pair in zip(*flat, strict=True):
        layers = zip(*(_alexnet_features(images, weights) for images in pair), strict=True)
        heads = (weights[f"head{layer}"].view(-1, 1, 1) for layer in range(len(_ALEXNET_LAYERS)))
        weighted = (((x - y) ** 2 * head).sum(1).mean((1, 2)) for (x, y), head in zip(layers, heads, strict=True))
        distances.append(torch.stack(list(weighted)).sum(0))
    return torch.cat(distances).reshape(a.shape[:-3])


@cache
def _load_alexnet(device: torch.device) -> dict[str, torch.Tensor]:
    """The kernels, biases and heads in single precision."""
    return {name: tensor.float().to(device) for name, tensor in load_file(_ALEXNET).items()}


@torch.no_grad()
def _alexnet_features(images: torch.Tensor, weights: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of (N, 3, H, W) after each of the five layers, of length 1 at each position."""
    mean, std = (images.new_tensor(values).view(3, 1, 1) for values in (_ALEXNET_MEAN, _ALEXNET_STD))
    features, found = (2 * images - 1 - mean) / std, []
    for layer, (stride, padding) in enumerate(_ALEXNET_LAYERS):
        features = max_pool2d(features, 3, 2) if layer in (1, 2) else features
        kernel, bias = weights[f"conv{layer}.weight"], weights[f"conv{layer}.bias"]
        features = conv2d(features, kernel, bias, stride, padding).relu()
        found.append(normalize(features, dim=1, eps=1e-10))
    return found


def each(
    metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """One value per image of (N, C, H, W), or per video of (N, F, C, H, W).

    Metrics that are means over pixels take the pixels of all frames; of others the mean over the frames is taken. A
    video is measured a few frames at a time, so that a long one takes no more memory than a short one.
    """
    _check_shapes(a, b)
    if a.ndim < 5:
        return metric(a, b)
    return torch.stack([_measure_video(metric, *pair) for pair in zip(a, b, strict=True)])


def _measure_video(
    metric: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], a: torch.Tensor, b: torch.Tensor
) -> torch.Tensor:
    """The value of one video (F, C, H, W)."""
    pairs = zip(*(torch.split(video, _FRAMES_AT_ONCE) for video in (a, b)), strict=True)
    if metric is nonwhite_error:
        sums = [_sum_nonwhite(*_check_pair(*pair)) for pair in pairs]
        error, pixels = (torch.cat(parts).sum() for parts in zip(*sums, strict=True))
        return error / pixels.clamp(min=1)
    values = torch.cat([metric(*pair) for pair in pairs])
    return -10 * torch.log10((10 ** (-values / 10)).mean()) if metric is psnr else values.mean()


def worst_frame(a: torch.Tensor, b: torch.Tensor) -> int:
    """The index of the frame of two videos (F, C, H, W) with the lowest PSNR; 0 where all are equal."""
    parts = zip(*(torch.split(video, _FRAMES_AT_ONCE) for video in (a, b)), strict=True)
    return int(torch.cat([psnr(*pair) for pair in parts]).argmin())


def _check_pair(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both in double precision on the device of the first, if they are float images of one shape."""
    _check_shapes(a, b)
    return a.detach().double(), b.detach().to(a.device).double()


def _check_shapes(a: torch.Tensor, b: torch.Tensor) -> None:
    for image in (a, b):
        if not image.is_floating_point():
            raise ConfigError(f"Images are floats in [0, 1], not {image.dtype}; see holdover.metrics.as_images.")
    if a.shape != b.shape or a.ndim < 3:
        shapes = f"{tuple(a.shape)} and {tuple(b.shape)}"
        raise ConfigError(f"Metrics compare two images (..., C, H, W) of one shape, not {shapes}.")


def _blur(images: torch.Tensor) -> torch.Tensor:
    """Each channel under the Gaussian window of SSIM, along rows and then along columns."""
    radius = SSIM_WINDOW // 2
    offsets = torch.arange(-radius, radius + 1, dtype=images.dtype, device=images.device)
    window = torch.exp(-(offsets**2) / (2 * _SSIM_SIGMA**2))
    window = window / window.sum()
    planes = images.reshape(-1, 1, *images.shape[-2:])
    planes = conv2d(conv2d(planes, window.view(1, 1, 1, -1)), window.view(1, 1, -1, 1))
    return planes.reshape(*images.shape[:-2], *planes.shape[-2:])


# Images from what a pipeline returns.


def get_images(output: Any) -> Any:
    """The images, videos or latents in what a pipeline returns: in a field of that name, or the first of a tuple."""
    for name in ("images", "frames", "videos"):
        if hasattr(output, name):
            return getattr(output, name)
    if isinstance(output, Mapping):  # another output of diffusers; its fields are in order
        return next(iter(output.values()), output)
    return output[0] if isinstance(output, tuple) and output else output


def as_images(output: Any) -> torch.Tensor:
    """Images (N, C, H, W) or videos (N, F, C, H, W) as floats in [0, 1], from any `output_type` of a pipeline.

    Tensors are "pt": (C, H, W), (N, C, H, W) or (N, F, C, H, W). Arrays are "np": the same with the channels last. A
    PIL image, a list of them, or a list of such lists (one per video) is accepted too, but is rounded to 8 bits.
    """
    if isinstance(output, torch.Tensor):
        return _as_batch(output)
    if isinstance(output, np.ndarray):
        return _as_batch(torch.from_numpy(output), channels_last=True)
    if isinstance(output, Image.Image):
        array = np.asarray(output if output.mode in ("L", "RGB") else output.convert("RGB"))
        return (torch.from_numpy(array.copy()).float() / 255).reshape(1, *array.shape[:2], -1).movedim(-1, -3)
    if isinstance(output, Sequence) and not isinstance(output, str) and len(output):
        entries = []
        for entry in output:
            images = as_images(entry)
            is_video = isinstance(entry, (list, tuple)) or (images.ndim == 4 and len(images) > 1)
            entries.append(images[None] if is_video else images)
        return torch.cat(entries)
    raise ConfigError(f"Images are tensors, arrays or PIL images, not {type(output).__name__}.")


def latents_as_images(latents: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Latents as images: `low` becomes 0, `high` becomes 1, and values outside this range stay outside.

    Take both from the reference, so that two sets of latents are measured alike. Packed latents (N, tokens, channels)
    become images of one channel, videos (N, C, F, H, W) become (N, F, C, H, W).
    """
    if not high > low:
        raise ConfigError(f"Latents need a range: high ({high:g}) must be more than low ({low:g}).")
    scaled = (latents.detach().float() - low) / (high - low)
    if scaled.ndim == 3:
        return scaled[:, None]
    return scaled.transpose(1, 2) if scaled.ndim == 5 else scaled


def _as_batch(values: torch.Tensor, channels_last: bool = False) -> torch.Tensor:
    """Float images in single precision or better, with a batch dimension and the channels before H and W.

    Refuses values that are no image in [0, 1]: pixels in [-1, 1] or [0, 255], or latents.
    """
    if not values.is_floating_point():
        raise ConfigError(
            f"Images of {values.dtype} are rounded; request floats from the pipeline: output_type='pt' or 'np'."
        )
    if not 3 <= values.ndim <= 5:
        raise ConfigError(f"Images have 3 or 4 dimensions, videos 5; this has shape {tuple(values.shape)}.")
    low, high = values.aminmax() if values.numel() else (torch.zeros(()), torch.zeros(()))
    if low < -1e-3 or high > 1 + 1e-3:
        raise ConfigError(
            f"Images are floats in [0, 1], but these range from {low:.3g} to {high:.3g}; "
            "for latents use latents_as_images."
        )
    values = values.detach().to(torch.promote_types(values.dtype, torch.float32))
    values = values.movedim(-1, -3) if channels_last else values
    return values[None] if values.ndim == 3 else values


# Summaries.


@dataclass(frozen=True)
class Metric:
    """How a metric is displayed: name, title, unit, direction and number of digits."""

    name: str
    title: str
    unit: str
    higher_is_better: bool
    digits: int


METRICS = {
    "psnr": Metric("psnr", "PSNR", "dB", True, 1),
    "ssim": Metric("ssim", "SSIM", "", True, 3),
    "nonwhite_error": Metric("nonwhite_error", "error, nonwhite pixels", "", False, 4),
    "lpips": Metric("lpips", "LPIPS", "", False, 4),
}


@dataclass(frozen=True)
class Summary:
    """Mean, 10th percentile counted from the bad end, worst value, and number of images.

    Equal images have an infinite PSNR. In a mean with others they count for `PSNR_CAP`; where all are equal, the
    summary is infinite. In JSON an infinite value is `null`.
    """

    mean: float
    p10: float
    worst: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float], higher_is_better: bool = True) -> Self:
        """The summary of one metric over all images."""
        if not values:
            raise ValueError("There is nothing to summarize.")
        if all(map(math.isinf, values)):
            return cls(values[0], values[0], values[0], len(values))
        capped = np.minimum(values, PSNR_CAP)
        worst, share = (capped.min(), 0.1) if higher_is_better else (capped.max(), 0.9)
        return cls(float(capped.mean()), float(np.quantile(capped, share)), float(worst), len(values))

    def as_dict(self) -> dict[str, Any]:
        return {name: finite_or_none(value) for name, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        mean, p10, worst = (none_to_infinite(values[name]) for name in ("mean", "p10", "worst"))
        return cls(mean, p10, worst, int(values["count"]))


def finite_or_none(value: float) -> float | None:
    """The value, with None for infinity, which JSON does not have."""
    return value if math.isfinite(value) else None


def none_to_infinite(value: float | None) -> float:
    """The inverse of `finite_or_none`."""
    return math.inf if value is None else float(value)
