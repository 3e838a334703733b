"""The planned cache: which steps to compute, and what the others are made of, is worked out before the first step."""

from __future__ import annotations

from .backend import PlanBackend
from .config import PlanConfig

__all__ = ["PlanBackend", "PlanConfig"]
