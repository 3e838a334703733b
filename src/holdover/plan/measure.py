"""`calibrate`: run the pipeline uncached on a few prompts, record what every method needs, and write a profile.

Each prompt is generated twice. The first run is uncached: it gives the Gram matrices of the outputs, the branch mix
and the constants of TeaCache and MagCache. The second run, the *probe*, computes one step in six and extrapolates the
others: it shows how much errors grow compared with the simulation, and what an error in the latent means for the image.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Sequence
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from os import PathLike
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from ..engine.branches import find_guiders
from ..engine.clock import SchedulerStep
from ..engine.engine import Engine
from ..engine.install import CachedTransformer
from ..engine.method import Method, NoneConfig, NoneMethod, Runner
from ..engine.state import ComputedForward
from ..errors import ConfigError, HoldoverError, HoldoverWarning, UnsupportedModelError, did_you_mean
from ..grid import Grid
from ..magcache.calibration import Calibration
from ..metrics import each, psnr
from ..models.inputs import iter_tensors, unwrap_module
from ..models.pipelines import find_transformers
from ..models.registry import Signal
from ..policies.base import AlwaysCompute, Scheduled
from ..profiles import Profile, ProfileFacts, TeaCacheProfile
from ..profiles.facts import EFFORTS
from ..profiles.files import write_file
from ..teacache.estimate import SignalMeasure
from .calls import (
    GENERATIONS,
    Batch,
    Caller,
    Prompt,
    as_prompts,
    built_in_prompts,
    hash_each,
    hash_prompts,
    installed_engine,
    make_batches,
)
from .config import PlanConfig, steps_for
from .error_model import Array, ErrorModel, Measurements, Weights, held_steps
from .estimate import OutputMonitor, OutputTable
from .generation import NEWTON_DEPTH, GenerationSpec, facts_of, guidance_of, model_output
from .method import PlanMethod
from .planner import PlanProblem
from .polish import expected_generations, improve
from .recorded import ReplayError, find_shares
from .recording import BranchMix, Kept, OutputRecorder, TrajectoryRecord, find_mix, merge_runs
from .search import growing

logger = logging.getLogger(__name__)
_PROBE_INTERVAL = 6  # the probe computes one step in so many
_POLYNOMIAL_DEGREE = 4  # of TeaCache's rescaling
_MEASURED = "measured.safetensors"  # in the folder of a calibration that can be continued
_IDENTITY = "measured.sha256"  # written last
DEFAULT_PROMPTS = {"quick": GENERATIONS, "standard": 16, "thorough": 64}
_LIBRARIES = ("holdover", "torch", "diffusers", "transformers")


def calibrate(
    pipe: Any,
    prompts: Prompt | Sequence[Prompt] | None = None,
    num_inference_steps: int = 50,
    *,
    guidance_scale: float | None = None,
    seed: int = 0,
    batch_size: int = 1,
    seams: bool = False,
    store: str = "device",
    name: str | None = None,
    effort: str = "standard",
    budgets: Sequence[int | str] = ("3x", "5x"),
    resume: str | PathLike[str] | None = None,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """Measure the constants of every method on a few uncached generations, and try plans on them.

    A prompt is a text or the keywords of one call; the default are 4, 16 or 64 prompts of a built-in list, by effort.
    `batch_size` prompts are generated at once, and `call` is passed to every call of the pipeline. `store` is where the
    outputs of a generation are kept until it ends: on the `"device"`, the `"cpu"` or on `"disk"`. `seams` also measures
    residuals, for plans that hold those. Measuring costs about a fifth more than the generations alone.

    `effort` says how much is tried on the model to plan for `budgets` (computed steps, or speed-ups such as "4x"):

    - "quick": nothing; plans are computed from the measurements.
    - "standard": weights are fitted along the path that a plan really takes, and trials choose the planner's options.
    - "thorough": also moves single computed steps of each schedule, and trains its weights through the model.

    `resume` is a folder in which results are kept while they are made: a calibration that was stopped continues there.
    """
    if effort not in EFFORTS:
        raise ConfigError(f"effort must be one of {', '.join(EFFORTS)}, not {effort!r}.{did_you_mean(effort, EFFORTS)}")
    if not hasattr(getattr(pipe, "scheduler", None), "step"):
        raise ConfigError(f"Calibrating needs a pipeline with a scheduler; {type(pipe).__name__} has none.")
    if guidance_scale is not None and any(find_guiders(pipe).values()):
        raise ConfigError(
            f"The guidance scale of this {type(pipe).__name__} is that of its guider: set it there, with "
            "pipe.update_components(guider=pipe.guider.new(guidance_scale=...))."
        )
    chosen = as_prompts(built_in_prompts(pipe)[: DEFAULT_PROMPTS[effort]] if prompts is None else prompts)
    if not chosen:
        raise ConfigError("Calibrating needs at least one prompt.")
    if effort != "quick" and len(chosen) < 2:
        raise ConfigError(
            f"effort={effort!r} needs two prompts at least: one half is fitted to, the other judges. "
            'With one prompt, use effort="quick".'
        )
    folder = None if resume is None else Path(resume)
    caller, begin = Caller(pipe, num_inference_steps, guidance_scale, call), time.perf_counter()
    _check_budgets(budgets, num_inference_steps)
    batches, name = make_batches(chosen, batch_size, seed), name or f"calibrated-{type(pipe).__name__}"
    identity = _identify(caller, seed, batch_size, seams)
    profile = None if folder is None else _resumed(folder, caller, chosen, name, identity)
    if profile is None:
        measuring = expected_cost(len(chosen), num_inference_steps, "quick", budgets)
        cost = expected_cost(len(chosen), num_inference_steps, effort, budgets)
        text = f"measuring, {measuring:.0f} of at most {cost:.0f} generations"
        bar = tqdm(total=2 * len(batches), disable=not progress, desc=text, unit="run")
        with bar, installed_engine(pipe, NoneMethod(NoneConfig())) as engine:
            session = _CalibrationSession(caller, engine, store, seams)
            for batch in batches:
                session.measure(batch, bar)
            profile = session.profile(name, chosen)
        spent = ("generations", round(measuring, 1)), ("seconds", round(time.perf_counter() - begin, 1))
        profile = profile.with_facts(cost=spent)
        if folder is not None:
            profile.save(folder / _MEASURED)
            write_file(folder / _IDENTITY, identity.encode())
    if effort == "quick":
        return profile
    shared: dict[str, Any] = {"seed": seed, "batch_size": batch_size, "progress": progress}
    log = None if folder is None else folder / f"{effort}.json"
    try:
        improved = improve(pipe, profile, budgets, chosen, effort == "thorough", log=log, **shared, **call)
    except ReplayError as error:
        message = (
            f"Nothing was tried on this {type(pipe).__name__}, its plans are those of a quick calibration: {error}"
        )
        warnings.warn(message, HoldoverWarning, stacklevel=2)
        return profile
    before = dict(profile.facts.cost)
    total = tuple((key, round(before[key] + value, 1)) for key, value in improved.facts.cost)
    return improved.with_facts(effort=effort, cost=total)


def expected_cost(prompts: int, steps: int, effort: str, budgets: Sequence[int | str]) -> float:
    """What a calibration costs at most, in uncached generations."""
    counts = [steps_for(budget, steps) for budget in budgets]
    trials = 0.0 if effort == "quick" else expected_generations(counts, steps, prompts, effort == "thorough")
    return prompts * (1 + 1 / _PROBE_INTERVAL) + trials


def _check_budgets(budgets: Sequence[int | str], steps: int) -> None:
    """Refuse budgets that no plan of so many steps can have, before anything is measured."""
    if isinstance(budgets, (str, int, float)) or not budgets:
        raise ConfigError(f'budgets is a list of computed steps or speed-ups, such as [8, "4x"], not {budgets!r}.')
    for budget in budgets:
        if steps_for(budget, steps) < 1 or (isinstance(budget, int) and budget > steps):
            raise ConfigError(f"A budget for {steps} steps is 1 to {steps} computed steps, not {budget}.")


def _identify(caller: Caller, seed: int, batch_size: int, seams: bool) -> str:
    """A hash of what a measurement depends on and its profile does not record."""
    scheduler, guider = caller.pipe.scheduler, guidance_of(caller.pipe)[1]
    config = f"{type(scheduler).__name__} {sorted(getattr(scheduler, 'config', {}).items(), key=str)}"
    own = {"seed": seed, "batch_size": batch_size, "seams": seams, "scheduler": config, "guider": guider}
    return hash_prompts([{key: str(value) for key, value in own.items()}, dict(caller.settings)])


def _resumed(folder: Path, caller: Caller, prompts: Sequence[Prompt], name: str, identity: str) -> Profile | None:
    """The measurements of a calibration that was stopped, if it got that far."""
    if not (folder / _MEASURED).exists() or not (folder / _IDENTITY).exists():
        return None
    if (folder / _IDENTITY).read_bytes() != identity.encode():
        raise ConfigError(f"{folder} is from another calibration; remove it to begin again.")
    profile = Profile.load(folder / _MEASURED)
    facts, transformers = profile.facts, find_transformers(caller.pipe)
    same = (facts.prompts_hash, len(facts.noise), facts.name, dict(facts.call)) == (
        hash_prompts(prompts),
        caller.steps,
        name,
        dict(_plain_settings(caller)),
    ) and caller.guidance in (None, facts.guidance)
    models = tuple((key, facts_of(unwrap_module(module))) for key, module in transformers.items())
    if not same or facts.models != models:
        raise ConfigError(f"{folder} is from another calibration; remove it to begin again.")
    return profile


class BlockRecorder(OutputRecorder):
    """Also records the residuals of the blocks, and measures the constants of TeaCache and MagCache."""

    def __init__(self, record: TrajectoryRecord, signals: SignalMeasure, ratios: dict[str, Calibration]) -> None:
        super().__init__(record)
        self._signals, self._ratios = signals, ratios

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return Method.make_runner(self, transformer)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> AlwaysCompute:
        super().policy(transformer, branch, grid)
        return AlwaysCompute(needs_signal=True)

    def signal(self, transformer: CachedTransformer) -> Signal:
        return self._signals.signal(transformer)

    def observe(self, computed: ComputedForward) -> None:
        super().observe(computed)
        self._record.add_residual(computed)
        self._signals.observe(computed)
        self._ratios.setdefault(computed.transformer.name, Calibration()).add(computed)

    def on_end(self) -> None:
        super().on_end()
        self._signals.on_end()
        for ratios in self._ratios.values():
            ratios.finish()


class Probe(PlanMethod):
    """Computes one step in six and extrapolates the others with Newton, to see how errors grow."""

    follows = True
    observes = True
    uses_profile = False

    def __init__(self, record: TrajectoryRecord, measurements: Measurements) -> None:
        steps = measurements.steps
        schedule = growing(steps, min(steps, max(3, steps // _PROBE_INTERVAL)))
        super().__init__(PlanConfig(schedule=schedule, predictor="newton"))
        self.outputs = OutputMonitor(OutputTable(measurements, np.zeros(steps), ((0, steps - 1),)))
        self.computed: tuple[int, ...] = ()
        self.record = record
        self.first_mix: tuple[float, ...] | None = None
        self._first: list[Any] = []  # the outputs of the first step

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Scheduled:
        scheduled = super().policy(transformer, branch, grid)
        self.computed = tuple(sorted(scheduled.computed))
        return scheduled

    def observe(self, computed: ComputedForward) -> None:
        if computed.step == 0:
            self._first.append([tensor.clone() for tensor in iter_tensors(computed.output)])

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        self.record.add_step(stepped)
        if stepped.step == 0:
            self.first_mix = find_shares(self._first, model_output(stepped, self.record.preconditioning))
            self._first.clear()
        if stepped.step in self.computed:
            self.outputs.observe(stepped.step, model_output(stepped, self.record.preconditioning), computed=True)

    def on_end(self) -> None:
        super().on_end()
        self.record.finish()
        self.outputs.close()


def error_growth(reference: TrajectoryRecord, probe: Probe, model: ErrorModel, spec: GenerationSpec) -> Array:
    """(batch, N+1): log of the probe's real over its simulated squared error, interpolated between computed steps."""
    anchors = {step: before[-NEWTON_DEPTH:] for step, before in held_steps(probe.computed, spec.ranges).items()}
    simulated = model.latent_errors({step: Weights(a, spec.newton.weights(step, a)) for step, a in anchors.items()})
    knots = [step for step in probe.computed if step and step - 1 not in probe.computed] + [model.steps]
    real = np.stack([probe.record.squared_errors(reference, step) for step in knots], axis=1)
    ratio = np.log(np.maximum(real, 1e-20) / np.maximum(simulated[:, knots], 1e-20))
    return np.stack([np.interp(range(model.steps + 1), [0, *knots], [0.0, *row]) for row in ratio])


class _CalibrationSession:
    """Runs pairs of an uncached generation and a probe, and collects their measurements."""

    def __init__(self, caller: Caller, engine: Engine, store: str, seams: bool) -> None:
        self._caller, self._engine, self._store, self._seams = caller, engine, store, seams
        self._signals, self._ratios = SignalMeasure(None), dict[str, Calibration]()
        self._blocks_supported = True
        self._spec: GenerationSpec | None = None
        self._mixes: list[BranchMix] = []
        self._passes = 0
        self._growth: list[Array] = []
        self._residual_grams: dict[str, list[Array]] = {}
        self._psnr_offsets: list[float] = []
        self._forecast_ratios: list[float] = []
        self._first_mix: tuple[float, ...] = ()

    def measure(self, batch: Batch, bar: Any) -> None:
        """One uncached run and one probe of the same images."""
        keep: tuple[Kept, ...] = ("outputs", "branches", "residuals") if self._seams else ("outputs", "branches")
        announce = None if self._mixes else partial(self._announce, bar)
        with TrajectoryRecord(self._store, keep, announce=announce) as reference:
            images, spec = self._run_uncached(reference, batch)
            bar.update()
            self._passes = reference.first_branches * self._engine.transformers[0].groups.cfg_rank[1]
            mix = find_mix(reference.branches, reference.outputs, reference.latents)
            if spec.guider and len(reference.branches) > 1 and not mix.branches and not self._mixes:
                logger.warning(
                    "%s does not mix its passes with the same shares at every step: plans have one set of weights for "
                    "all passes, and the quality they predict is less certain. Check it with holdover.tune.",
                    spec.guider,
                )
            for name, grams in reference.residual_grams().items():
                self._residual_grams.setdefault(name, []).append(grams)
            measurements = mix.measurements(spec.noise).merged
            response = PlanProblem(spec, measurements, preconditioning=mix.preconditioning).response
            model = ErrorModel(measurements, response, spec.ranges)
            with TrajectoryRecord(self._store, preconditioning=mix.preconditioning) as record:
                probe = Probe(record, measurements)
                probe_images = self._run(probe, batch)
                bar.update()
                self._growth.append(error_growth(reference, probe, model, spec))
                errors = record.squared_errors(reference, reference.steps)
        if images is not None and probe_images is not None and len(images) == len(errors):
            quality = each(psnr, probe_images, images).double().cpu().numpy()
            offsets = quality + 10 * np.log10(np.maximum(errors, 1e-20))
            self._psnr_offsets += offsets[np.isfinite(offsets)].tolist()
        self._forecast_ratios += probe.outputs.ratios
        if not self._mixes:
            self._first_mix = probe.first_mix or ()
        self._mixes.append(mix)

    def _announce(self, bar: Any, latent: torch.Tensor) -> None:
        """State the memory that the trajectories take, before it is used."""
        count, size = 5 * (self._caller.steps + 1), latent.numel() * 4 / 1e6
        text = f"keeping up to {count} latents of {size:.1f} MB: {count * size:.0f} MB, store={self._store!r}"
        (logger.info if bar.disable else bar.write)(text)

    def _run_uncached(self, record: TrajectoryRecord, batch: Batch) -> tuple[torch.Tensor | None, GenerationSpec]:
        """An uncached run that records the blocks, or the outputs alone if the blocks cannot be held.

        Every run must make all steps of the same noise levels.
        """
        blocks = self._blocks_supported
        method = BlockRecorder(record, self._signals, self._ratios) if blocks else OutputRecorder(record)
        try:
            images = self._run(method, batch)
        except UnsupportedModelError as error:
            if not blocks:
                raise
            logger.warning("This model supports plans only, because its blocks cannot be held: %s", error)
            self._blocks_supported = False
            record.clear()
            return self._run_uncached(record, batch)
        spec = method.spec
        if spec is None:
            raise HoldoverError("The pipeline did not call its transformer: there is nothing to measure.")
        name, steps = type(self._caller.pipe).__name__, len(spec.noise)
        if record.steps > steps:
            raise HoldoverError(
                f"{name} steps its scheduler {record.steps} times in {steps} steps, so what a held step changes cannot "
                "be measured, and there are no plans for it. Use easy_cache, mag_cache or tea_cache, or calibrate a "
                "pipeline that makes each step once."
            )
        if record.steps < steps:
            raise HoldoverError(
                f"{name} makes {record.steps} of the {steps} steps of its scheduler: calibrate it from noise, such as "
                "with strength=1. The profile is good for fewer steps too."
            )
        if self._spec is not None and not np.array_equal(self._spec.noise, spec.noise):
            raise HoldoverError("The pipeline's noise levels change from call to call: calibrate one size at a time.")
        self._spec = spec
        return images, spec

    def _run(self, method: Method[Any], batch: Batch) -> torch.Tensor | None:
        with self._engine.use(method):
            return self._caller(*batch)

    def profile(self, name: str, prompts: Sequence[Prompt]) -> Profile:
        """All measurements with their provenance."""
        assert self._spec is not None
        pipe, caller, spec, mix = self._caller.pipe, self._caller, self._spec, merge_runs(self._mixes)
        preconditioning, ratios = mix.preconditioning, self._forecast_ratios
        transformers = [transformer for transformer in self._engine.transformers if transformer.name in self._ratios]
        tea_cache: list[tuple[str, TeaCacheProfile]] = []
        for transformer in transformers:
            try:
                fit = self._signals.profile(transformer, _POLYNOMIAL_DEGREE, len(prompts))
                tea_cache.append((transformer.name, fit))
            except ConfigError as error:  # a signal that does not change
                logger.warning("No TeaCache coefficients for %s: %s", transformer.name, error)
        mag_cache = {transformer.name: self._ratios[transformer.name].profile() for transformer in transformers}
        facts = ProfileFacts(
            name=name,
            pipeline=type(pipe).__name__,
            scheduler=type(pipe.scheduler).__name__,
            noise=tuple(spec.noise.tolist()),
            models=tuple((transformer.name, facts_of(transformer.core)) for transformer in self._engine.transformers),
            prompts=len(prompts),
            prompts_hash=hash_prompts(prompts),
            prompt_hashes=hash_each(prompts),
            date=date.today().isoformat(),
            versions=tuple((library, _version(library)) for library in _LIBRARIES),
            guidance=spec.guidance if caller.guidance is None or spec.guider else float(caller.guidance),
            branches=mix.branches,
            mix=mix.mix,
            passes=self._passes,
            first_mix=() if mix.branches else self._first_mix,
            scale=() if preconditioning is None else tuple(preconditioning.scale.tolist()),
            carry=() if preconditioning is None else tuple(preconditioning.carry.tolist()),
            call=_plain_settings(caller),
            starts=tuple(first for first, _ in spec.ranges),
            psnr_offset=float(np.mean(self._psnr_offsets)) if self._psnr_offsets else None,
            surprise=(median(ratios), max(ratios)) if ratios else (),
            tea_cache=tuple(tea_cache),
            mag_cache=tuple((name, ratios) for name, ratios in mag_cache.items() if ratios is not None),
            guider=spec.guider,
        )
        residual_grams = {name: np.concatenate(grams) for name, grams in self._residual_grams.items()}
        return Profile(facts, mix.grams, np.concatenate(self._growth), residual_grams)


def _plain_settings(caller: Caller) -> tuple[tuple[str, str | int | float | bool], ...]:
    """The settings of the calls that a profile records."""
    return tuple((k, v) for k, v in caller.settings.items() if isinstance(v, (str, int, float, bool)))


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:  # used from a source tree
        return "unknown"
