"""Provenance of a result, its JSON file, and tables on the terminal."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import holdover

from . import RESULTS


def cpu_model() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def provenance(threads: int = 1) -> dict[str, Any]:
    """Date, processor, threads and versions of a measurement."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_model(),
        "threads": threads,
        "python": platform.python_version(),
        "versions": versions("torch", "diffusers", "transformers", "peft"),
    }


def versions(*names: str) -> dict[str, str]:
    """Versions of holdover and of these packages, as far as they are installed."""
    found = {"holdover": holdover.__version__}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


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
