"""Measure a model once, on a few uncached generations, for every method."""

from __future__ import annotations

from .calibrate import calibrate

__all__ = ["calibrate"]
