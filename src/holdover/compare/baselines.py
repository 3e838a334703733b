"""What methods are compared with: a second-order solver, the caches of diffusers, and a frontier of candidates."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FirstBlockCacheConfig,
    FlowMatchEulerDiscreteScheduler,
    MagCacheConfig,
    TaylorSeerCacheConfig,
)
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput
from torch import nn

from ..errors import ConfigError
from ..models.pipelines import find_transformers
from ..plan.search import uniform
from ..profiles import Profile
from .spec import Candidate, Comparison, Custom, FewerSteps, MethodCandidate, Strips

# A second-order solver for fewer steps.


class SecondOrderScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """DPM-Solver++(2M) of diffusers on the sigmas of FlowMatchEulerDiscreteScheduler: only the update differs."""

    @functools.wraps(FlowMatchEulerDiscreteScheduler.set_timesteps)  # pipelines look for `sigmas` in its signature
    def set_timesteps(self, *args: Any, **kwargs: Any) -> None:
        super().set_timesteps(*args, **kwargs)
        self._solver = DPMSolverMultistepScheduler(
            solver_order=2,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            num_train_timesteps=self.config.num_train_timesteps,
        )
        self._solver.set_timesteps(len(self.timesteps))
        self._solver.sigmas, self._solver.timesteps = self.sigmas, self.timesteps
        self._solver.set_begin_index(0)

    def step(
        self, model_output: Any, timestep: Any, sample: Any, generator: Any = None, return_dict: bool = True
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[torch.Tensor]:
        """One step of the solver, in single precision."""
        result = self._solver.step(model_output.float(), timestep, sample.float(), return_dict=False)[0]
        self._step_index = self._solver.step_index
        previous = result.to(model_output.dtype)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=previous) if return_dict else (previous,)


def to_second_order(scheduler: Any) -> SecondOrderScheduler:
    """A second-order scheduler with the timesteps and sigmas of a pipeline's own scheduler."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ConfigError(f"The second-order baseline replaces FlowMatchEulerDiscreteScheduler, not {name}.")
    if scheduler.config.invert_sigmas or scheduler.config.stochastic_sampling:
        raise ConfigError(f"The second-order baseline supports no inverted or stochastic sigmas, as this {name} has.")
    replacement: SecondOrderScheduler = SecondOrderScheduler.from_config(scheduler.config)
    return replacement


# The caches of diffusers.

_QUERY = re.compile(r".*\.attn1?\.to_q(kv)?")


def diffusers_cache(label: str, config: Callable[[], Any], series: str = "") -> Custom:
    """A candidate that calls `transformer.enable_cache(config())` on every transformer of a pipeline."""

    @contextmanager
    def context(pipe: Any) -> Iterator[Callable[[], Strips] | None]:
        transformers: list[Any] = list(find_transformers(pipe).values())
        with ExitStack() as stack:
            for transformer in transformers:
                if not hasattr(transformer, "enable_cache"):
                    raise ConfigError(f"diffusers has no caches for {type(transformer).__name__}.")
                chosen = config()
                stack.callback(transformer.disable_cache)
                try:
                    transformer.enable_cache(chosen)
                finally:
                    transformer._cache_config = chosen  # so that a cache that failed halfway is removed, too
            yield stack.enter_context(_record_strips(pipe, transformers))

    return Custom(label, context, series)


@contextmanager
def _record_strips(pipe: Any, transformers: list[nn.Module]) -> Iterator[Callable[[], Strips] | None]:
    """A function that returns the strips since its last call; None where the attention of a block cannot be found.

    A forward counts as computed if the attention of the last block ran, which no hook on a block can pretend.
    """
    queries = [[module for name, module in t.named_modules() if _QUERY.fullmatch(name)] for t in transformers]
    letters: list[str] = []

    def add_held(*_: Any) -> None:
        letters.append("h")

    def mark_computed(*_: Any) -> None:
        letters[-1] = "C"

    def take_strips() -> Strips:
        strip, steps = "".join(letters), int(pipe.num_timesteps)
        letters.clear()
        if not steps or len(strip) % steps or len(strip) == steps:
            return {"forwards": strip}
        count = len(strip) // steps  # the branches take turns at every step
        return {f"forward {index + 1}": strip[index::count] for index in range(count)}

    handles = [transformer.register_forward_pre_hook(add_held) for transformer in transformers]
    handles += [found[-1].register_forward_hook(mark_computed) for found in queries if found]
    try:
        yield take_strips if all(queries) else None
    finally:
        for handle in handles:
            handle.remove()


# The frontier: plans, every other method at several settings, and fewer steps with both solvers.

SPEED_UPS = (6, 5, 4, 3, 2.5, 2)  # at which plans, uniform holding and fewer steps are compared
_THRESHOLD_STEPS = 50  # the thresholds below are for this number of steps: with fewer, each step changes more
_TEA_CACHE = (0.02, 0.05, 0.1, 0.16)
_MAG_CACHE = ((0.06, 2, 0.2), (0.2, 4, 0.1), (0.7, 5, 0.06), (0.7, 8, 0.06))  # threshold, longest hold, retention
_FIRST_BLOCK = (0.07, 0.13, 0.19, 0.26)
_TAYLOR_SEER = ((3, 0.2), (5, 0.12), (8, 0.08), (8, 0.04))  # interval, and the fraction of steps computed first


def build_frontier_comparison(
    profile: Profile, path: Path | str, prompts: Sequence[str], batch_size: int = 1
) -> Comparison:
    """The comparison of a profile's plans with all other methods; `path` is the file of the profile."""
    steps, facts = len(profile.facts.noise), profile.facts
    budgets = frontier_budgets(steps)
    candidates: list[Candidate] = []

    def add(name: str, series: str, label: str, **settings: Any) -> None:
        candidates.append(MethodCandidate(name, tuple(settings.items()), f"{series} {label}", series))

    for budget in budgets:
        add("plan", "plan", f"{budget}", budget=budget, profile=str(path))
    for threshold in _scale(_TEA_CACHE, steps):
        add("tea_cache", "tea_cache", f"{threshold:g}", rel_l1_thresh=threshold, profile=str(path))
    for threshold, hold, retention in _mag_cache_settings(steps):
        mag: dict[str, Any] = {"mag_threshold": threshold, "mag_max_skip_steps": hold, "mag_retention_ratio": retention}
        add("mag_cache", "mag_cache", f"{threshold:g} / {hold} / {retention:g}", **mag, profile=str(path))
    for taylor in (False, True):
        series = f"cache_dit DBCache{' + TaylorSeer' if taylor else ''}"
        rules: Any = {"max_warmup_steps": 1, "max_continuous_cached_steps": -1, "enable_taylorseer": taylor}
        for threshold in _scale(_FIRST_BLOCK, steps):
            add("cache_dit", series, f"{threshold:g}", residual_diff_threshold=threshold, **rules)
    candidates += _diffusers_caches(profile)
    for budget in budgets:
        schedule = uniform(steps, budget)
        add("plan", "hold, uniform", f"{budget}", schedule=schedule, predictor="hold")
    candidates += [FewerSteps(budget, order) for order in (False, True) for budget in budgets]
    options: dict[str, Any] = {"steps": steps, "guidance": facts.guidance, "batch_size": batch_size}
    return Comparison(tuple(prompts), tuple(candidates), **options, baselines=False)


def frontier_budgets(steps: int) -> list[int]:
    """The numbers of computed steps that plans are compared at."""
    return sorted({max(2, int(steps / factor)) for factor in SPEED_UPS})


def _diffusers_caches(profile: Profile) -> list[Custom]:
    """First-block caching, TaylorSeer in single precision, and MagCache with the ratios of the profile."""
    steps, candidates = len(profile.facts.noise), []

    def add(series: str, label: str, config: type[Any], **settings: Any) -> None:
        candidates.append(diffusers_cache(f"{series} {label}", lambda: config(**settings), series))

    for threshold in _scale(_FIRST_BLOCK, steps):
        add("diffusers first-block", f"{threshold:g}", FirstBlockCacheConfig, threshold=threshold)
    for interval, start in dict.fromkeys((interval, max(2, round(part * steps))) for interval, part in _TAYLOR_SEER):
        taylor: dict[str, Any] = {"cache_interval": interval, "disable_cache_before_step": start}
        taylor["taylor_factors_dtype"] = torch.float32
        add("diffusers TaylorSeer", f"{interval} / {start}", TaylorSeerCacheConfig, **taylor)
    for threshold, hold, retention in _mag_cache_settings(steps) if profile.facts.mag_cache else ():
        mag: dict[str, Any] = {"threshold": threshold, "max_skip_steps": hold, "retention_ratio": retention}
        mag |= {"num_inference_steps": steps, "mag_ratios": list(profile.facts.mag_cache[0][1].ratios("cond"))}
        add("diffusers MagCache", f"{threshold:g} / {hold} / {retention:g}", MagCacheConfig, **mag)
    return candidates


def _mag_cache_settings(steps: int) -> list[tuple[float, int, float]]:
    """Threshold, longest hold and retention, for MagCache of either library."""
    return [(_scale([threshold], steps)[0], hold, retention) for threshold, hold, retention in _MAG_CACHE]


def _scale(thresholds: Sequence[float], steps: int) -> list[float]:
    return [float(f"{threshold * _THRESHOLD_STEPS / steps:.3g}") for threshold in thresholds]
