"""The methods that are measured: holdover's, and the caches of diffusers and cache-dit themselves.

With random weights, decisions that depend on data are meaningless. MagCache and plans do not depend on data; the other
methods get a fixed schedule, and their rows say so (`forced`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import holdover
from holdover.plan.search import growing
from holdover.profiles import MagCacheProfile, shipped

from .loop import BRANCH, Pipeline
from .table import HELD_IN, RESIDUAL

EVERY = 4  # a forced schedule computes every fourth step and the last: 14 of 50
MAG = {"mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}
MAG_CAREFUL = {"mag_threshold": 0.06, "mag_max_skip_steps": 3, "mag_retention_ratio": 0.2}
# A constant polynomial adds 1 per step; the signal is still computed and read at every step.
TEA_FORCED = {"coefficients": (0.0, 1.0), "rel_l1_thresh": EVERY - 0.5}


@dataclass(frozen=True)
class Session:
    """An enabled method: what to call before a generation and before a step, and what was computed."""

    begin: Callable[[], object] = lambda: None
    before: Callable[[int], None] | None = None
    trace: Callable[[], str | None] = lambda: None
    notes: Callable[[], list[str]] = list
    held_bytes: Callable[[], int | None] = lambda: None
    caches: bool = True


Enable = Callable[[Pipeline, int], AbstractContextManager[Session]]


@dataclass(frozen=True)
class Candidate:
    """One row of the table."""

    label: str
    by: str
    enable: Enable
    floor: str | None = None
    forced: bool = False


UNCACHED = Candidate("no cache", "", lambda pipe, steps: nullcontext(Session(caches=False)))


def holdover_method(method: str, **settings: Any) -> Enable:
    """A method of holdover."""

    @contextmanager
    def enable(pipe: Pipeline, steps: int) -> Iterator[Session]:
        with holdover.enable(pipe, method, **settings) as cache:
            yield Session(
                trace=lambda: _trace(cache.stats()),
                notes=lambda: list(cache.stats().notes),
                held_bytes=lambda: cache.stats().peak_bytes,
            )

    return enable


def _trace(stats: holdover.Stats) -> str:
    return "" if stats.last is None else stats.last.trace(BRANCH)


def planned(count: Callable[[int], int]) -> Enable:
    """A plan with a given schedule for any number of steps."""
    return lambda pipe, steps: holdover_method("plan", schedule=growing(steps, count(steps)), predictor="newton")(
        pipe, steps
    )


def share(count: int) -> Callable[[int], int]:
    """The same share of the steps as `count` of 50; at least two."""
    return lambda steps: max(2, round(steps * count / 50))


SHORTEST_PLAN = Candidate("plan, K = 6 of 50", "holdover", planned(share(6)), "scheduler")


def diffusers_cache(
    make: Callable[[int], Any], before: Callable[[Pipeline], Callable[[int], None]] | None = None
) -> Enable:
    """A cache of diffusers, by its config."""

    @contextmanager
    def enable(pipe: Pipeline, steps: int) -> Iterator[Session]:
        pipe.transformer.enable_cache(make(steps))
        try:
            yield Session(pipe.transformer._reset_stateful_cache, None if before is None else before(pipe))
        finally:
            pipe.transformer.disable_cache()

    return enable


def mag_ratios(name: str) -> list[float]:
    """The ratios of a shipped profile."""
    found: MagCacheProfile = next(p for p in shipped("mag_cache") if p.name == name)
    return list(found.ratios(BRANCH))


def _diffusers_mag(ratios: str) -> Callable[[int], Any]:
    from diffusers import MagCacheConfig

    return lambda steps: MagCacheConfig(
        threshold=0.24, max_skip_steps=5, retention_ratio=0.1, num_inference_steps=steps, mag_ratios=mag_ratios(ratios)
    )


def _first_block(steps: int) -> Any:
    from diffusers import FirstBlockCacheConfig

    return FirstBlockCacheConfig(threshold=0.1)


def _taylor(steps: int) -> Any:
    from diffusers import TaylorSeerCacheConfig

    return TaylorSeerCacheConfig(cache_interval=5)


def _force_first_block(pipe: Pipeline) -> Callable[[int], None]:
    """Set the threshold before each step so that it follows the schedule; the comparison itself still runs."""
    registries = [m._diffusers_hook for m in pipe.transformer.modules() if hasattr(m, "_diffusers_hook")]
    hooks = [hook for registry in registries for hook in registry.hooks.values() if hasattr(hook, "threshold")]

    def before(step: int) -> None:
        for hook in hooks:
            hook.threshold = -1.0 if step % EVERY == 0 else float("inf")

    return before


@contextmanager
def cache_dit_cache(pipe: Pipeline, steps: int) -> Iterator[Session]:
    """cache-dit itself, F1B0, with a fixed mask of computed steps."""
    import cache_dit

    def config() -> Any:
        mask = cache_dit.steps_mask(mask_policy="ultra", total_steps=steps)
        return cache_dit.DBCacheConfig(
            Fn_compute_blocks=1,
            Bn_compute_blocks=0,
            max_continuous_cached_steps=-1,
            num_inference_steps=steps,
            steps_computation_mask=mask,
            steps_computation_policy="static",
        )

    cache_dit.enable_cache(pipe.transformer, cache_config=config())
    try:
        yield Session(lambda: cache_dit.refresh_context(pipe.transformer, cache_config=config(), verbose=False))
    finally:
        cache_dit.disable_cache(pipe.transformer)


def candidates(ratios: str) -> list[Candidate]:
    """The rows of one model after the uncached one, the most important first; cache-dit, whose patches stay, last."""
    forced_scm = {"scm_steps_mask_policy": "ultra", "scm_steps_policy": "static", "max_continuous_cached_steps": -1}
    return [
        Candidate(RESIDUAL, "holdover", holdover_method("mag_cache", profile=ratios, **MAG), "no blocks"),
        Candidate("plan, K = 10 of 50", "holdover", planned(share(10)), "scheduler"),
        Candidate("tea_cache", "holdover", holdover_method("tea_cache", **TEA_FORCED), "no blocks", forced=True),
        Candidate(
            "tea_cache, read late",
            "holdover",
            holdover_method("tea_cache", read="late", **TEA_FORCED),
            "no blocks",
            forced=True,
        ),
        Candidate("plan, K = 8 of 50", "holdover", planned(share(8)), "scheduler"),
        Candidate("plan, K = 15 of 50", "holdover", planned(share(15)), "scheduler"),
        Candidate(
            "mag_cache 0.06/3/0.2", "holdover", holdover_method("mag_cache", profile=ratios, **MAG_CAREFUL), "no blocks"
        ),
        *(
            Candidate(
                f"{RESIDUAL}{HELD_IN}{place}",
                "holdover",
                holdover_method("mag_cache", profile=ratios, hold_in=place, **MAG),
                "no blocks",
            )
            for place in ("fp8", "cpu")
        ),
        Candidate("cache_dit F1B0", "holdover", holdover_method("cache_dit", **forced_scm), "first block", forced=True),
        Candidate("MagCache 0.24/5/0.1", "diffusers", diffusers_cache(_diffusers_mag(ratios)), "no blocks"),
        Candidate("first block", "diffusers", diffusers_cache(_first_block, _force_first_block), "first block", True),
        Candidate("TaylorSeer, interval 5", "diffusers", diffusers_cache(_taylor)),
        Candidate("F1B0", "cache-dit", cache_dit_cache, "first block", forced=True),
    ]


def computing_all(ratios: str, steps: int) -> dict[str, Enable]:
    """Methods that compute every step: their latents must be those of the uncached run, bit for bit."""
    return {
        "mag_cache": holdover_method("mag_cache", profile=ratios, mag_threshold=0.0),
        "tea_cache": holdover_method("tea_cache", coefficients=(0.0, 1.0), rel_l1_thresh=0.0),
        "plan": holdover_method("plan", schedule=tuple(range(steps)), predictor="newton"),
    }
