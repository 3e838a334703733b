"""What a comparison shows on the terminal while it runs."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from ..compare import Results, Row, Watcher


class Progress(Watcher):
    """The pipeline's own bar for the candidate that runs, and a line for each that is done."""

    def __init__(self, pipe: Any, console: Console) -> None:
        self.pipe, self.console = pipe, console
        self._drawn: set[str] = set()

    def started(self, label: str, steps: int) -> None:
        """The bar is named for the candidate."""
        self._drawn.add(label)
        self.pipe.set_progress_bar_config(desc=f"{label:<28}", leave=False)

    def finished(self, row: Row, results: Results) -> None:
        """One line for a candidate that is done."""
        before = "" if row.label in self._drawn else "  (from an earlier run)"
        self.console.print(f"{row.label:<28} {_said(row, results)}{before}", highlight=False, soft_wrap=True)


def _said(row: Row, results: Results) -> str:
    if row.error is not None:
        return f"failed: {row.error}"
    time = f"{row.mean_seconds:6.2f} s a picture"
    return time if row.kind == "reference" else f"{time}  {results.speedup(row):5.2f}x"
