"""What a comparison found: rows of figures, JSON and back."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from ..errors import HoldoverError
from ..metrics import METRICS, Summary, finite_or_none, none_to_infinite

FORMAT = 1


@dataclass(frozen=True)
class Row:
    """One candidate over all pictures, or why there are none.

    `seconds` and `values` have one entry a picture; `strips` has one character a forward (`C` computed, `h` held) of
    the first batch, by branch; `computed` and `held` count the forwards of one generation, the mean over the batches.
    """

    candidate: dict[str, Any]
    seconds: tuple[float, ...] = ()
    steps: int = 0
    computed: dict[str, float] = field(default_factory=dict)
    held: dict[str, float] = field(default_factory=dict)
    strips: dict[str, str] = field(default_factory=dict)
    bytes_held: int = 0
    values: dict[str, tuple[float, ...]] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    error: str | None = None

    @property
    def label(self) -> str:
        """What it is called."""
        return str(self.candidate["label"])

    @property
    def kind(self) -> str:
        """reference, method, custom, fewer_steps or second_order."""
        return str(self.candidate["kind"])

    @property
    def mean_seconds(self) -> float:
        """Seconds for one picture."""
        return statistics.fmean(self.seconds)

    @property
    def computed_steps(self) -> float | None:
        """Computed steps of one generation, the mean over the branches; None where nobody knows."""
        if self.kind in ("reference", "fewer_steps", "second_order"):
            return self.steps
        computed, held = sum(self.computed.values()), sum(self.held.values())
        return self.steps * computed / (computed + held) if computed + held else None

    def summary(self, metric: str) -> Summary:
        """Mean, 10th percentile and worst of one metric."""
        return Summary.of(self.values[metric], METRICS[metric].higher_is_better)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; an infinite PSNR is null."""
        values = {name: [finite_or_none(value) for value in found] for name, found in self.values.items()}
        summaries = {name: self.summary(name).as_dict() for name in self.values}
        steps = {"computed_steps": self.computed_steps, "seconds_mean": self.mean_seconds if self.seconds else None}
        return asdict(self) | {"values": values, "summaries": summaries} | steps

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Self:
        """Back from JSON."""
        same = ("candidate", "steps", "computed", "held", "strips", "bytes_held", "error")
        fields: dict[str, Any] = {name: entry[name] for name in same}
        fields |= {name: tuple(entry[name]) for name in ("seconds", "pictures", "differences", "notes")}
        values = {name: tuple(map(none_to_infinite, found)) for name, found in entry["values"].items()}
        return cls(**fields, values=values)


@dataclass(frozen=True)
class Results:
    """A comparison's settings, what it ran on, the uncached row and a row for each candidate."""

    settings: dict[str, Any]
    environment: dict[str, Any]
    date: str
    reference: Row
    rows: tuple[Row, ...] = ()
    unavailable: dict[str, str] = field(default_factory=dict)

    def row(self, label: str) -> Row:
        """The row of a candidate."""
        return next(row for row in self.rows if row.label == label)

    def speedup(self, row: Row) -> float:
        """How many times faster than uncached."""
        return self.reference.mean_seconds / row.mean_seconds

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "format": FORMAT,
            "date": self.date,
            "environment": self.environment,
            "settings": self.settings,
            "unavailable": self.unavailable,
            "reference": self.reference.as_dict(),
            "rows": [row.as_dict() | {"speedup": self._speedup(row)} for row in self.rows],
        }

    @classmethod
    def from_dict(cls, entry: dict[str, Any]) -> Self:
        """Back from JSON."""
        rows = tuple(Row.from_dict(row) for row in entry["rows"])
        same = {name: entry[name] for name in ("settings", "environment", "date", "unavailable")}
        return cls(**same, reference=Row.from_dict(entry["reference"]), rows=rows)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a results file."""
        try:
            entry = json.loads(path.read_text("utf-8"))
            if entry["format"] != FORMAT:
                raise HoldoverError(f"{path} has format {entry['format']}; this version reads {FORMAT}.")
            return cls.from_dict(entry)
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError) as error:
            raise HoldoverError(f"{path} holds no results of a comparison ({type(error).__name__}: {error}).") from None

    def save(self, path: Path) -> None:
        """Write a results file: all of it, or the old one stays."""
        beside = path.with_name(path.name + ".new")
        beside.write_text(json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n", "utf-8")
        beside.replace(path)

    def _speedup(self, row: Row) -> float | None:
        return self.speedup(row) if row.seconds else None

    def __str__(self) -> str:
        width = max(len(row.label) for row in (self.reference, *self.rows))
        head = f"{'':<{width}}  computed   s/image  speed  PSNR mean    p10  worst   SSIM"
        return "\n".join([head, *(self._line(row, width) for row in (self.reference, *self.rows))])

    def _line(self, row: Row, width: int) -> str:
        if row.error is not None:
            return f"{row.label:<{width}}  failed: {row.error}"
        steps = "?" if row.computed_steps is None else f"{row.computed_steps:.3g}"
        line = f"{row.label:<{width}}  {steps:>4} of {row.steps:<2} {row.mean_seconds:8.2f} {self.speedup(row):5.2f}x"
        if row.kind == "reference":
            return line
        psnr = row.summary("psnr")
        ssim = f"{row.summary('ssim').mean:7.4f}" if "ssim" in row.values else ""
        return f"{line}  {_decibels(psnr.mean):>9} {_decibels(psnr.p10):>6} {_decibels(psnr.worst):>6} {ssim}"


def _decibels(value: float) -> str:
    return "equal" if math.isinf(value) else f"{value:.1f}"
