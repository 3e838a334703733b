"""Studies of planned caches: their cost, certificates, the guard, and how much they depend on the calibration."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice, product
from statistics import median
from typing import Any

import numpy as np
import torch

import holdover
from holdover.errors import HoldoverWarning
from holdover.metrics import METRICS, Summary, each, psnr
from holdover.plan.error_model import Weights
from holdover.plan.planner import search_profile
from holdover.plan.replay import Replay
from holdover.plan.training import train
from holdover.profiles import Profile

from ..speed.methods import MAG
from .bench import FIRST_SEED, Bench, Method, Row, Sampling, cached, count_steps, uncached
from .rows import plan

# Cost


FEW = 4  # generations, the default of `holdover.calibrate`


def measure_cost(bench: Bench) -> dict[str, Any]:
    """Calibration in generations, planning in seconds of one core."""
    sampling = Sampling(bench.scale.steps)
    found = measure_calibration(bench, sampling) | measure_planning(bench.profile(sampling))
    return found | {"uncached_seconds": round(bench.generate(uncached(), sampling).seconds, 5)}


def measure_calibration(bench: Bench, sampling: Sampling) -> dict[str, Any]:
    """Forwards of a calibration on a few generations, relative to those of one uncached generation."""
    count = min(FEW, bench.scale.calibrated_on)
    begin = time.perf_counter()
    with count_steps(bench.pipe) as forwards:
        bench.profile(sampling, count)
        steps = forwards()
    generations = count * steps / sampling.steps
    return {
        "calibration": {
            "generations": count,
            "cost_in_generations": round(generations, 3),
            "over_the_generations": round(generations / count - 1, 4),
            "seconds": round(time.perf_counter() - begin, 2),
        }
    }


def measure_planning(profile: Profile) -> dict[str, Any]:
    """CPU seconds of all threads for the schedules of all budgets, and for the weights of each schedule."""
    search_profile(profile).frontier  # noqa: B018 (warms up)
    begin = time.process_time()
    planner = search_profile(profile)
    frontier = planner.frontier
    scheduled = time.process_time() - begin
    for choice in frontier.values():
        planner.model.fit_weights(choice.computed)
    weighted = time.process_time() - begin - scheduled
    return {
        "planning": {
            "budgets": len(frontier),
            "schedules_seconds": round(scheduled, 4),
            "weights_seconds": round(weighted, 4),
        }
    }


# Certificates


def check_certificates(bench: Bench) -> dict[str, Any]:
    """The fastest certified plan for each target, and the share of test images that meet it."""
    return {"certificates": [_check_certificate(bench, target) for target in bench.scale.targets]}


def _check_certificate(bench: Bench, target: str) -> dict[str, Any]:
    """A plan certified on held-back prompts, tried on the test prompts."""
    scale, sampling = bench.scale, Sampling(bench.scale.steps)
    begin, end = scale.held_back
    tuned = holdover.tune(
        bench.pipe,
        bench.profile(sampling),
        bench.calibration_prompts[begin:end],
        target,
        scale.confidence,
        share=scale.share,
        batch_size=scale.batch,
        progress=False,
    )
    found: dict[str, Any] = {"target": target, "in_words": str(tuned)}
    if tuned.certificate is None:
        return found
    generated = bench.generate(plan(tuned.profile, target=target), sampling)
    values = each(psnr, generated.images, bench.reference(sampling)).tolist()
    least = float(target.removeprefix("psnr>="))
    return found | {
        "schedule": list(tuned.certificate.computed),
        "computed": generated.computed,
        "promised_share": tuned.certificate.share,
        "achieved_share": sum(value >= least for value in values) / len(values),
        METRICS["psnr"].name: Summary.of(values).as_dict(),
    }


# The guard


def guard_usual_weights(bench: Bench) -> dict[str, Any]:
    """Computed steps, quality and time of plans with the guard on and off, in turns."""
    sampling, budgets = Sampling(bench.scale.steps), bench.scale.probed
    return {
        "ordinary": [_compare_guard(bench, sampling, budget) | _seconds(bench, sampling, budget) for budget in budgets]
    }


def guard_other_weights(bench: Bench) -> dict[str, Any]:
    """The same with noise on every weight of the transformer: does the fingerprint notice it, does the guard?"""
    found = []
    for noise in bench.scale.noises:
        with noisy_weights(bench.pipe.transformer, noise):
            sampling = Sampling(bench.scale.steps, weights=f"off by {noise:.0%}")
            found += [{"noise": noise} | _compare_guard(bench, sampling, budget) for budget in bench.scale.probed]
    return {"foreign": found}


def _compare_guard(bench: Bench, sampling: Sampling, budget: int) -> dict[str, Any]:
    on, off = _guard_on_and_off(bench, sampling, budget)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldoverWarning)
        rows = {"guard on": bench.row(on, sampling, budget), "guard off": bench.row(off, sampling, budget)}
    texts = sorted({str(warning.message) for warning in caught if issubclass(warning.category, HoldoverWarning)})
    kept = ("computed", "psnr", "ssim")
    return {
        "wanted": budget,
        **{name: {key: row[key] for key in kept} for name, row in rows.items()},
        "noticed_by_fingerprint": any("was measured" in text for text in texts),
        "noticed_by_guard": any("less predictable" in text for text in texts),
        "said": texts,
    }


def _seconds(bench: Bench, sampling: Sampling, budget: int) -> dict[str, float]:
    """Seconds per image, in turns, without the batch that makes the plan; comparable only if no step was added."""
    on, off = _guard_on_and_off(bench, sampling, budget)
    turns = [
        (bench.generate(on, sampling).seconds, bench.generate(off, sampling).seconds)
        for _ in range(bench.scale.repeats)
    ]
    return {"seconds_on": round(median(t[0] for t in turns), 6), "seconds_off": round(median(t[1] for t in turns), 6)}


def _guard_on_and_off(bench: Bench, sampling: Sampling, budget: int) -> tuple[Method, Method]:
    profile = bench.profile(Sampling(sampling.steps))
    return plan(profile, guard=True, budget=budget), plan(profile, guard=False, budget=budget)


@contextmanager
def noisy_weights(transformer: torch.nn.Module, noise: float) -> Iterator[None]:
    """Multiply every weight by one plus noise, and restore the weights at the end."""
    own = {name: parameter.detach().clone() for name, parameter in transformer.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.mul_(1 + noise * torch.randn(parameter.shape, generator=generator).to(parameter))
    try:
        yield
    finally:
        with torch.no_grad():
            for name, parameter in transformer.named_parameters():
                parameter.copy_(own[name])


# Training through the model


def train_plans(bench: Bench) -> dict[str, Any]:
    """Quality on prompts not fitted on, by iterations and by calls of the model, with and without noise levels."""
    scale, sampling = bench.scale, Sampling(bench.scale.steps)
    prompts = list(islice(cycle(bench.calibration_prompts), scale.trained_on))
    fitted, other = bench.replay(sampling, prompts, 0), bench.replay(sampling, bench.prompts, FIRST_SEED)
    offset = bench.profile(sampling).facts.psnr_offset or 0.0
    plans = product(scale.trained, (False, True))
    return {"training": [_train(fitted, other, offset, scale.iterations, *plan) for plan in plans]}


def _train(
    fitted: Replay, other: Replay, offset: float, iterations: int, budget: int, noise_levels: bool
) -> dict[str, Any]:
    """Train from the planner's schedule and weights fitted along its path; no iteration is chosen, none is left out."""
    assert fitted.problem.search is not None
    computed = fitted.problem.search.frontier[budget].computed
    weights = fitted.fit(computed, replace(fitted.problem.options, fitted_below=1.0))
    start, before, course = time.perf_counter(), fitted.runs, list[dict[str, Any]]()

    def record(iteration: int, _: float, trained: Mapping[int, Weights], factors: Mapping[int, float]) -> None:
        errors = other.run(computed, trained, factors)
        kept = Summary.of((offset - 10 * np.log10(np.maximum(errors, 1e-20))).tolist())
        calls = round((fitted.runs - before) * len(fitted.spec.noise))
        row = {"iteration": iteration, "model_calls": calls}
        course.append(row | {"mean": round(kept.mean, 3), "p10": round(kept.p10, 3)})

    def judge(*_: Any) -> float:
        return float(len(course))  # every plan is better than the last, so that training does not stop early

    train(fitted, computed, weights, judge, iterations, report=record, noise_levels=noise_levels)
    return {
        "computed": budget,
        "noise_levels": noise_levels and fitted.has_noise_levels,
        "schedule": str(computed),
        "fitted_on": sum(batch.size for batch in fitted.batches),
        "seconds": round(time.perf_counter() - start, 1),
        "course": course,
    }


# Calibration and storage


def calibrate_on_fewer_generations(bench: Bench) -> dict[str, Any]:
    """Plans calibrated on few and on more generations."""
    sampling = Sampling(bench.scale.steps)
    return {
        "rows": [
            row
            for count in bench.scale.generations
            for row in _rows(bench, sampling, bench.profile(sampling, count), f"{count} generations")
        ]
    }


def use_at_other_guidance(bench: Bench) -> dict[str, Any]:
    """Plans calibrated at the default guidance and used at another, next to a profile of that guidance."""
    own, rows = Sampling(bench.scale.steps), []
    for scale in bench.scale.guidances:
        sampling = Sampling(bench.scale.steps, scale)
        rows += _rows(bench, sampling, bench.profile(own), f"guidance {own.guidance:g} used at {scale:g}")
        rows += _rows(bench, sampling, bench.profile(sampling), f"guidance {scale:g} native")
    return {"rows": rows}


def use_at_other_steps(bench: Bench) -> dict[str, Any]:
    """Plans calibrated at 50 steps and used at fewer, next to a profile of those."""
    own, rows = Sampling(bench.scale.steps), []
    for count, budgets in bench.scale.other_steps:
        sampling = Sampling(count)
        rows += _rows(bench, sampling, bench.profile(own), f"{own.steps} steps used at {count}", budgets)
        rows += _rows(bench, sampling, bench.profile(sampling), f"{count} steps native", budgets)
    return {"rows": rows}


def use_under_other_schedulers(bench: Bench) -> dict[str, Any]:
    """Plans calibrated under Euler and used under others; the reference is uncached under the same scheduler."""
    own, rows = Sampling(bench.scale.steps), []
    for name in ("Euler, shift 3", "DPM-Solver++", "UniPC"):
        sampling = Sampling(bench.scale.steps, scheduler=name)
        rows += _rows(bench, sampling, bench.profile(own), f"Euler used under {name}")
        rows += _rows(bench, sampling, bench.profile(sampling), f"{name} native")
    return {"rows": rows}


def store_residuals(bench: Bench) -> dict[str, Any]:
    """Residuals held unchanged, in 8 bits, and in host memory."""
    sampling = Sampling(bench.scale.steps)
    common: dict[str, Any] = {"profile": bench.profile_file(sampling)}
    methods = {
        "mag_cache": MAG,
        "tea_cache": {"rel_l1_thresh": 0.4},
    }
    return {
        "rows": [
            bench.row(cached(f"{name}, held in {place}", name, hold_in=place, **common, **settings), sampling, 0)
            for name, settings in methods.items()
            for place in ("device", "fp8", "cpu")
        ]
    }


def _rows(
    bench: Bench, sampling: Sampling, profile: Profile, title: str, budgets: tuple[int, ...] | None = None
) -> list[Row]:
    budgets = budgets or bench.scale.probed
    return [bench.row(plan(profile, title, budget=budget), sampling, budget) for budget in budgets]
