"""The nodes: Holdover, Holdover Summary, Holdover Calibrate and Holdover Compare."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, ProfileError
from ..metrics import PSNR_CAP, each, psnr
from ..plan.config import NO_PROFILE
from ..profiles.files import SUFFIX
from ..profiles.targets import QUALITY_TARGETS
from ..selector import own_config
from ..stats import COMPUTED_COLOR, HELD_COLOR, GenerationStats
from .calibration import calibrate
from .model_cache import METHODS, ModelCache, Settings, detach, find_cache

CATEGORY = "model/holdover"
_CELL, _GAP = 12, 2  # pixels of a step in the strip


def parse_settings(method: str, budget: str, quality: str, profile: str, settings: str) -> dict[str, Any]:
    """The settings of a method from the texts of the node; empty texts mean the method's own defaults."""
    given: list[tuple[str, Any]] = []
    for part in filter(None, (part.strip() for part in settings.replace("\n", ",").split(","))):
        key, found, text = (piece.strip() for piece in part.partition("="))
        if not found or not key or not text:
            raise ConfigError(f"Settings look like 'threshold=0.05, warmup_steps=3', not {part!r}.")
        given.append((key, _parse_value(text)))
    aim = "quality" if quality.strip().isalpha() else "target"
    for name, text, key in (("budget", budget.strip(), "budget"), ("quality", quality.strip(), aim)):
        if text:
            if method != "plan":
                raise ConfigError(f"{name} is a setting of plan; leave it empty for {method}.")
            given.append((key, int(text) if key == "budget" and text.isdecimal() else text))
    if profile.strip():
        if method not in ("plan", "mag_cache"):
            raise ConfigError(f"{method} uses no profile: leave it empty.")
        given.append(("profile", profile_path(profile.strip())))
    values: dict[str, Any] = {}
    for key, value in given:
        if key in values:
            raise ConfigError(f"{key} is given twice: {values[key]} and {value}.")
        values[key] = value
    return values


def _parse_value(text: str) -> Any:
    """A number, true or false, several numbers with spaces between them (a schedule), or the text itself."""
    words = text.split()
    if len(words) > 1 and all(word.isdecimal() for word in words):
        return tuple(map(int, words))
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return {"true": True, "false": False}.get(text.lower(), text)


def profile_folder() -> Path:
    """ComfyUI's `models/holdover`."""
    return Path(importlib.import_module("folder_paths").models_dir) / "holdover"


def profile_path(text: str) -> str:
    """A profile in `models/holdover` by its name, or a path; "none" and addresses on the Hub stay as they are."""
    if text == NO_PROFILE or text.startswith("hf://"):
        return text
    try:
        if Path(text).is_file():
            return text
        path = profile_folder() / (text if text.endswith(SUFFIX) else text + SUFFIX)
        if path.is_file():
            return str(path)
    except (OSError, ValueError):
        pass  # a name that no file can have
    folder = profile_folder()
    known = ", ".join(sorted(path.stem for path in folder.glob(f"*{SUFFIX}"))) or "no profiles"
    raise ProfileError(f"There is no profile {text[:200]!r}. {folder} has {known}; Holdover Calibrate adds to it.")


class Holdover:
    """Holds the output of the model at some steps; the model that comes in is untouched."""

    CATEGORY = CATEGORY
    FUNCTION = "apply"
    RETURN_TYPES = ("MODEL", "STRING")
    RETURN_NAMES = ("model", "summary")
    DESCRIPTION = "Skip steps of any diffusion model. Holdover Summary says what was computed and held."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        percent, names = {"min": 0.0, "max": 1.0, "step": 0.01}, ", ".join(QUALITY_TARGETS)
        return {
            "required": {
                "model": ("MODEL",),
                "method": (list(METHODS), {"default": "easy_cache"}),
                "budget": ("STRING", {"default": "", "tooltip": "plan: computed steps (8) or a speed-up (3x)"}),
                "quality": ("STRING", {"default": "", "tooltip": f"plan, instead of a budget: {names} or psnr>=40"}),
                "start_percent": ("FLOAT", {"default": 0.0, **percent}),
                "end_percent": ("FLOAT", {"default": 1.0, **percent}),
                "profile": ("STRING", {"default": "", "tooltip": "from Holdover Calibrate: a name or a file; or none"}),
                "verbose": ("BOOLEAN", {"default": True}),
            },
            "optional": {
                "settings": ("STRING", {"default": "", "tooltip": "others, such as threshold=0.08, warmup_steps=3"})
            },
        }

    @classmethod
    def IS_CHANGED(cls, profile: str | None = None, **_: Any) -> str:  # noqa: N802
        """A profile that was measured again under the same name is read again."""
        if not profile or profile == NO_PROFILE:
            return ""
        try:
            status = Path(profile_path(profile.strip())).stat()
        except (OSError, ProfileError):
            return ""
        return f"{status.st_mtime_ns} {status.st_size}"

    def apply(
        self,
        model: Any,
        method: str,
        budget: str = "",
        quality: str = "",
        start_percent: float = 0.0,
        end_percent: float = 1.0,
        profile: str = "",
        verbose: bool = True,
        settings: str = "",
    ) -> tuple[Any, str]:
        """A clone of the model with the cache, and what was set."""
        config = own_config(method, parse_settings(method, budget, quality, profile, settings))
        chosen = Settings.checked(config, model.model.diffusion_model, start_percent, end_percent)
        text = f"holdover: {config.method}" + (f", profile {chosen.profile.name}" if chosen.profile else "")
        text += f", steps between {start_percent:.0%} and {end_percent:.0%}; connect Holdover Summary after the sampler"
        return ModelCache(chosen, verbose).attach(model), text


class HoldoverSummary:
    """What was computed and held in the generation that made a latent, by branch."""

    CATEGORY = CATEGORY
    FUNCTION = "report"
    RETURN_TYPES = ("LATENT", "STRING")
    RETURN_NAMES = ("latent", "summary")
    DESCRIPTION = "Put it after the sampler: it passes the latent on and says what was computed and held."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"model": ("MODEL",), "latent": ("LATENT",)}}

    def report(self, model: Any, latent: Any) -> tuple[Any, str]:
        """The latent as it is, and the summary."""
        return latent, summarize(model, latent["samples"])


def summarize(model: Any, latent: Any = None) -> str:
    """The summary of the generation of a model that made this latent, or without one of the last generation."""
    cache = find_cache(model)
    if cache is None:
        return "holdover: not on this model"
    if cache.last is None:
        return "holdover: no generation has run with this model"
    made = cache.last if latent is None else cache.find(latent)
    if made is None:
        return f"holdover: no recent generation of this model ended in this latent; the last one was\n{cache.last}"
    return str(made)


_SAMPLER_INPUTS: dict[str, Any] = {
    "positive": ("CONDITIONING",),
    "negative": ("CONDITIONING",),
    "latent_image": ("LATENT",),
    "seed": ("INT", {"default": 0, "min": 0, "max": 0xFFFFFFFFFFFFFFFF}),
    "steps": ("INT", {"default": 20, "min": 1, "max": 1000}),
    "cfg": ("FLOAT", {"default": 1.0, "min": 0.0, "max": 100.0, "step": 0.1}),
}


def _sampler_inputs() -> dict[str, Any]:
    """The inputs of a KSampler without `denoise`."""
    samplers = importlib.import_module("comfy.samplers").KSampler
    return {**_SAMPLER_INPUTS, "sampler_name": (samplers.SAMPLERS,), "scheduler": (samplers.SCHEDULERS,)}


def run_sampler(
    model: Any,
    seed: int,
    positive: Any,
    negative: Any,
    latent_image: Any,
    steps: int,
    cfg: float,
    sampler_name: str,
    scheduler: str,
) -> torch.Tensor:
    """What KSampler does: the final latent of one generation."""
    comfy = importlib.import_module("comfy.sample")
    latent = comfy.fix_empty_latent_channels(model, latent_image["samples"])
    noise, mask = comfy.prepare_noise(latent, seed), latent_image.get("noise_mask")
    wanted = {"noise_mask": mask, "disable_pbar": True, "seed": seed}
    found: torch.Tensor = comfy.sample(
        model, noise, steps, cfg, sampler_name, scheduler, positive, negative, latent, **wanted
    )
    return found


def _comfyui_version() -> str:
    return str(importlib.import_module("comfyui_version").__version__)


def _decode(vae: Any, latent: torch.Tensor) -> torch.Tensor:
    """Images with the channels last; the frames of a video are images."""
    images: torch.Tensor = vae.decode(latent).float().clamp(0.0, 1.0)
    return images.reshape(-1, *images.shape[-3:])


class HoldoverCalibrate:
    """Runs the sampler uncached on a few seeds and writes a profile for plan and mag_cache."""

    CATEGORY = CATEGORY
    FUNCTION = "measure"
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("profile",)
    OUTPUT_NODE = True
    DESCRIPTION = "Measure a model once. With a VAE, plans can be made for a quality such as psnr>=40."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        own = {"name": ("STRING", {"default": "my-model"}), "runs": ("INT", {"default": 4, "min": 1, "max": 64})}
        inputs = {"model": ("MODEL",), **own, **_sampler_inputs()}
        kind, seed = inputs["seed"]
        inputs["seed"] = (kind, {**seed, "control_after_generate": False})  # a new seed would measure again
        return {"required": inputs, "optional": {"vae": ("VAE",)}}

    def measure(
        self, model: Any, name: str, runs: int, seed: int, latent_image: Any, vae: Any = None, **sampler: Any
    ) -> tuple[str]:
        """The file of the profile, in `models/holdover`."""
        if not name or Path(name).name != name:
            raise ConfigError(f"A profile needs a plain name without folders, not {name!r}.")
        versions = (("comfyui", _comfyui_version()),)

        def sample(wrapped: Any, seed: int) -> torch.Tensor:
            return run_sampler(wrapped, seed, latent_image=latent_image, **sampler)

        def decode(latent: torch.Tensor) -> torch.Tensor:
            images: torch.Tensor = vae.decode(latent).float().clamp(0.0, 1.0).movedim(-1, -3)
            return images

        seeds = [(seed + run) % 2**64 for run in range(runs)]
        profile = calibrate(detach(model), sample, seeds, name, None if vae is None else decode, versions)
        return (str(profile.save(profile_folder() / f"{name.removesuffix(SUFFIX)}{SUFFIX}")),)


class HoldoverCompare:
    """Generates the same image without and with the cache of a model, and measures the difference."""

    CATEGORY = CATEGORY
    FUNCTION = "compare"
    RETURN_TYPES = ("IMAGE", "IMAGE", "FLOAT", "STRING")
    RETURN_NAMES = ("plain and cached", "steps", "psnr", "summary")
    DESCRIPTION = "Plain on the left, cached on the right; their PSNR, and a strip of computed and held steps."

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:  # noqa: N802
        return {"required": {"model": ("MODEL",), "vae": ("VAE",), **_sampler_inputs()}}

    def compare(self, model: Any, vae: Any, seed: int, **sampler: Any) -> tuple[torch.Tensor, torch.Tensor, float, str]:
        """Both images side by side, the strip, the PSNR in dB (100 where they are equal) and the summary."""
        cache = find_cache(model)
        if cache is None:
            raise ConfigError("There is no cache on this model to compare: connect the output of Holdover.")
        plain, cached = (_decode(vae, run_sampler(m, seed, **sampler)) for m in (detach(model), model))
        quality = float(each(psnr, cached.movedim(-1, -3), plain.movedim(-1, -3)).clamp(max=PSNR_CAP).min())
        assert cache.last is not None
        text = f"{summarize(model)}\n  {quality:.1f} dB PSNR to the uncached image"
        return torch.cat([plain, cached], dim=2), draw_strip(cache.last.stats), quality, text


def draw_strip(stats: GenerationStats) -> torch.Tensor:
    """An IMAGE (1, H, W, 3): one row of cells for each branch, dark where a step was computed."""
    pitch, branches = _CELL + _GAP, stats.branches or ("",)
    longest = max((len(stats.of_branch(branch)) for branch in branches), default=1)
    image = torch.ones(1, pitch * len(branches) + _GAP, pitch * max(1, longest) + _GAP, 3)
    for row, branch in enumerate(branches):
        for column, forward in enumerate(stats.of_branch(branch)):
            color = COMPUTED_COLOR if forward.computed else HELD_COLOR
            top, left = row * pitch + _GAP, column * pitch + _GAP
            rgb = torch.tensor([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
            image[0, top : top + _CELL, left : left + _CELL] = rgb
    return image
