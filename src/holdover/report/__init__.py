"""The report of a comparison: one HTML file with images, plots, steps and a table, without network resources."""

from .plots import Prediction
from .view import write_report

__all__ = ["Prediction", "write_report"]
