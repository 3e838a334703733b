"""Measuring a ComfyUI model: a few uncached generations and probes give the profile that plans are made from.

The measurements are those of `holdover.calibrate`: Gram matrices of the outputs by branch, how the branches are mixed,
how errors grow in a generation with held steps, and what an error in the latent means for the image. The constants of
MagCache are those of what the whole model adds to its input, because that is what is held here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, cast

import numpy as np
import torch

from .. import __version__
from ..engine.method import NoneConfig
from ..errors import ConfigError, HoldoverError
from ..magcache.calibration import Calibration
from ..metrics import each, psnr
from ..models.inputs import unwrap_module
from ..plan.calls import hash_prompts
from ..plan.config import NO_PROFILE, PlanConfig
from ..plan.error_model import Array, ErrorModel
from ..plan.generation import GenerationSpec, facts_of
from ..plan.measure import Probe, error_growth
from ..plan.planner import PlanProblem
from ..plan.recording import BranchMix, TrajectoryRecord, find_mix, merge_runs
from ..plan.search import growing
from ..profiles import Profile, ProfileFacts
from ..profiles.facts import COMFYUI
from .model_cache import ModelCache, Settings
from .sampling import KEY, Sampling

_PROBE_INTERVAL = 6  # the probe computes one step in so many


@dataclass(frozen=True)
class _ProbeRun:
    """A generation with held steps: which were computed, and its trajectory."""

    computed: tuple[int, ...]
    record: TrajectoryRecord


def calibrate(
    model: Any,
    sample: Callable[[Any, int], torch.Tensor],
    seeds: Sequence[int],
    name: str,
    decode: Callable[[torch.Tensor], torch.Tensor] | None = None,
    versions: tuple[tuple[str, str], ...] = (),
) -> Profile:
    """Measure a MODEL on generations of `sample(model, seed)`, which returns latents; `decode` makes images of them."""
    if not seeds:
        raise ConfigError("Calibrating needs at least one seed.")
    mixes: list[BranchMix] = []
    growth: list[Array] = []
    offsets: list[float] = []
    magnitudes, spec = Calibration(), None
    for seed in seeds:
        with TrajectoryRecord("cpu", ("outputs", "branches")) as reference, TrajectoryRecord("cpu") as record:
            settings = Settings(NoneConfig())
            plain, latents = _run(
                ModelCache(settings, record=reference, magnitudes=magnitudes.add), model, sample, seed
            )
            magnitudes.finish()
            if spec is not None and not np.array_equal(spec.noise, cast(GenerationSpec, plain.spec).noise):
                raise HoldoverError("The noise levels change from seed to seed: calibrate one size at a time.")
            spec = cast(GenerationSpec, plain.spec)
            if reference.steps != len(spec.noise):
                raise HoldoverError(f"The sampler made {reference.steps} of {len(spec.noise)} evaluations.")
            mix = find_mix(reference.branches, reference.outputs, reference.latents)
            measurements = mix.measurements(spec.noise).merged
            response = PlanProblem(spec, measurements, preconditioning=mix.preconditioning).response
            steps = len(spec.noise)
            schedule = growing(steps, min(steps, max(3, steps // _PROBE_INTERVAL)))
            config = PlanConfig(profile=NO_PROFILE, schedule=schedule, predictor="newton")
            probe, probed = _run(ModelCache(Settings(config), record=record), model, sample, seed)
            assert probe.plan is not None
            run = cast(Probe, _ProbeRun(probe.plan.computed, record))
            growth.append(error_growth(reference, run, ErrorModel(measurements, response, spec.ranges), spec))
            errors = record.squared_errors(reference, steps)
        if decode is not None:
            quality = each(psnr, decode(probed), decode(latents)).double().cpu().numpy()
            found = quality + 10 * np.log10(np.maximum(errors, 1e-20))
            offsets += found[np.isfinite(found)].tolist()
        mixes.append(mix)
    assert spec is not None
    merged, ratios = merge_runs(mixes), magnitudes.profile()
    preconditioning = merged.preconditioning
    facts = ProfileFacts(
        name=name,
        pipeline=COMFYUI,
        scheduler=spec.scheduler,
        noise=tuple(spec.noise.tolist()),
        models=((KEY, facts_of(unwrap_module(model.model.diffusion_model))),),
        prompts=len(seeds),
        prompts_hash=hash_prompts([f"seed {seed}" for seed in seeds]),
        date=date.today().isoformat(),
        versions=(("holdover", __version__), ("torch", torch.__version__), *versions),
        guidance=spec.guidance,
        branches=merged.branches,
        mix=merged.mix,
        scale=() if preconditioning is None else tuple(preconditioning.scale.tolist()),
        carry=() if preconditioning is None else tuple(preconditioning.carry.tolist()),
        psnr_offset=float(np.mean(offsets)) if offsets else None,
        mag_cache=() if ratios is None else ((KEY, ratios),),
    )
    return Profile(facts, merged.grams, np.concatenate(growth), {})


def _run(
    cache: ModelCache, model: Any, sample: Callable[[Any, int], torch.Tensor], seed: int
) -> tuple[Sampling, torch.Tensor]:
    """One generation under a cache; an error if its steps could not be followed."""
    latents = sample(cache.attach(model), seed)
    sampling = cache.last
    if sampling is None or sampling.spec is None or not sampling.stats.forwards:
        why = "; ".join(sampling.notes) if sampling is not None else "the sampler did not run"
        raise HoldoverError(f"This model cannot be measured: {why or 'it does not call diffusion_model wrappers'}.")
    return sampling, latents
