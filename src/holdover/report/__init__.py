"""One self-contained HTML file from a comparison: pictures, frontier, strips, table. Fetches nothing."""

from __future__ import annotations

from .prediction import Prediction
from .write import write_report

__all__ = ["Prediction", "write_report"]
