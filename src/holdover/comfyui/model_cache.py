"""The cache of one ComfyUI MODEL: its settings, and the wrappers that ComfyUI calls.

`outer_sample` is one generation: its state is created there and freed when it ends, however it ends. The other wrappers
find that state in the options that ComfyUI passes along. Nothing is imported from ComfyUI.
"""

from __future__ import annotations

import hashlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..config import Config
from ..engine.method import NoneConfig
from ..engine.state import ComputedForward
from ..errors import ConfigError, ProfileError
from ..magcache.config import MagCacheConfig
from ..methods.easy_cache import EasyCacheConfig
from ..methods.spectrum import SpectrumConfig
from ..models.inputs import iter_tensors, unwrap_module
from ..plan.config import NO_PROFILE, PlanConfig
from ..plan.generation import resolve_profile
from ..plan.recording import TrajectoryRecord
from ..profiles import Profile
from ..profiles.targets import Target
from .sampling import KEY, Sampling

logger = logging.getLogger(__name__)
METHODS: dict[str, type[Config]] = {
    config.method: config for config in (PlanConfig, EasyCacheConfig, SpectrumConfig, MagCacheConfig, NoneConfig)
}
_KEPT = 8  # newest generations whose latents are recognized
# settings of these methods that concern diffusers or another quantity, with the value that they have here
_NOT_USED: dict[str, Any] = {
    "quantity": "output",
    "hold_in": "device",
    "mag_ratios": None,
    "num_inference_steps": 28,
    "calibrate": False,
    "mag_calibrate": False,
    "calibration_path": None,
    "transformer_type": "",
}


@dataclass(frozen=True)
class Settings:
    """What the Holdover node was given: a method's config, its profile, and the part of the steps that may be held."""

    config: Config
    profile: Profile | None = None
    start_percent: float = 0.0
    end_percent: float = 1.0

    @classmethod
    def checked(
        cls, config: Config, diffusion_model: Any, start_percent: float = 0.0, end_percent: float = 1.0
    ) -> Settings:
        """Settings with the profile that the method needs; an error if the method cannot work on this model."""
        if not 0.0 <= start_percent < end_percent <= 1.0:
            raise ConfigError(f"start_percent ({start_percent:g}) must be less than end_percent ({end_percent:g}).")
        if config.method not in METHODS:
            raise ConfigError(
                f"{config.method} is not available in ComfyUI: it reads the blocks of a model, and what is held here "
                f"is the model's output. Use one of {', '.join(METHODS)}."
            )
        for name, default in _NOT_USED.items():
            if getattr(config, name, default) != default:
                raise ConfigError(f"{config.method}: {name} has no effect in ComfyUI. Leave it out.")
        diffusion_model = unwrap_module(diffusion_model)
        wanted = getattr(config, "profile", None)
        profile = None
        if isinstance(config, PlanConfig):
            profile = resolve_profile(wanted, diffusion_model)
            if profile is None and (config.target or config.quality):
                raise ConfigError("A quality needs a profile: measure one with the Holdover Calibrate node.")
            if profile is None and config.predictor == "least_squares":
                raise ConfigError("least_squares needs a profile: measure one with the Holdover Calibrate node.")
            if profile is None and wanted != NO_PROFILE and config.schedule is None:
                raise ProfileError(
                    f"plan has no profile of this {type(diffusion_model).__name__}: measure one with the Holdover "
                    "Calibrate node and connect it to `profile`. Without one use easy_cache or spectrum, or the "
                    'profile "none" for a plan that was not measured.'
                )
            if profile is not None and (config.target or config.quality):
                target = Target.parsed(config.target or profile.target_of(config.quality or ""))
                _check_target(target, profile, (start_percent, end_percent) == (0.0, 1.0))
        elif isinstance(config, MagCacheConfig):
            profile = wanted if isinstance(wanted, Profile) else resolve_profile(wanted or NO_PROFILE, diffusion_model)
            if profile is None or dict(profile.facts.mag_cache).get(KEY) is None:
                raise ProfileError(
                    "mag_cache holds what the whole model adds to its input in ComfyUI, so the published ratios, "
                    "which are those of its blocks, do not fit: measure a profile with the Holdover Calibrate node."
                )
        here = type(diffusion_model).__name__
        if profile is not None and all(model.transformer_class != here for _, model in profile.facts.models):
            known = ", ".join(model.transformer_class for _, model in profile.facts.models)
            raise ProfileError(f"Profile {profile.name!r} was measured on {known}, not on this {here}.")
        return cls(config, profile, start_percent, end_percent)


def _check_target(target: Target, profile: Profile, is_whole: bool) -> None:
    """Refuse a quality that cannot be told here."""
    if target.metric != "psnr":
        raise ConfigError(f"{target} cannot be told in ComfyUI: a quality here is a PSNR, such as psnr>=40.")
    if profile.facts.psnr_offset is None:
        raise ConfigError(
            f"Profile {profile.name!r} was measured without a VAE, which a quality needs: connect one to Holdover "
            "Calibrate, or give a budget."
        )
    if not is_whole:
        raise ConfigError("A quality is of all steps: leave start_percent at 0 and end_percent at 1, or give a budget.")


class ModelCache:
    """The wrappers of one MODEL; `last` is its newest generation."""

    def __init__(
        self,
        settings: Settings,
        verbose: bool = False,
        record: TrajectoryRecord | None = None,
        magnitudes: Callable[[ComputedForward], None] | None = None,
    ) -> None:
        self.settings, self.verbose = settings, verbose
        self._record, self._magnitudes = record, magnitudes
        self.last: Sampling | None = None
        self._results: deque[tuple[str, Sampling]] = deque(maxlen=_KEPT)

    def attach(self, model: Any) -> Any:
        """A clone of a MODEL that is wrapped; a cache that the model already has is replaced in the clone."""
        clone = detach(model)
        clone.add_wrapper_with_key("outer_sample", KEY, self.outer_sample)
        clone.add_wrapper_with_key("predict_noise", KEY, self.predict_noise)
        clone.add_wrapper_with_key("diffusion_model", KEY, self.diffusion_model)
        if self._record is not None:
            clone.add_wrapper_with_key("sampler_sample", KEY, self.sampler_sample)
        return clone

    def outer_sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """One generation. Its state travels in the options of this guider, so that nothing is shared."""
        guider = executor.class_obj
        sampler, sigmas = (kwargs[name] if name in kwargs else args[at] for at, name in ((2, "sampler"), (3, "sigmas")))
        sampling = Sampling(self.settings, guider, sampler, sigmas, self._record, self._magnitudes)
        options = guider.model_options.setdefault("transformer_options", {})
        options[KEY] = self.last = sampling
        try:
            result = executor(*args, **kwargs)
            sampling.stats.finished = True
            self._results.append((_digest(result), sampling))
            return result
        finally:
            options.pop(KEY, None)
            sampling.close()
            sampling.guider = sampling.sampler = None
            if any(note.startswith("nothing is held") for note in sampling.notes):
                logger.warning("%s", sampling)
            elif self.verbose:
                logger.info("%s", sampling)

    def find(self, latent: Any) -> Sampling | None:
        """The generation that made a latent, if it is one of the newest."""
        digest = _digest(latent)
        return next((sampling for known, sampling in reversed(self._results) if known == digest), None)

    def predict_noise(self, executor: Any, x: Any, timestep: Any, *args: Any, **kwargs: Any) -> Any:
        """One evaluation."""
        sampling = executor.class_obj.model_options.get("transformer_options", {}).get(KEY)
        if sampling is None:
            return executor(x, timestep, *args, **kwargs)
        return sampling.predict_noise(executor, x, timestep, *args, **kwargs)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def diffusion_model(self, executor: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
        """One forward."""
        options = next((v for v in (*args, *kwargs.values()) if isinstance(v, dict) and KEY in v), None)
        if options is None:
            return executor(x, *args, **kwargs)
        return options[KEY].diffusion_model(executor, x, *args, **kwargs)

    def sampler_sample(self, executor: Any, guider: Any, *args: Any, **kwargs: Any) -> Any:
        """The sampler's loop, whose result is the final latent."""
        result = executor(guider, *args, **kwargs)
        sampling = guider.model_options.get("transformer_options", {}).get(KEY)
        if sampling is not None:
            sampling.finish_record(result)
        return result


def detach(model: Any) -> Any:
    """A clone of a MODEL without holdover."""
    clone = model.clone()
    for kind in ("outer_sample", "predict_noise", "diffusion_model", "sampler_sample"):
        clone.remove_wrappers_with_key(kind, KEY)
    return clone


def find_cache(model: Any) -> ModelCache | None:
    """The cache of a MODEL, if it has one."""
    found = model.get_wrappers("outer_sample", KEY)
    return found[-1].__self__ if found else None


def _digest(latent: Any) -> str:
    """A hash of the values of a latent, wherever it is."""
    hashed = hashlib.sha256()
    for tensor in iter_tensors([latent]):
        hashed.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return hashed.hexdigest()
