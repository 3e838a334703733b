"""Measured constants of models, each with its provenance: the shipped ones, and those a user measures."""

from __future__ import annotations

from .profile import (
    MagCacheDefaults,
    MagCacheProfile,
    MagCacheRatios,
    Profile,
    TeaCacheFit,
    TeaCacheProfile,
)
from .store import Method, find, load, save, shipped

__all__ = [
    "MagCacheDefaults",
    "MagCacheProfile",
    "MagCacheRatios",
    "Method",
    "Profile",
    "TeaCacheFit",
    "TeaCacheProfile",
    "find",
    "load",
    "save",
    "shipped",
]
