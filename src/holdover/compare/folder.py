"""Where a comparison keeps what it found, so that it can be taken up again."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from ..errors import ConfigError
from .results import Results

DIFFERENCE_GAIN = 4.0
"""A difference picture is opaque where the pictures differ by a quarter of the range."""
_DIFFERENCE_COLOUR = (214, 40, 120)


class Folder:
    """`results.json`, the float reference, and a PNG for each picture and each difference."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.results = self.root / "results.json"
        self._reference = self.root / "reference.safetensors"

    def prepare(self) -> None:
        """Make the folder, and find out now rather than after an hour whether it can be written."""
        try:
            (self.root / "pictures").mkdir(parents=True, exist_ok=True)
            probe = self.root / ".writable"
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"Cannot write to {self.root}: {error.strerror}.") from None

    def load(self) -> Results | None:
        """What an earlier run found here."""
        return Results.load(self.results) if self.results.exists() else None

    def load_reference(self) -> torch.Tensor | None:
        """The uncached pictures of an earlier run, unrounded."""
        return load_file(self._reference)["reference"] if self._reference.exists() else None

    def save_reference(self, output: torch.Tensor) -> None:
        """Keep the uncached pictures, unrounded."""
        beside = self._reference.with_suffix(".new")
        save_file({"reference": output.contiguous()}, beside)
        beside.replace(self._reference)

    def save_pictures(self, candidate: dict[str, Any], images: torch.Tensor, kind: str = "") -> tuple[str, ...]:
        """Write a PNG for each picture (of a video, its middle frame); their paths within the folder."""
        stem, names = _stem(candidate), []
        for number, image in enumerate(images):
            frame = image[len(image) // 2] if image.ndim == 4 else image
            names.append(f"pictures/{stem}-{number}{kind}.png")
            as_picture(frame).save(self.root / names[-1])
        return tuple(names)

    def save_differences(
        self, candidate: dict[str, Any], images: torch.Tensor, reference: torch.Tensor
    ) -> tuple[str, ...]:
        """Write, for each picture, how far it is from the reference: one colour, opaque where they differ most."""
        alpha = ((images - reference).abs().mean(-3, keepdim=True) * DIFFERENCE_GAIN).clamp(0, 1)
        colour = torch.tensor(_DIFFERENCE_COLOUR).view(3, 1, 1) / 255
        plane = colour.expand(*alpha.shape[:-3], 3, *alpha.shape[-2:])
        return self.save_pictures(candidate, torch.cat([plane, alpha], dim=-3), "-difference")


def as_picture(image: torch.Tensor) -> Image.Image:
    """A float picture (C, H, W) rounded to 8 bits, to be looked at."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).numpy()
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array))


def _stem(candidate: dict[str, Any]) -> str:
    """A file name that a person can read and that no other candidate has."""
    words = re.sub(r"[^a-z0-9.]+", "-", str(candidate["label"]).lower()).strip("-")[:40]
    digest = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()
    return f"{words}-{digest[:6]}"
