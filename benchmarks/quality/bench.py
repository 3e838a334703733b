"""The sizes of the benchmark, the methods it enables, and the built-in model that generates the test images."""

from __future__ import annotations

import fcntl
import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from math import isqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    SeaCacheConfig,
    TaylorSeerCacheConfig,
    UniPCMultistepScheduler,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

import holdover
from holdover.compare import SecondOrderScheduler
from holdover.metrics import METRICS, Summary, each, lpips, psnr, ssim
from holdover.plan.calls import Caller, make_batches
from holdover.plan.replay import Replay
from holdover.profiles import Profile

# How much is measured


@dataclass(frozen=True)
class Scale:
    """How much is measured. Budgets are computed steps; only other methods are measured at those in `beyond`."""

    model: str = "emoji"
    prompts: int = 128
    batch: int = 64
    steps: int = 50
    budgets: tuple[int, ...] = (6, 8, 10, 12, 15, 20, 25)
    beyond: tuple[int, ...] = (32,)
    fewer_steps: int = 28
    fewer_budgets: tuple[int, ...] = (6, 8, 10, 14)
    judged: tuple[int, int] = (8, 20)
    probed: tuple[int, ...] = (10, 15)
    other_steps: tuple[tuple[int, tuple[int, ...]], ...] = ((28, (10, 15)), (20, (10, 15)))
    generations: tuple[int, ...] = (4, 8, 16)
    guidances: tuple[float, ...] = (1.5, 6.0)
    effort_prompts: int = 128
    trained: tuple[int, ...] = (10,)
    trained_on: int = 64
    iterations: int = 120
    searched: int = 32
    tries: int = 8
    halvings: int = 6
    targets: tuple[str, ...] = ("psnr>=35", "psnr>=40")
    held_back: tuple[int, int] = (64, 128)
    share: float = 0.95
    confidence: float = 0.95
    noises: tuple[float, ...] = (0.02, 0.05)
    repeats: int = 3
    tf32: bool = False
    call: Mapping[str, Any] = field(default_factory=dict)

    @property
    def calibrated_on(self) -> int:
        """How many generations profiles are calibrated on by default."""
        return self.generations[-1]

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self)


QUICK = Scale(
    prompts=2,
    batch=2,
    steps=8,
    budgets=(4,),
    beyond=(),
    fewer_steps=6,
    fewer_budgets=(3,),
    judged=(4, 4),
    probed=(4,),
    other_steps=((6, (3,)), (5, (3,))),
    generations=(1, 2),
    guidances=(6.0,),
    effort_prompts=4,
    trained=(4,),
    trained_on=2,
    iterations=2,
    searched=1,
    tries=1,
    halvings=2,
    targets=("psnr>=20",),
    held_back=(2, 4),
    share=0.5,
    confidence=0.5,
    noises=(0.05,),
    repeats=1,
    call={"height": 36, "width": 36},
)


# Methods


Count = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Method:
    """A method with its settings; `around(pipe)` enables it and yields a function that counts computed steps.

    `kind` says how it is made: the name of a method of holdover, or the class of one of diffusers' configs.
    """

    title: str
    around: Callable[[Any], AbstractContextManager[Count]]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    kind: str = "none"

    @property
    def key(self) -> str:
        """Equal for equal titles and settings."""
        return f"{self.title} {json.dumps(self.settings, sort_keys=True)}"


def uncached() -> Method:
    """Every step computed."""
    return Method("uncached", _whole_steps)


def cached(title: str, name: str, **settings: Any) -> Method:
    """One of holdover's methods."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        with holdover.enable(pipe, name, **settings) as cache:
            yield lambda: fmean(cache.stats().generations[-1].computed.values())

    return Method(title, around, _as_json(settings), kind=name)


def diffusers_cache(title: str, config: type, **settings: Any) -> Method:
    """One of diffusers' own caches, by the config that it is enabled with; TaylorSeer's factors in single precision."""
    more = {"taylor_factors_dtype": torch.float32} if config is TaylorSeerCacheConfig else {}

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        pipe.transformer.enable_cache(config(**settings, **more))
        try:
            with count_steps(pipe) as count:
                yield count
        finally:
            pipe.transformer.disable_cache()

    return Method(title, around, settings, kind=config.__name__)


def sea_cache_of_diffusers(**settings: Any) -> Method:
    """diffusers' SeaCache with what only its Cosmos 3 pipeline passes: the latents, the step, and its noise level."""
    title = "diffusers SeaCache"

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        plain, scheduler = pipe.transformer.cache_context, pipe.scheduler

        def cache_context(name: str) -> Any:
            step, steps = scheduler.step_index or 0, pipe.num_timesteps
            return plain(name, step_index=step, sigma=float(scheduler.sigmas[step]), num_inference_steps=steps)

        given = settings | {"raw_vision_callback": _latents}
        with diffusers_cache(title, SeaCacheConfig, **given).around(pipe) as count:
            pipe.transformer.cache_context = cache_context
            try:
                yield count
            finally:
                del pipe.transformer.cache_context

    return Method(title, around, settings, kind=SeaCacheConfig.__name__)


def _latents(transformer: Any, args: Any, kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The latents that a forward gets, each as (channels, frames, height, width)."""
    states: Tensor = kwargs["hidden_states"]
    if states.ndim == 5:
        return list(states[:, : transformer.config.out_channels])
    side = isqrt(states.shape[1])
    return list(states.transpose(1, 2).unflatten(2, (1, side, side)))


def fewer(steps: int, order: int) -> Method:
    """No cache but fewer steps, with a solver of first or second order."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        own = pipe.scheduler
        pipe.scheduler = own if order == 1 else SecondOrderScheduler.from_config(own.config)
        try:
            yield lambda: steps
        finally:
            pipe.scheduler = own

    return Method("fewer steps" if order == 1 else "fewer steps, second order", around, {"steps": steps}, steps)


@contextmanager
def count_steps(pipe: Any) -> Iterator[Count]:
    """Count forwards of the last block per branch, by a hook inside it that runs only if the block does."""
    calls = 0

    def add(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def count() -> float:
        nonlocal calls
        found, calls = calls, 0
        return found / (2 if pipe.do_classifier_free_guidance else 1)

    stacks = ("single_transformer_blocks", "blocks")
    last = next(stack for name in stacks if (stack := getattr(pipe.transformer, name, None)) is not None)[-1]
    handle = (last.attn1 if hasattr(last, "attn1") else last.attn).to_q.register_forward_hook(add)
    try:
        yield count
    finally:
        handle.remove()


@contextmanager
def _whole_steps(pipe: Any) -> Iterator[Count]:
    yield lambda: float(pipe.num_timesteps)


def _as_json(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as JSON; a profile is given by its name, and the path of a file is left out."""
    named = {key: value.name if isinstance(value, Profile) else value for key, value in settings.items()}
    plain: dict[str, Any] = json.loads(
        json.dumps({k: v for k, v in named.items() if k != "profile" or not str(v).endswith(".safetensors")})
    )
    return plain


# Images and figures


PROMPTS = {"emoji": "prompts.txt", "emoji-motion": "prompts_motion.txt"}  # of each built-in model
GUIDANCE = 3.0
FIRST_SEED, SEARCH_SEED = 2_000_000, 3_000_000  # of the test and search images; calibration and tuning use others
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "Euler": lambda own: own,
    "Euler, shift 3": lambda own: FlowMatchEulerDiscreteScheduler.from_config(own.config, shift=3.0),
    "DPM-Solver++": lambda own: DPMSolverMultistepScheduler(**_FLOW),
    "UniPC": lambda own: UniPCMultistepScheduler(**_FLOW),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Sampling:
    """What the uncached images depend on besides prompts and seeds; `weights` names modified ones."""

    steps: int
    guidance: float = GUIDANCE
    scheduler: str = "Euler"
    weights: str = "own"


@dataclass(frozen=True, eq=False)
class Generated:
    """Images on the device, computed steps (the mean over branches and batches), and seconds for one image."""

    images: torch.Tensor
    computed: float
    seconds: float


class Bench:
    """A built-in model with the test prompts.

    References and profiles are computed once, by the first process that needs them, and shared in a folder.
    """

    def __init__(self, scale: Scale, device: str, shared: Path) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = scale.tf32
        self.scale = scale
        self.pipe = holdover.load(scale.model).to(device)
        self.pipe.set_progress_bar_config(disable=True)
        prompts = Path(__file__).with_name(PROMPTS[scale.model]).read_text(encoding="utf-8")
        self.prompts = prompts.splitlines()[: scale.prompts]
        self.calibration_prompts = self.pipe.calibration_prompts()
        self.search_prompts = self.calibration_prompts[-scale.searched :]
        self._shared = shared
        self._references: dict[tuple[Sampling, bool], torch.Tensor] = {}

    def generate(self, method: Method, sampling: Sampling, searched: bool = False) -> Generated:
        """The images of the test prompts, or of those that settings are searched on."""
        images, computed, seconds = [], [], []
        prompts, first_seed = (self.search_prompts, SEARCH_SEED) if searched else (self.prompts, FIRST_SEED)
        with self._scheduler(sampling.scheduler), method.around(self.pipe) as count:
            for start in range(0, len(prompts), self.scale.batch):
                part = prompts[start : start + self.scale.batch]
                begin = self._now()
                images.append(self.generate_batch(part, first_seed + start, sampling, method.steps))
                seconds.append((self._now() - begin) / len(part))
                computed.append(count())
        return Generated(torch.cat(images), fmean(computed), min(seconds))

    def reference(self, sampling: Sampling, searched: bool = False) -> torch.Tensor:
        """The uncached images of the same prompts."""
        if (sampling, searched) not in self._references:
            path = self._shared / f"{_file_name(sampling, searched)}.safetensors"
            with _alone(path) as missing:
                if missing:
                    save_file({"images": self.generate(uncached(), sampling, searched).images.contiguous()}, path)
            self._references[sampling, searched] = load_file(path, str(self.pipe.device))["images"]
        return self._references[sampling, searched]

    def score(self, method: Method, sampling: Sampling) -> tuple[float, float]:
        """Computed steps and mean PSNR on the prompts that settings are searched on, none of which is tested."""
        generated = self.generate(method, sampling, searched=True)
        values = each(psnr, generated.images, self.reference(sampling, searched=True))
        return generated.computed, Summary.of(values.tolist()).mean

    def row(self, method: Method, sampling: Sampling, wanted: int) -> Row:
        """All figures of one method over all prompts."""
        reference, generated = self.reference(sampling), self.generate(method, sampling)
        figures = {metric.__name__: each(metric, generated.images, reference) for metric in (psnr, ssim, lpips)}
        return {
            "method": method.title,
            "steps": sampling.steps,
            "wanted": wanted,
            "computed": round(generated.computed, 2),
            **{name: _figures(values, METRICS[name].higher_is_better) for name, values in figures.items()},
            "kind": method.kind,
            "settings": method.settings,
            "course": asdict(sampling),
        }

    def profile(self, sampling: Sampling, count: int | None = None) -> Profile:
        """The model measured on the first calibration prompts."""
        return Profile.load(self.profile_file(sampling, count))

    def profile_file(self, sampling: Sampling, count: int | None = None) -> str:
        """The profile as a file, for methods that read their constants from one."""
        count = count or self.scale.calibrated_on
        path = self._shared / f"{_file_name(sampling, count)}.profile.safetensors"
        with _alone(path) as missing:
            if missing:
                with self._scheduler(sampling.scheduler):
                    self._calibrate(sampling, count).save(path)
        return str(path)

    def calibrate(self, sampling: Sampling, effort: str, budgets: Sequence[int]) -> Profile:
        """The model measured with some effort for these budgets, on calibration prompts, none of which is tested."""
        with self._scheduler(sampling.scheduler):
            return holdover.calibrate(
                self.pipe,
                self.calibration_prompts[: self.scale.effort_prompts],
                sampling.steps,
                guidance_scale=sampling.guidance,
                effort=effort,
                budgets=budgets,
                batch_size=self.scale.batch,
                progress=False,
                **self.scale.call,
            )

    def replay(self, sampling: Sampling, prompts: Sequence[str], first_seed: int) -> Replay:
        """Uncached generations of these prompts, recorded so that plans can be run and trained on them."""
        profile = self.profile(sampling)
        return Replay(Caller.like(profile, self.pipe, {}), profile, make_batches(prompts, self.scale.batch, first_seed))

    def _calibrate(self, sampling: Sampling, count: int) -> Profile:
        return holdover.calibrate(
            self.pipe,
            self.calibration_prompts[:count],
            sampling.steps,
            guidance_scale=sampling.guidance,
            batch_size=min(count, self.scale.batch),
            name=f"{count} generations, {sampling.steps} steps, guidance {sampling.guidance:g}",
            effort="quick",
            progress=False,
            **self.scale.call,
        )

    def generate_batch(self, prompts: list[str], seed: int, sampling: Sampling, steps: int | None = None) -> Tensor:
        """The images of one batch, with the current scheduler of the pipeline."""
        generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
        images: torch.Tensor = self.pipe(
            prompt=prompts,
            generator=generators,
            num_inference_steps=steps or sampling.steps,
            guidance_scale=sampling.guidance,
            output_type="pt",
            return_dict=False,
            **self.scale.call,
        )[0]
        return images

    def _now(self) -> float:
        """The time after the device has finished."""
        if self.pipe.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    @contextmanager
    def _scheduler(self, name: str) -> Iterator[None]:
        own = self.pipe.scheduler
        self.pipe.scheduler = SCHEDULERS[name](own)
        try:
            yield
        finally:
            self.pipe.scheduler = own


@contextmanager
def _alone(path: Path) -> Iterator[bool]:
    """Hold a lock on a file that does not change once it is there; yields whether this process has to write it."""
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield not path.exists()


def _file_name(sampling: Sampling, *more: object) -> str:
    """A file name for these values."""
    return re.sub(r"[^\w.]+", "-", "-".join(map(str, (*asdict(sampling).values(), *more))))


def _figures(values: torch.Tensor, higher_is_better: bool) -> dict[str, float | None]:
    summary = Summary.of(values.tolist(), higher_is_better).as_dict()
    return {name: value if value is None else round(value, 4) for name, value in summary.items() if name != "count"}
