"""The pictures of the test prompts in any way they can be drawn, against the uncached ones of the same seeds."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

import holdover
from holdover.metrics import Summary, psnr, ssim
from holdover.profiles import Profile

from .scale import Scale
from .ways import Way, uncached

PROMPTS = Path(__file__).parent / "prompts.txt"
GUIDANCE = 3.0
FIRST_SEED = 2_000_000  # of the test pictures; calibration and tuning have others
_FLOW = {"use_flow_sigmas": True, "prediction_type": "flow_prediction"}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "Euler": lambda own: own,
    "Euler, shift 3": lambda own: FlowMatchEulerDiscreteScheduler.from_config(own.config, shift=3.0),
    "DPM-Solver++": lambda own: DPMSolverMultistepScheduler(**_FLOW),
    "UniPC": lambda own: UniPCMultistepScheduler(**_FLOW),
}
Row = dict[str, Any]


@dataclass(frozen=True)
class Course:
    """What the uncached pictures depend on beside prompts and seeds; `weights` names changed ones."""

    steps: int
    guidance: float = GUIDANCE
    scheduler: str = "Euler"
    weights: str = "own"


@dataclass(frozen=True, eq=False)
class Drawn:
    """Pictures on the device, computed steps (the mean over branches and batches), and seconds for one picture."""

    pictures: torch.Tensor
    computed: float
    seconds: float


class Bench:
    """The model in the box with the test prompts; references and profiles are made once."""

    def __init__(self, scale: Scale, device: str) -> None:
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        self.scale = scale
        self.pipe = holdover.load("emoji").to(device)
        self.pipe.set_progress_bar_config(disable=True)
        self.prompts = PROMPTS.read_text(encoding="utf-8").splitlines()[: scale.prompts]
        self.calibration_prompts = self.pipe.calibration_prompts()
        self.folder = TemporaryDirectory()
        self._references: dict[Course, torch.Tensor] = {}
        self._profiles: dict[tuple[Course, int], Profile] = {}

    def draw(self, way: Way, course: Course, count: int | None = None) -> Drawn:
        """The pictures of the first `count` prompts, or of all."""
        pictures, computed, seconds = [], [], []
        prompts = self.prompts[:count]
        with self._scheduler(course.scheduler), way.around(self.pipe) as counted:
            for start in range(0, len(prompts), self.scale.batch):
                part = prompts[start : start + self.scale.batch]
                begin = self._now()
                pictures.append(self.generate(part, FIRST_SEED + start, course, way.steps))
                seconds.append((self._now() - begin) / len(part))
                computed.append(counted())
        return Drawn(torch.cat(pictures), fmean(computed), min(seconds))

    def reference(self, course: Course) -> torch.Tensor:
        """The uncached pictures of all prompts."""
        if course not in self._references:
            self._references[course] = self.draw(uncached(), course).pictures
        return self._references[course]

    def nearness(self, way: Way, course: Course) -> tuple[float, float]:
        """Computed steps and mean PSNR on the few prompts that settings are searched on."""
        drawn = self.draw(way, course, self.scale.searched)
        values = psnr(drawn.pictures, self.reference(course)[: len(drawn.pictures)])
        return drawn.computed, Summary.of(values.tolist()).mean

    def row(self, way: Way, course: Course, wanted: int) -> Row:
        """All figures of one way over all prompts."""
        reference, drawn = self.reference(course), self.draw(way, course)
        figures = {"psnr": psnr(drawn.pictures, reference), "ssim": ssim(drawn.pictures, reference)}
        return {
            "method": way.method,
            "steps": course.steps,
            "wanted": wanted,
            "computed": round(drawn.computed, 2),
            **{name: _figures(values) for name, values in figures.items()},
            "settings": way.settings,
            "course": asdict(course),
        }

    def profile(self, course: Course, count: int | None = None) -> Profile:
        """The model measured on the first calibration prompts."""
        count = count or self.scale.calibrated_on
        if (course, count) not in self._profiles:
            with self._scheduler(course.scheduler):
                self._profiles[course, count] = self._calibrated(course, count)
        return self._profiles[course, count]

    def polished(self, course: Course, budget: int) -> Profile:
        """The same with a plan that was improved by trial, on more calibration prompts: none of them is tested on."""
        return holdover.polish(
            self.pipe,
            self.profile(course),
            budget,
            self.calibration_prompts[: self.scale.polished_on],
            trials=self.scale.trials,
            batch_size=self.scale.batch,
            progress=False,
        )

    def profile_file(self, course: Course) -> str:
        """The same as a file, for the methods that read their constants from one."""
        path = Path(self.folder.name) / f"{course.steps}-{course.guidance}-{course.scheduler}.safetensors"
        if not path.exists():
            self.profile(course).save(path)
        return str(path)

    def _calibrated(self, course: Course, count: int) -> Profile:
        return holdover.calibrate(
            self.pipe,
            self.calibration_prompts[:count],
            course.steps,
            guidance_scale=course.guidance,
            batch_size=min(count, self.scale.batch),
            name=f"{count} generations, {course.steps} steps, guidance {course.guidance:g}",
            progress=False,
            **self.scale.call,
        )

    def generate(self, prompts: list[str], seed: int, course: Course, steps: int | None = None) -> torch.Tensor:
        """One batch with the scheduler that is on the pipeline."""
        generators = [torch.Generator().manual_seed(seed + index) for index in range(len(prompts))]
        pictures: torch.Tensor = self.pipe(
            prompt=prompts,
            generator=generators,
            num_inference_steps=steps or course.steps,
            guidance_scale=course.guidance,
            output_type="pt",
            return_dict=False,
            **self.scale.call,
        )[0]
        return pictures

    def _now(self) -> float:
        """The time when the device has done its work."""
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


def _figures(values: torch.Tensor) -> dict[str, float | None]:
    summary = Summary.of(values.tolist()).as_dict()
    return {name: value if value is None else round(value, 4) for name, value in summary.items() if name != "count"}
