"""The result file: written after every row, so that a run that is cut short loses nothing and is taken up again."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import holdover

from ..report import cpu_model

IDENTITY = ("section", "model", "shape", "batch", "steps", "mode", "by", "label")


class OutOfTimeError(Exception):
    """The budget is spent; what is measured is written."""


class Results:
    """Rows by what they measure; a row that is there is not measured again unless `again`."""

    def __init__(self, path: Path, budget_s: float, again: bool = False) -> None:
        self._path, self._again = path, again
        self._deadline = time.monotonic() + budget_s
        self._figures = json.loads(path.read_text()) if path.exists() else {"runs": [], "rows": []}
        self._run = len(self._figures["runs"])
        self._figures["runs"].append(provenance())

    def needs(self, identity: dict[str, Any]) -> bool:
        """Whether a row is still to be measured."""
        return self._again or not any(key_of(row) == key_of(identity) for row in self._figures["rows"])

    def lacking(self, identities: Iterable[dict[str, Any]]) -> bool:
        return any(self.needs(each) for each in identities)

    def check_time(self, seconds: float = 0.0) -> None:
        """Stop here where the budget does not reach for what comes next."""
        if time.monotonic() + seconds > self._deadline:
            raise OutOfTimeError

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row in the place of an older one, and write the file."""
        row = rounded(row | {"run": self._run})
        rows = self._figures["rows"]
        place = next((i for i, old in enumerate(rows) if key_of(old) == key_of(row)), len(rows))
        rows[place : place + 1] = [row]
        self._path.parent.mkdir(parents=True, exist_ok=True)
        written = self._path.with_suffix(".part")
        written.write_text(_text(self._figures))
        os.replace(written, self._path)
        print(json.dumps({k: v for k, v in row.items() if k not in ("notes", "trace", "step_ms")}), flush=True)


def _text(figures: dict[str, Any]) -> str:
    """JSON with a line for each run and each row: rows carry the times of all their steps."""
    lists = (f'"{name}": [\n' + ",\n".join(map(json.dumps, entries)) + "\n]" for name, entries in figures.items())
    return "{\n" + ",\n".join(lists) + "\n}\n"


def key_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What tells rows apart."""
    return tuple(row.get(name) for name in IDENTITY)


def rounded(value: Any) -> Any:
    """Figures to six digits: more is noise."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: rounded(item) for key, item in value.items()}
    return [rounded(item) for item in value] if isinstance(value, list) else value


def provenance() -> dict[str, Any]:
    """When, on which card and with which versions; packages may be on the path without being installed."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "card": torch.cuda.get_device_name() if cuda else None,
        "cuda": torch.version.cuda,
        "cpu": cpu_model(),
        "python": platform.python_version(),
        "versions": {"holdover": holdover.__version__, **_versions("torch", "triton", "diffusers", "cache-dit")},
    }


def _versions(*names: str) -> dict[str, str]:
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
