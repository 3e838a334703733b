"""Calling any pipeline the same way: prompts, seeds and shared settings."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageOps, UnidentifiedImageError

from ..engine.engine import Engine
from ..engine.method import Method
from ..errors import ConfigError, did_you_mean
from ..metrics import as_images, get_images
from ..models.pipelines import find_transformers
from ..profiles import Profile

Prompt = str | Mapping[str, Any]  # a text, or the keywords of one call of the pipeline
Batch = tuple[Sequence[Prompt], Sequence[int]]  # prompts that are generated together, and their seeds
GENERATIONS = 4  # of the built-in prompts that a calibration uses by default


@dataclass(frozen=True)
class Caller:
    """A pipeline with the settings that all its calls share."""

    pipe: Any
    steps: int
    guidance: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"num_inference_steps must be a whole number of at least 1, not {self.steps!r}.")

    @classmethod
    def like(cls, profile: Profile, pipe: Any, settings: Mapping[str, Any]) -> Caller:
        """Calls with the steps, guidance and settings that a profile was measured with; `settings` override them."""
        facts = profile.facts
        guidance = None if facts.guider else facts.guidance
        return cls(pipe, len(facts.noise), guidance, {**dict(facts.call), **settings})

    def __call__(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> torch.Tensor | None:
        """Generate one image for each prompt, in one batch; float images, or None if the output is not an image."""
        known, any_other = keywords_of(self.pipe)
        if all(isinstance(prompt, str) for prompt in prompts):
            own: Mapping[str, Any] = {"prompt": list(prompts) if len(prompts) > 1 else prompts[0]}
        elif len(prompts) > 1:
            raise ConfigError("Prompts that are keywords of a call are generated one at a time: use batch_size=1.")
        else:
            own = dict(prompts[0])  # type: ignore[arg-type]
            for key in () if any_other else own.keys() - known:
                raise ConfigError(f"{type(self.pipe).__name__} takes no {key!r}.{did_you_mean(key, known)}")
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        shared = {"num_inference_steps": self.steps, "output_type": "pt", **guidance, **self.settings}
        call = {**shared, **own, "generator": generators if len(seeds) > 1 else generators[0]}
        accepted = {k: v for k, v in call.items() if any_other or k in known or k in self.settings}
        with torch.no_grad(), _without_progress_bars(self.pipe):
            output = self.pipe(**accepted)
        try:
            return as_images(get_images(output))
        except ConfigError:
            return None


def keywords_of(pipe: Any) -> tuple[frozenset[str], bool]:
    """The keywords of a pipeline's `__call__` and of bases it passes `**options` to, and whether any other is taken."""
    parameters, takes_others = _parameters_of(pipe)
    return frozenset(parameters), takes_others


def defaults_of(pipe: Any) -> dict[str, Any]:
    """The default of every keyword of a pipeline's `__call__` that has one."""
    parameters = _parameters_of(pipe)[0]
    return {name: p.default for name, p in parameters.items() if p.default is not p.empty}


def _parameters_of(pipe: Any) -> tuple[dict[str, inspect.Parameter], bool]:
    found: dict[str, inspect.Parameter] = {}
    for cls in (c for c in type(pipe).__mro__ if "__call__" in vars(c)):
        parameters = inspect.signature(vars(cls)["__call__"]).parameters.values()
        found = {p.name: p for p in parameters if p.kind is not p.VAR_KEYWORD} | found
        if all(p.kind is not p.VAR_KEYWORD for p in parameters):
            return found, False
    return found, True


# Videos, and images that a call starts from

_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")
_SPATIAL = (
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
    "vae_scale_factor",
)


def makes_videos(pipe: Any) -> bool:
    """Whether a pipeline generates videos."""
    return "num_frames" in keywords_of(pipe)[0]


def video_multiples(pipe: Any) -> tuple[int, int]:
    """The sides of a pipeline's videos are a multiple of the first number, their frames one of the second plus 1."""
    temporal = next((int(value) for name in _TEMPORAL if (value := getattr(pipe, name, None))), 1)
    spatial = next((int(value) for name in _SPATIAL if (value := getattr(pipe, name, None))), 1)
    config = _transformer_config(pipe)
    patch = config.get("patch_size") or 1
    return spatial * int(patch[-1] if isinstance(patch, (list, tuple)) else patch), temporal


def video_limits(pipe: Any) -> dict[str, int]:
    """The longest side and the most frames that a transformer's position embeddings are made for, where it says so."""
    config = _transformer_config(pipe)
    positions = config.get("rope_max_seq_len")  # Wan and the models made from it
    if positions is None:
        return {}
    side, temporal = video_multiples(pipe)
    return {"max_size": positions * side, "max_frames": (positions * config["patch_size"][0] - 1) * temporal + 1}


def _transformer_config(pipe: Any) -> Any:
    """The config of the first transformer; empty if it has none."""
    return getattr(next(iter(find_transformers(pipe).values())), "config", None) or {}


def check_video(pipe: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse what a video pipeline cannot make, or changes in silence: `num_frames`, `fps`, `height` and `width`.

    And an `image` where the pipeline takes none, or none where it needs one.
    """
    name, (parameters, others) = type(pipe).__name__, _parameters_of(pipe)
    given = {key: value for key, value in arguments.items() if value is not None}
    if "image" in given and "image" not in parameters and not others:
        raise ConfigError(f"{name} takes no image: it generates from the prompt alone.")
    image = parameters.get("image")
    if image is not None and "image" not in given and (image.default is image.empty or "ImageToVideo" in name):
        raise ConfigError(f"{name} starts from an image: give one (--image FILE).")
    if not makes_videos(pipe):
        for key, what in (("num_frames", "number of frames"), ("fps", "rate")):
            if key in given and not others:
                raise ConfigError(f"{name} generates images, not videos: it takes no {what}.")
        return
    (side, multiple), limits = video_multiples(pipe), video_limits(pipe)
    for key, limit in (("num_frames", "max_frames"), ("height", "max_size"), ("width", "max_size")):
        if limit in limits and isinstance(given.get(key), int) and given[key] > limits[limit]:
            raise ConfigError(f"{key} must be at most {limits[limit]} for {name}, not {given[key]}.")
    frames = given.get("num_frames")
    if frames is not None and (isinstance(frames, bool) or not isinstance(frames, int) or frames < 1):
        raise ConfigError(f"The number of frames must be a whole number of at least 1, not {frames!r}.")
    if frames is not None and (frames - 1) % multiple:
        nearest = round((frames - 1) / multiple) * multiple + 1
        raise ConfigError(
            f"The number of frames must be a multiple of {multiple} plus 1 for {name}, such as {nearest}, not {frames}."
        )
    for key in ("height", "width"):
        value = given.get(key)
        if value is not None and (not isinstance(value, int) or value < side or value % side):
            nearest = max(1, round(value / side)) * side
            raise ConfigError(f"{key} must be a multiple of {side} for {name}, such as {nearest}, not {value}.")


def open_image(path: str | Path) -> Image.Image:
    """An image file in RGB, upright; a ConfigError if there is none or it is no image."""
    try:
        with Image.open(Path(path).expanduser()) as image:
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError:
        raise ConfigError(f"{path} is no image.") from None
    except (OSError, Image.DecompressionBombError) as error:
        raise ConfigError(f"Cannot read the image {path}: {getattr(error, 'strerror', None) or error}.") from None


def image_arguments(pipe: Any, path: str | Path) -> dict[str, Any]:
    """The image as an argument of a call. A video gets its aspect ratio, in about the pipeline's default number of
    pixels: diffusers would stretch the image to the default size.
    """
    image, defaults = open_image(path), defaults_of(pipe)
    height, width = defaults.get("height"), defaults.get("width")
    if not makes_videos(pipe) or not isinstance(height, int) or not isinstance(width, int):
        return {"image": image}
    side, scale = video_multiples(pipe)[0], (height * width / (image.width * image.height)) ** 0.5
    sides = (max(1, round(length * scale / side)) * side for length in (image.height, image.width))
    return {"image": image} | dict(zip(("height", "width"), sides, strict=True))


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts; a single prompt is a list of one."""
    chosen = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
    for prompt in chosen:
        if not isinstance(prompt, (str, Mapping)):
            raise ConfigError(f"A prompt is a text or the keywords of one call of the pipeline, not {prompt!r}.")
    return chosen


def make_batches(prompts: Sequence[Prompt], size: int, seed: int) -> list[Batch]:
    """Prompts with their seeds, `size` at a time; the first prompt has the seed `seed`."""
    if size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {size}.")
    seeds = range(seed, seed + len(prompts))
    return [(prompts[i : i + size], seeds[i : i + size]) for i in range(0, len(prompts), size)]


@contextmanager
def _without_progress_bars(pipe: Any) -> Iterator[None]:
    """Disable the pipeline's own progress bars."""
    before = vars(pipe).get("_progress_bar_config")
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        vars(pipe).pop("_progress_bar_config", None)
        if before is not None:
            pipe._progress_bar_config = before


@contextmanager
def installed_engine(pipe: Any, method: Method[Any]) -> Iterator[Engine]:
    """An engine on all transformers of a pipeline."""
    engine = Engine(pipe, find_transformers(pipe), method)
    engine.install()
    try:
        yield engine
    finally:
        engine.uninstall()


def built_in_prompts(pipe: Any) -> list[str]:
    """The pipeline's own calibration prompts, if it has any (the emoji model does), else prompts for any model."""
    own: Any = getattr(type(pipe), "calibration_prompts", None)
    return prompts_from_file(Path(__file__).with_name("prompts.txt")) if own is None else list(own())


def prompts_from_file(path: str | Path) -> list[str]:
    """The prompts in a text file, one on each line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"No prompts could be read from {path}: {reason}.") from None
    prompts = [line.strip() for line in lines if line.strip()]
    if not prompts:
        raise ConfigError(f"There are no prompts in {path}: write one on each line.")
    return prompts


def hash_prompts(prompts: Sequence[Prompt]) -> str:
    """A hash of the content of a list of prompts, including tensors and images in keywords."""
    hashed = hashlib.sha256()
    for prompt in prompts:
        parts = [prompt] if isinstance(prompt, str) else [part for pair in sorted(prompt.items()) for part in pair]
        for part in ("", *parts):
            content = _content(part)
            hashed.update(len(content).to_bytes(8, "big") + content)
    return hashed.hexdigest()[:16]


def hash_each(prompts: Sequence[Prompt]) -> tuple[str, ...]:
    """A hash of each prompt."""
    return tuple(hash_prompts([prompt]) for prompt in prompts)


def _content(part: Any) -> bytes:
    """The content of a text, a tensor or an image; of anything else, its repr."""
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, torch.Tensor):
        values = part.detach().cpu().contiguous()
        return str((part.dtype, tuple(part.shape))).encode() + values.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(part, Image.Image):
        return part.tobytes()
    return repr(part).encode()
