"""Provenance of a result, its JSON file, and tables on the terminal."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import RESULTS


def cpu_model() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def provenance(threads: int = 1) -> dict[str, Any]:
    """Date, processor, threads and versions of a measurement."""
    packages = ("holdover", "torch", "diffusers", "transformers", "peft")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": {name: version(name) for name in packages},
    }


def save(name: str, figures: dict[str, Any], path: Path | None = None) -> Path:
    """Write one result file."""
    path = path or RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=1) + "\n")
    return path


def table(rows: Sequence[Sequence[object]]) -> str:
    """Rows in columns; the first row is the head, the first column is left-aligned, the others right-aligned."""
    cells = [[f"{c:.3g}" if isinstance(c, float) else str(c) for c in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True)))
        for row in cells
    )
