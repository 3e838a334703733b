"""Measured constants of models, each with its provenance: the shipped ones, and those a user measures."""

from .facts import (
    Certificate,
    MagCacheDefaults,
    MagCacheProfile,
    MagCacheRatios,
    MeasuredPlan,
    MethodProfile,
    ModelIdentity,
    PlannerOptions,
    ProfileFacts,
    QualityEstimate,
    TeaCacheFit,
    TeaCacheProfile,
)
from .profile import Profile
from .store import MethodName, find, load, measured, save, shipped

__all__ = [
    "Certificate",
    "MagCacheDefaults",
    "MagCacheProfile",
    "MagCacheRatios",
    "MeasuredPlan",
    "MethodName",
    "MethodProfile",
    "ModelIdentity",
    "PlannerOptions",
    "Profile",
    "ProfileFacts",
    "QualityEstimate",
    "TeaCacheFit",
    "TeaCacheProfile",
    "find",
    "load",
    "measured",
    "save",
    "shipped",
]
