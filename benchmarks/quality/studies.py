"""Studies of planned caches: cost, certificates, the PSNR told of an image, and how much calibration matters."""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import cycle, islice, product
from typing import Any

import numpy as np
import torch

import holdover
from holdover.errors import HoldoverWarning
from holdover.metrics import METRICS, Summary, each, psnr
from holdover.plan.calls import Caller
from holdover.plan.error_model import Weights
from holdover.plan.estimate import rank_correlation
from holdover.plan.planner import search_profile
from holdover.plan.replay import Replay
from holdover.plan.training import TrainingState, train
from holdover.plan.tune import Trials
from holdover.profiles import Profile

from ..speed.methods import MAG
from .bench import FIRST_SEED, Bench, Row, Sampling, cached, count_steps, uncached
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


# What is told of an image


def estimate_quality(bench: Bench) -> dict[str, Any]:
    """Estimates of the PSNR, fitted on calibration prompts, and how far they are off on the test prompts."""
    scale, profile = bench.scale, bench.profile(Sampling(bench.scale.steps))
    prompts = bench.calibration_prompts[slice(*scale.held_back)]
    trials = Trials(Caller.like(profile, bench.pipe, {}), prompts, 0, scale.batch)
    trials.generate_references()
    bench.reference(Sampling(scale.steps))  # before a cache is on
    return {"expected": [_estimate(bench, profile, trials, budget) for budget in scale.budgets[:5:2]]}


def _estimate(bench: Bench, profile: Profile, trials: Trials, budget: int) -> dict[str, Any]:
    """The estimate of one plan: what it says of itself, and what is measured on the test prompts."""
    sampling, computed = Sampling(bench.scale.steps), search_profile(profile).frontier[budget].computed
    estimate = trials.run(profile, "psnr", computed).estimate
    if estimate is None:
        return {"computed": budget, "prompts": 0}
    told, kept = list[float](), list[float]()
    always_told = profile.with_facts(estimates=(replace(estimate, rank_correlation=1.0),))
    with holdover.enable(bench.pipe, "plan", profile=always_told, schedule=computed) as cache:
        for start in range(0, len(bench.prompts), bench.scale.batch):
            prompts = bench.prompts[start : start + bench.scale.batch]
            images = bench.generate_batch(prompts, FIRST_SEED + start, sampling)
            kept += each(psnr, images, bench.reference(sampling)[start : start + len(prompts)]).tolist()
            told += cache.stats().generations[-1].expected.psnr
    errors = np.array(told) - np.array(kept)
    return {
        "computed": budget,
        "prompts": estimate.prompts,
        "told_error": round(estimate.error, 3),
        "told_rank_correlation": round(estimate.rank_correlation, 3),
        "test_prompts": len(kept),
        "test_deviation": round(float(np.std(kept)), 3),
        "test_error": round(float(np.sqrt(np.mean(errors**2))), 3),
        "test_rank_correlation": round(rank_correlation(np.array(told), np.array(kept)), 3),
    }


def add_late_steps(bench: Bench) -> dict[str, Any]:
    """What becomes of the images that keep least if every step is computed once their errors can be seen."""
    budget, sampling = bench.scale.probed[0], Sampling(bench.scale.steps)
    profile = bench.profile(sampling)
    early = search_profile(profile).frontier[budget].computed[: (budget + 1) // 2]
    begin = early[-1] + 1
    schedule = (*early, *range(begin, sampling.steps))
    kept = each(psnr, bench.generate(plan(profile, budget=budget), sampling).images, bench.reference(sampling))
    tenth = float(np.percentile(kept.numpy(), 10))
    worst = [index for index, value in enumerate(kept.tolist()) if value <= tenth]
    with holdover.enable(bench.pipe, "plan", profile=profile, schedule=schedule):
        images = [bench.generate_batch(bench.prompts[i : i + 1], FIRST_SEED + i, sampling) for i in worst]
    after = each(psnr, torch.cat(images), bench.reference(sampling)[worst])
    return {
        "late": {
            "computed": budget,
            "every_step_from": begin,
            "images": len(worst),
            "psnr": round(float(kept[worst].mean()), 3),
            "psnr_after": round(float(after.mean()), 3),
            "at_least_1_db_better": int((after > kept[worst] + 1).sum()),
        }
    }


def run_on_other_weights(bench: Bench) -> dict[str, Any]:
    """Plans with noise on every weight of the transformer: does the fingerprint notice it, do the outputs?"""
    found = []
    for noise in bench.scale.noises:
        with noisy_weights(bench.pipe.transformer, noise):
            sampling = Sampling(bench.scale.steps, weights=f"off by {noise:.0%}")
            found += [{"noise": noise} | _run_noticed(bench, sampling, budget) for budget in bench.scale.probed]
    return {"foreign": found}


def _run_noticed(bench: Bench, sampling: Sampling, budget: int) -> dict[str, Any]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HoldoverWarning)
        row = bench.row(plan(bench.profile(Sampling(sampling.steps)), budget=budget), sampling, budget)
    texts = sorted({str(warning.message) for warning in caught if issubclass(warning.category, HoldoverWarning)})
    return {
        "wanted": budget,
        **{key: row[key] for key in ("computed", "psnr", "ssim")},
        "noticed_by_fingerprint": any("was measured" in text for text in texts),
        "noticed_by_outputs": any("less predictable" in text for text in texts),
        "said": texts,
    }


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

    def record(state: TrainingState, _: float, trained: Mapping[int, Weights], factors: Mapping[int, float]) -> None:
        errors = other.run(computed, trained, factors)
        kept = Summary.of((offset - 10 * np.log10(np.maximum(errors, 1e-20))).tolist())
        calls = round((fitted.runs - before) * len(fitted.spec.noise))
        row = {"iteration": state.iteration, "model_calls": calls}
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
