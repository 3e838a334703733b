"""Try plans on the model itself: polish a schedule, and certify the fastest plan that meets a target."""

from __future__ import annotations

from .polish import polish
from .tune import Tuned, tune

__all__ = ["Tuned", "polish", "tune"]
