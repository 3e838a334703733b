"""Everything that stands on one frontier: plans, every peer at several settings, and fewer steps of both orders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from diffusers import FirstBlockCacheConfig, MagCacheConfig, TaylorSeerCacheConfig

from ..plan.search import uniform
from ..profiles import Profile
from .candidates import Candidate, Custom, FewerSteps, Method
from .diffusers_caches import diffusers_cache
from .spec import Comparison

SPEED_UPS = (6, 5, 4, 3, 2.5, 2)
"""What plans, holding evenly and fewer steps are tried at; the others come to computed steps of their own."""
_USUAL = 50  # steps that these thresholds are for: with fewer, a step changes more
_TEA = (0.02, 0.05, 0.1, 0.16)
_MAG = ((0.06, 2, 0.2), (0.2, 4, 0.1), (0.7, 5, 0.06), (0.7, 8, 0.06))
_FIRST_BLOCK = (0.07, 0.13, 0.19, 0.26)
_TAYLOR = ((3, 0.2), (5, 0.12), (8, 0.08), (8, 0.04))  # interval, and the part of the steps that is computed first


def frontier(profile: Profile, path: Path | str, prompts: Sequence[str], batch_size: int = 1) -> Comparison:
    """The comparison of a profile's plans with all others; `path` is the file the profile is in."""
    steps, file = len(profile.facts.noise), str(path)
    few = budgets(steps)
    candidates: list[Candidate] = [_plan(budget, file) for budget in few]
    candidates += _published(file, steps)
    candidates += _of_diffusers(profile)
    candidates += [_held(budget, steps) for budget in few]
    candidates += [FewerSteps(budget, order) for order in (False, True) for budget in few]
    return Comparison(
        tuple(prompts),
        tuple(candidates),
        steps=steps,
        guidance=profile.facts.guidance,
        batch_size=batch_size,
        baselines=False,
    )


def budgets(steps: int) -> list[int]:
    """The computed steps that plans are tried with, of so many."""
    return sorted({max(2, int(steps / factor)) for factor in SPEED_UPS})


def _plan(budget: int, file: str) -> Method:
    return Method("plan", (("budget", budget), ("guard", False), ("profile", file)), f"plan {budget}", "plan")


def _held(budget: int, steps: int) -> Method:
    settings = {"schedule": uniform(steps, budget), "predictor": "hold", "guard": False}
    return Method("plan", tuple(settings.items()), f"hold, uniform {budget}", "hold, uniform")


def _published(file: str, steps: int) -> list[Method]:
    """TeaCache and MagCache with the constants of the profile, and DBCache with and without TaylorSeer."""
    measured = ("profile", file)
    tea = [Method("tea_cache", (("rel_l1_thresh", t), measured), f"tea_cache {t:g}") for t in _scaled(_TEA, steps)]
    names = ("mag_threshold", "mag_max_skip_steps", "mag_retention_ratio")
    mag = [
        Method("mag_cache", (*zip(names, setting, strict=True), measured), f"mag_cache {_joined(setting)}")
        for setting in _magnitudes(steps)
    ]
    thresholds = _scaled(_FIRST_BLOCK, steps)
    return tea + mag + [_db_cache(t, taylor) for taylor in (False, True) for t in thresholds]


def _db_cache(threshold: float, taylor: bool) -> Method:
    series = f"cache_dit DBCache{' + TaylorSeer' if taylor else ''}"
    paced = {"residual_diff_threshold": threshold, "max_warmup_steps": 1, "max_continuous_cached_steps": -1}
    settings: dict[str, Any] = paced | {"enable_taylorseer": taylor}
    return Method("cache_dit", tuple(settings.items()), f"{series} {threshold:g}", series)


def _of_diffusers(profile: Profile) -> list[Custom]:
    """MagCache with the ratios of the profile, first-block caching, and TaylorSeer in single precision."""
    steps = len(profile.facts.noise)
    taylor = dict.fromkeys((interval, max(2, round(part * steps))) for interval, part in _TAYLOR)
    return [
        *(_first_block(threshold) for threshold in _scaled(_FIRST_BLOCK, steps)),
        *(_taylor(interval, begin) for interval, begin in taylor),
        *(_magnitude(profile, setting) for setting in _magnitudes(steps) if profile.facts.mag_cache),
    ]


def _first_block(threshold: float) -> Custom:
    series = "diffusers first-block"
    return diffusers_cache(f"{series} {threshold:g}", lambda: FirstBlockCacheConfig(threshold=threshold), series)


def _taylor(interval: int, begin: int) -> Custom:
    settings: Any = {"cache_interval": interval, "disable_cache_before_step": begin}
    series, exact = "diffusers TaylorSeer", {"taylor_factors_dtype": torch.float32}
    return diffusers_cache(f"{series} {interval} / {begin}", lambda: TaylorSeerCacheConfig(**settings, **exact), series)


def _magnitude(profile: Profile, setting: tuple[float, int, float]) -> Custom:
    series, (_, measured) = "diffusers MagCache", profile.facts.mag_cache[0]
    names = ("threshold", "max_skip_steps", "retention_ratio")
    settings: Any = dict(zip(names, setting, strict=True))
    settings |= {"num_inference_steps": len(profile.facts.noise), "mag_ratios": list(measured.ratios("cond"))}
    return diffusers_cache(f"{series} {_joined(setting)}", lambda: MagCacheConfig(**settings), series)


def _magnitudes(steps: int) -> list[tuple[float, int, float]]:
    """Threshold, longest hold and retention, for MagCache of either library."""
    thresholds = _scaled([threshold for threshold, _, _ in _MAG], steps)
    return [(scaled, skip, retention) for scaled, (_, skip, retention) in zip(thresholds, _MAG, strict=True)]


def _scaled(thresholds: Sequence[float], steps: int) -> list[float]:
    return [float(f"{threshold * _USUAL / steps:.3g}") for threshold in thresholds]


def _joined(setting: tuple[float, ...]) -> str:
    return " / ".join(f"{value:g}" for value in setting)
