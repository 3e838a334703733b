"""One calibration: what has been measured so far, and the profile it becomes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from statistics import median
from typing import Any, Self

import numpy as np
import torch

from ..errors import ConfigError, HoldoverError, UnsupportedModelError
from ..metrics import each, psnr
from ..plan.kernel import Array
from ..plan.making import Kind
from ..plan.rollout import Course
from ..plan.setting import Setting
from ..profiles import MagCacheProfile, Profile, ProfileFacts, TeaCacheProfile
from ..runtime.backend import transformers_of
from ..runtime.engine import Engine
from ..runtime.identity import facts_of
from ..runtime.method import Method, NoneMethod
from ..runtime.unit import Unit
from .branched import Branched, Mixed, together
from .calls import Caller
from .passes import Constants, Everything, Outputs, Probe, Trajectory, growth
from .prompts import Prompt, hash_of
from .shelf import Shelf, grams

logger = logging.getLogger(__name__)
_LIBRARIES = ("holdover", "torch", "diffusers", "transformers")
_DEGREE = 4  # of TeaCache's polynomial


class Session:
    """Runs pairs of generations, an uncached one and a probe, and gathers what they show."""

    def __init__(self, caller: Caller, store: str, seams: bool) -> None:
        self._caller, self._store = caller, store
        self._constants = Constants({} if seams else None)
        self._measured: list[Mixed] = []
        self._growth: list[Array] = []
        self._seams: dict[str, list[Array]] = {}
        self._offsets: list[float] = []
        self._surprise: list[float] = []
        self._setting: Setting | None = None
        self._whole = True
        self._engine = Engine(caller.pipe, transformers_of(caller.pipe), NoneMethod())

    def __enter__(self) -> Self:
        self._engine.install()
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.uninstall()

    def measure(self, prompts: Sequence[Prompt], seeds: Sequence[int], bar: Any) -> None:
        """One uncached run and one probe of the same pictures."""
        with ExitStack() as stack:
            latents, outputs, probed_latents = (stack.enter_context(Shelf(self._store)) for _ in range(3))
            branched = stack.enter_context(Branched(self._store))
            reference = Trajectory(latents, outputs, branched)
            self._announce(reference, bar)
            pictures, setting = self._uncached(reference, prompts, seeds, stack)
            bar.update()
            mixed = self._mixed(reference, setting)
            self._keep_seams(reference.steps)
            kernel = mixed.kernel(setting.noise).merged
            course = Course(kernel, Kind(setting, kernel, intake=mixed.intake).response)
            probe = Trajectory(probed_latents, intake=mixed.intake)
            probing = Probe(probe, kernel)
            probed = self._run(probing, prompts, seeds)
            bar.update()
            self._surprise += probing.guard.ratios
            self._measured.append(mixed)
            self._growth.append(growth(reference, probe, probing.computed, course, setting))
            self._compare(pictures, probed, probe.error(reference, reference.steps))

    def _announce(self, reference: Trajectory, bar: Any) -> None:
        """Say how much memory the trajectories will take, once the first latent shows it."""
        if self._measured:
            return
        count = 5 * (self._caller.steps + 1)

        def say(latent: torch.Tensor) -> None:
            each = latent.numel() * 4 / 1e6
            text = f"keeping up to {count} latents of {each:.1f} MB: {count * each:.0f} MB, store={self._store!r}"
            if bar.disable:
                logger.info(text)
            else:
                bar.write(text)

        reference.latents.first = say

    def _mixed(self, reference: Trajectory, setting: Setting) -> Mixed:
        """The outputs of a generation; every one must have the same noise levels, and run all of them."""
        if reference.steps != len(setting.noise):
            raise HoldoverError(
                f"The scheduler has {len(setting.noise)} steps and made {reference.steps}: calibrate a pipeline that "
                "runs each of them once, from noise."
            )
        if self._setting is not None and not np.array_equal(self._setting.noise, setting.noise):
            raise HoldoverError("The pipeline's noise levels change from call to call: calibrate one size at a time.")
        self._setting = setting
        assert reference.branched is not None
        return reference.branched.mixed(reference.outputs, reference.latents)

    def _uncached(
        self, reference: Trajectory, prompts: Sequence[Prompt], seeds: Sequence[int], stack: ExitStack
    ) -> tuple[torch.Tensor | None, Setting]:
        if self._whole:
            try:
                return self._watched(reference, prompts, seeds, stack)
            except UnsupportedModelError as error:
                logger.warning("Only plans can be made for this model, for its blocks cannot be held: %s", error)
                self._whole, self._constants.seams = False, None
                reference.clear()
        method = Outputs(reference)
        pictures = self._run(method, prompts, seeds)
        return pictures, _known(method)

    def _watched(
        self, reference: Trajectory, prompts: Sequence[Prompt], seeds: Sequence[int], stack: ExitStack
    ) -> tuple[torch.Tensor | None, Setting]:
        """An uncached run with an eye on the blocks."""
        shelves = {name: stack.enter_context(Shelf(self._store)) for name in transformers_of(self._caller.pipe)}
        self._constants.seams = None if self._constants.seams is None else shelves
        method = Everything(reference, self._constants)
        pictures = self._run(method, prompts, seeds)
        return pictures, _known(method)

    def _keep_seams(self, steps: int) -> None:
        """The inner products of the residuals; zero where another expert was at work."""
        for name, shelf in (self._constants.seams or {}).items():
            measured, handled = grams([shelf]), self._constants.handled.pop(name)
            whole = np.zeros((len(measured), steps, steps))
            whole[np.ix_(range(len(measured)), handled, handled)] = measured
            self._seams.setdefault(name, []).append(whole)

    def _run(self, method: Method, prompts: Sequence[Prompt], seeds: Sequence[int]) -> torch.Tensor | None:
        with self._engine.using(method):
            return self._caller(prompts, seeds)

    def _compare(self, pictures: torch.Tensor | None, probed: torch.Tensor | None, errors: Array) -> None:
        """What an error of the last latent means for the picture, in dB."""
        if pictures is not None and probed is not None and len(pictures) == len(errors):
            quality = each(psnr, probed, pictures).double().cpu().numpy()
            offsets = quality + 10 * np.log10(np.maximum(errors, 1e-20))
            self._offsets.extend(float(offset) for offset in offsets if np.isfinite(offset))

    def profile(self, name: str, prompts: Sequence[Prompt]) -> Profile:
        """Everything that was measured, with where it comes from."""
        assert self._setting is not None
        pipe, caller, setting, mixed = self._caller.pipe, self._caller, self._setting, together(self._measured)
        facts = ProfileFacts(
            name=name,
            pipeline=type(pipe).__name__,
            scheduler=type(pipe.scheduler).__name__,
            noise=tuple(setting.noise.tolist()),
            models=tuple((unit.name, facts_of(unit.core)) for unit in self._engine.units),
            prompts=len(prompts),
            prompts_hash=hash_of(prompts),
            date=date.today().isoformat(),
            versions=tuple((library, _version(library)) for library in _LIBRARIES),
            guidance=setting.guidance if caller.guidance is None else float(caller.guidance),
            branches=mixed.branches,
            mix=mixed.mix,
            scale=() if mixed.intake is None else tuple(mixed.intake.scale.tolist()),
            carry=() if mixed.intake is None else tuple(mixed.intake.carry.tolist()),
            call=tuple((k, v) for k, v in caller.settings.items() if isinstance(v, (str, int, float, bool))),
            starts=tuple(first for first, _ in setting.ranges),
            psnr_offset=float(np.mean(self._offsets)) if self._offsets else None,
            surprise=(median(self._surprise), max(self._surprise)) if self._surprise else (),
            tea_cache=tuple((u.name, fit) for u in self._cut if (fit := self._fit(u, len(prompts))) is not None),
            mag_cache=tuple((u.name, self._ratios(u)) for u in self._cut),
        )
        seams = {name: np.concatenate(measured) for name, measured in self._seams.items()}
        return Profile(facts, mixed.grams, np.concatenate(self._growth), seams)

    @property
    def _cut(self) -> list[Unit]:
        """The transformers whose blocks could be watched."""
        return [unit for unit in self._engine.units if unit.name in self._constants.ratios]

    def _fit(self, unit: Unit, generations: int) -> TeaCacheProfile | None:
        """TeaCache's polynomial; none for a signal that does not change."""
        try:
            return self._constants.signals.profile(unit, _DEGREE, generations)
        except ConfigError as error:
            logger.warning("No TeaCache coefficients for %s: %s", unit.name, error)
            return None

    def _ratios(self, unit: Unit) -> MagCacheProfile:
        profile = self._constants.ratios[unit.name].profile()
        assert profile is not None
        return profile


def _known(method: Outputs) -> Setting:
    if method.setting is None:
        raise HoldoverError("The pipeline did not call its transformer: there is nothing to measure.")
    return method.setting


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "unknown"
