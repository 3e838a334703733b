"""How far two pictures are apart: float pictures in, one value for each picture out. Knows no pipeline."""

from __future__ import annotations

from .distances import nonwhite_error, psnr
from .each import each
from .images import as_images, latents_as_images
from .perceptual import lpips, lpips_missing
from .structure import ssim
from .summary import METRICS, PSNR_CAP, Metric, Summary

__all__ = [
    "METRICS",
    "PSNR_CAP",
    "Metric",
    "Summary",
    "as_images",
    "each",
    "latents_as_images",
    "lpips",
    "lpips_missing",
    "nonwhite_error",
    "psnr",
    "ssim",
]
