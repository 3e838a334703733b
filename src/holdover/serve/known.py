"""What is known of the model that is served: the constants its cache stands on, and what was measured of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from ..plan.identity import resolve_profile
from ..profiles import Certificate, MethodProfile, Profile, find
from ..runtime.backend import transformers_of
from .choice import TARGETED, Choice


@dataclass(frozen=True)
class Known:
    """Settled once, when the model is loaded.

    `frontier` are schedules that were tried; `targets` says whether a request may ask for a quality.
    """

    profile: dict[str, Any] | None = None
    certificates: list[dict[str, Any]] = field(default_factory=list)
    frontier: list[dict[str, Any]] = field(default_factory=list)
    targets: bool = False


def known_of(choice: Choice, pipeline: Any) -> Known:
    """What the profiles say of this pipeline's transformer."""
    transformer = next(iter(transformers_of(pipeline).values()))
    settings = choice.config.as_dict()
    measured = resolve_profile(settings["profile"] if choice.method == TARGETED else None, transformer)
    constants: MethodProfile | None = None
    if choice.method == "tea_cache" and settings["coefficients"] is None:
        constants = find("tea_cache", transformer, pipeline, settings["profile"], settings["signal"])
    elif choice.method == "mag_cache" and settings["mag_ratios"] is None:
        constants = find("mag_cache", transformer, pipeline, settings["profile"])
    profile = _constants(choice.method, constants) if constants else _measured(measured) if measured else None
    facts = measured.facts if measured else None
    return Known(
        profile=profile,
        certificates=[_certificate(certificate) for certificate in facts.certificates] if facts else [],
        frontier=_frontier(measured) if measured else [],
        targets=measured is not None,
    )


def _constants(method: str, profile: MethodProfile) -> dict[str, Any]:
    return {
        "method": method,
        "name": profile.name,
        "model": profile.model,
        "source": dict(profile.source),
        "notes": profile.notes,
    }


def _measured(profile: Profile) -> dict[str, Any]:
    facts = profile.facts
    return {
        "method": TARGETED,
        "name": facts.name,
        "model": facts.pipeline,
        "source": {"date": facts.date, "prompts": str(facts.prompts), **dict(facts.versions)},
        "notes": f"{len(facts.noise)} steps, {facts.scheduler}",
    }


def _certificate(certificate: Certificate) -> dict[str, Any]:
    return {
        "target": certificate.target,
        "computed": len(certificate.computed),
        "steps": len(certificate.noise),
        "share": certificate.share,
        "confidence": certificate.confidence,
        "prompts": certificate.prompts,
        "below": certificate.below,
        "said": str(certificate),
    }


def _frontier(profile: Profile) -> list[dict[str, Any]]:
    """Schedules with the quality they had: how many times fewer steps, and PSNR."""
    points: list[dict[str, Any]] = [
        {"speed": len(tried.noise) / len(tried.computed), "psnr": tried.psnr, "origin": tried.origin}
        for tried in profile.facts.schedules
        if math.isfinite(tried.psnr)
    ]
    return sorted(points, key=lambda point: point["speed"])
