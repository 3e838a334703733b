"""Measured constants of models, each with its provenance: the shipped ones, and those a user measures."""

from __future__ import annotations

from .measured import Certificate, Facts, ModelFacts, Profile, Schedule
from .profile import (
    MagCacheDefaults,
    MagCacheProfile,
    MagCacheRatios,
    MethodProfile,
    TeaCacheFit,
    TeaCacheProfile,
)
from .store import Method, find, load, measured, save, shipped

__all__ = [
    "Certificate",
    "Facts",
    "MagCacheDefaults",
    "MagCacheProfile",
    "MagCacheRatios",
    "Method",
    "MethodProfile",
    "ModelFacts",
    "Profile",
    "Schedule",
    "TeaCacheFit",
    "TeaCacheProfile",
    "find",
    "load",
    "measured",
    "save",
    "shipped",
]
