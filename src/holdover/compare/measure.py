"""The metrics of a comparison, picture by picture, on the pipeline's own device."""

from __future__ import annotations

import torch

from ..errors import HoldoverError
from ..metrics import as_images, each, latents_as_images, lpips, lpips_missing, nonwhite_error, psnr, ssim

Values = dict[str, tuple[float, ...]]
_WINDOW = 11


class Ruler:
    """Measures outputs against the reference of the same pictures."""

    def __init__(self, reference: torch.Tensor, output_type: str, device: torch.device) -> None:
        self.latent = output_type == "latent"
        self.range = (float(reference.min()), float(reference.max()))
        self.device = device
        self.reference = self.images(reference)
        self.unavailable = self._unavailable()

    def images(self, output: torch.Tensor) -> torch.Tensor:
        """An output as float pictures or videos."""
        if not torch.isfinite(output).all():
            raise HoldoverError("the pictures have pixels that are not finite")
        return latents_as_images(output, *self.range) if self.latent else as_images(output)

    def values(self, images: torch.Tensor) -> Values:
        """Every metric that is available, one value a picture; a video is one picture."""
        pairs = [(a.to(self.device), b.to(self.device)) for a, b in zip(self.reference, images, strict=True)]
        metrics = {"psnr": psnr, "ssim": ssim, "nonwhite_error": nonwhite_error, "lpips": lpips}
        return {
            name: tuple(float(each(metric, a[None], b[None])) for a, b in pairs)
            for name, metric in metrics.items()
            if name not in self.unavailable
        }

    def _unavailable(self) -> dict[str, str]:
        """Why a metric is not measured here."""
        reasons = {}
        channels, height, width = self.reference.shape[-3:]
        if min(height, width) < _WINDOW:
            reasons["ssim"] = f"the pictures are {height} x {width}, smaller than its window of 11 x 11"
        missing = "the pictures are not in colour" if channels != 3 else lpips_missing()
        if missing is not None:
            reasons["lpips"] = missing
        return reasons
