"""What a comparison found: rows of values, as JSON and in a folder with the images or clips."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import re
import shutil
import statistics
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import torch
from PIL import Image
from pydantic import BeforeValidator, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from ..errors import ConfigError, HoldoverError
from ..metrics import METRICS, Summary, finite_or_none, none_to_infinite
from ..profiles.files import replace_file
from ..video import write_video

FORMAT = 2
_DIFFERENCE_GAIN = 4.0  # a difference image is opaque where two images differ by a quarter of the range
_DIFFERENCE_COLOR = (214, 40, 120)
_FADED = 0.22  # of the gray image under the difference of a clip, which has no transparency: as on the page of images
_SMALLEST_SIDE = 192  # to which a small clip is enlarged by a whole number, because MP4 halves the resolution of color

MetricValue = Annotated[float, BeforeValidator(none_to_infinite)]


@dataclass(frozen=True)
class Row:
    """The measurements of one candidate over all images, or the error it failed with.

    `seconds` and `values` have one entry per image; `strips`, one letter per forward (`C` computed, `h` held) of the
    first batch; `computed` and `held` are counts of one generation, the mean over batches. Paths are within the folder.
    Of videos, `frames` is the number of frames of each, and `worst_frames` the index of the frame of each that is
    furthest from uncached in PSNR; of images they are 0 and empty.
    """

    candidate: dict[str, Any]
    seconds: tuple[float, ...] = ()
    steps: int = 0
    computed: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    strips: dict[str, str] = field(default_factory=dict)
    bytes_held: int = 0
    values: dict[str, tuple[MetricValue, ...]] = field(default_factory=dict)
    images: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None
    frames: int = 0
    worst_frames: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        return str(self.candidate["label"])

    @property
    def kind(self) -> str:
        """reference, method, custom, fewer_steps or second_order."""
        return str(self.candidate["kind"])

    @property
    def mean_seconds(self) -> float:
        return statistics.fmean(self.seconds)

    @property
    def computed_steps(self) -> float | None:
        """Computed steps of one generation, the mean over the branches; None where they are unknown."""
        if self.kind in ("reference", "fewer_steps", "second_order"):
            return self.steps
        computed, held = sum(self.computed.values()), sum(self.held.values())
        return self.steps * computed / (computed + held) if computed + held else None

    def summary(self, metric: str) -> Summary:
        """Mean, 10th percentile and worst value of one metric."""
        return Summary.of(self.values[metric], METRICS[metric].higher_is_better)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite PSNR is null."""
        values = {name: [finite_or_none(value) for value in found] for name, found in self.values.items()}
        summaries = {name: self.summary(name).as_dict() for name in self.values}
        steps = {"computed_steps": self.computed_steps, "seconds_mean": self.mean_seconds if self.seconds else None}
        return asdict(self) | {"values": values, "summaries": summaries} | steps


@dataclass(frozen=True)
class Results:
    """The settings and the environment of a comparison, the uncached row and a row for each candidate."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    date: str
    reference: Row
    rows: tuple[Row, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)

    @property
    def noun(self) -> str:
        """What was generated: image or video."""
        return "video" if self.reference.frames else "image"

    def row(self, label: str) -> Row:
        return next(row for row in self.rows if row.label == label)

    def speedup(self, row: Row) -> float:
        """How many times faster than uncached a row is."""
        return self.reference.mean_seconds / row.mean_seconds

    def as_dict(self) -> dict[str, Any]:
        rows = [row.as_dict() | {"speedup": self.speedup(row) if row.seconds else None} for row in self.rows]
        return {"format": FORMAT} | vars(self) | {"reference": self.reference.as_dict(), "rows": rows}

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Self:
        """Back from JSON; values of the wrong type raise a ValidationError, derived values are ignored."""
        return TypeAdapter(cls).validate_python(entry)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a results file."""
        try:
            entry = json.loads(path.read_text("utf-8"))
            if entry["format"] != FORMAT:
                raise HoldoverError(f"{path} has format {entry['format']}; this version reads format {FORMAT}.")
            return cls.from_dict(entry)
        except ValidationError as error:
            first = error.errors()[0]
            problem = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            problem = f"{type(error).__name__}: {error}"
        raise HoldoverError(f"{path} is no results file of a comparison ({problem}).")

    def save(self, path: Path) -> None:
        """Write a results file; an existing one is replaced only once the new one is complete."""
        with replace_file(path) as new:
            new.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", "utf-8")

    def __str__(self) -> str:
        label = max(len(row.label) for row in (self.reference, *self.rows))
        quality = "PSNR mean    p10  worst  SSIM mean     p10  LPIPS mean     p90"
        lines = [f"{'':<{label}}  computed   s/{self.noun}  speed  {quality}"]
        for row in (self.reference, *self.rows):
            lines.append(f"{row.label:<{label}}  ")
            if row.error is not None:
                lines[-1] += f"failed: {row.error}"
                continue
            steps = "?" if row.computed_steps is None else f"{row.computed_steps:.3g}"
            lines[-1] += f"{steps:>4} of {row.steps:<2} {row.mean_seconds:8.2f} {self.speedup(row):5.2f}x"
            if row.values:
                psnr = row.summary("psnr")
                mean, p10, worst = ("equal" if math.isinf(v) else f"{v:.1f}" for v in (psnr.mean, psnr.p10, psnr.worst))
                lines[-1] += f"  {mean:>9} {p10:>6} {worst:>6}"
                for name, width in (("ssim", 9), ("lpips", 10)):
                    found = row.summary(name) if name in row.values else None
                    lines[-1] += f"  {found.mean:>{width}.4f} {found.p10:>7.4f}" if found else " " * (width + 10)
        lines = [line.rstrip() for line in lines]
        return "\n".join(lines)


class Folder:
    """The folder of a comparison: `results.json`, each uncached output in floats, and files of images and differences.

    Images are PNG. Videos are MP4, or WebP if PyAV is not installed.
    """

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root)
        self.results = self.root / "results.json"
        self._reference = self.root / "reference"
        self._clips = ".webp" if importlib.util.find_spec("av") is None else ".mp4"

    def prepare(self) -> None:
        """Create the folder and check that it is writable, before anything is generated."""
        for folder in (self.root, self.root / "images", self._reference):
            prepare_folder(folder)

    def load(self) -> Results | None:
        """The results of an earlier run."""
        return Results.load(self.results) if self.results.exists() else None

    def load_reference(self, count: int) -> list[torch.Tensor] | None:
        """The uncached outputs of an earlier run, if all are there; they are read from the files when they are used."""
        paths = [self._reference / f"{number}.safetensors" for number in range(count)]
        return [load_file(path)["output"] for path in paths] if all(path.exists() for path in paths) else None

    def save_reference(self, number: int, output: torch.Tensor) -> torch.Tensor:
        """Store one uncached output, in floats; return it as `load_reference` does."""
        path = self._reference / f"{number}.safetensors"
        with replace_file(path) as new:
            save_file({"output": output.contiguous()}, new)
        return load_file(path)["output"]

    def clear_reference(self) -> None:
        """Remove the outputs of a run that had other settings or was interrupted."""
        shutil.rmtree(self._reference)
        prepare_folder(self._reference)

    def save_image(
        self, candidate: dict[str, Any], number: int, image: torch.Tensor, fps: float = 16.0, suffix: str = ""
    ) -> str:
        """Write an image (C, H, W) as PNG, or a video (F, C, H, W) as a clip; return its path within the folder."""
        name = self._name(candidate, f"{number}{suffix}{'.png' if image.ndim == 3 else self._clips}")
        if image.ndim == 3:
            with replace_file(self.root / name) as new:
                to_pil(image).save(new, "PNG")
        else:
            self._write_clip(name, iter(image), fps)
        return name

    def save_difference(
        self, candidate: dict[str, Any], number: int, image: torch.Tensor, reference: torch.Tensor, fps: float = 16.0
    ) -> str:
        """Write the difference of an image to the reference: one color, opaque where they differ most.

        The difference of a video lies on the faded frames.
        """
        color = torch.tensor(_DIFFERENCE_COLOR).view(3, 1, 1) / 255

        def opacity(image: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
            return ((image - reference).abs().mean(-3, keepdim=True) * _DIFFERENCE_GAIN).clamp(0, 1)

        if image.ndim == 3:
            alpha = opacity(image, reference)
            plane = color.expand(3, *alpha.shape[-2:])
            return self.save_image(candidate, number, torch.cat([plane, alpha]), suffix="-difference")
        name = self._name(candidate, f"{number}-difference{self._clips}")

        def frames() -> Iterator[torch.Tensor]:
            for frame, plain in zip(image, reference, strict=True):
                alpha = opacity(frame, plain)
                yield alpha * color + (1 - alpha) * (1 - _FADED + _FADED * frame.mean(0, keepdim=True))

        self._write_clip(name, frames(), fps)
        return name

    def _name(self, candidate: dict[str, Any], end: str) -> str:
        """The path of a file within the folder."""
        words = re.sub(r"[^a-z0-9.]+", "-", str(candidate["label"]).lower()).strip("-")[:40]
        digest = hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()
        return f"images/{words}-{digest[:6]}-{end}"

    def _write_clip(self, name: str, frames: Iterator[torch.Tensor], fps: float) -> None:
        """A clip; the frames are taken one at a time."""

        def enlarge(frame: torch.Tensor) -> torch.Tensor:
            times = math.ceil(_SMALLEST_SIDE / min(frame.shape[-2:])) if self._clips == ".mp4" else 1
            return frame.repeat_interleave(times, -1).repeat_interleave(times, -2)

        write_video(self.root / name, map(enlarge, frames), fps)


def prepare_folder(path: Path) -> None:
    """Create a folder, and raise a ConfigError if it is not writable."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe = path / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"Cannot write to {path}: {error.strerror}.") from None


def to_pil(image: torch.Tensor) -> Image.Image:
    """A float image (C, H, W), rounded to 8 bits."""
    array = (image.clamp(0, 1) * 255).round().to(torch.uint8).movedim(0, -1).numpy()
    return Image.fromarray(np.ascontiguousarray(array[..., 0] if array.shape[-1] == 1 else array))
