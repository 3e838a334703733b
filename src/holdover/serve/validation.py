"""Requests, checked: what they ask for, with defaults filled in, or an error that names the field.

It depends on the model, the limits of the server, and the settings of every caching method.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError, did_you_mean
from ..profiles.targets import QUALITY_TARGETS
from ..selector import config_class, methods, own_config
from .errors import ApiError, invalid, too_large
from .queue import ImageSpec, Size, VideoSpec
from .schemas import (
    MAX_FIELDS,
    MAX_INTEGER,
    EditRequest,
    GenerationRequest,
    ImageRequest,
    VideoDefaults,
    VideoRequest,
)
from .settings import Settings

if TYPE_CHECKING:
    from PIL.Image import Image

TARGET_METHOD = "plan"  # a request with a target or a quality and no method gets this one
MAX_COEFFICIENTS = 16  # of a polynomial; other lists have a value for each step, so that max_steps limits them
MAX_TEXT = 200  # characters of a setting
MAX_COUNT = 1000  # value of a setting that is an integer
MAX_SECONDS = 3600  # of a video; max_frames is the limit


@dataclass(frozen=True)
class ModelInfo:
    """What validation needs to know about the model.

    A model of `fixed_size` generates at one size only, and its images are resized; for others, width and height are
    multiples of `size_multiple`. `parameters` are those of the pipeline's call, `edit_parameters` those of the call
    with an image, none if it takes no image. `guidance`, `cfg_scale` and `strength` are their defaults, None if
    it has no such parameter. `video` is None if it generates images. `has_profile`: whether a profile of it ships.
    `limits` are what the model itself allows, by the name of the server's setting.
    """

    name: str
    pipeline: str
    transformer: str
    parameters: frozenset[str]
    steps: int
    size: Size
    size_multiple: int
    fixed_size: bool
    partial_images: bool
    styles: dict[str, str] = field(default_factory=dict)
    guidance: float | None = None
    cfg_scale: float | None = None
    edit_parameters: frozenset[str] = frozenset()
    strength: float | None = None
    video: VideoDefaults | None = None
    has_profile: bool = False
    limits: dict[str, int] = field(default_factory=dict)

    def limit(self, name: str, settings: Settings) -> int:
        """The largest value that a request may have: the server's, or less if the model allows less."""
        allowed: int = getattr(settings, name)
        return min(allowed, self.limits.get(name, allowed))


def check_kind(model: ModelInfo, video: bool) -> None:
    """Raise an error that names the right path if the model does not generate what the path is for."""
    if (model.video is not None) != video:
        kind, path = ("images", "/v1/images/generations") if video else ("videos", "/v1/videos")
        raise invalid(f"{model.name} generates {kind}: use {path}.", "model", "unsupported")


def validate(
    request: ImageRequest,
    model: ModelInfo,
    settings: Settings,
    default_cache: Config,
    request_id: str = "",
    image: Image | None = None,
) -> list[ImageSpec]:
    """The images that a request asks for, with defaults filled in; an ApiError names the field that is wrong."""
    check_kind(model, video=False)
    parameters = model.parameters if image is None else model.edit_parameters
    if not parameters and image is not None:
        message = (
            f"{model.name} takes no image: {model.pipeline} generates from text, and diffusers has no image-to-image "
            "pipeline for it."
        )
        raise invalid(message, "image", "unsupported")
    _check_texts(request, model, settings, parameters)
    count = request.n or 1
    if count > settings.max_images:
        raise too_large(f"n is {count}; one request may have at most {settings.max_images} images.", "n")
    if request.stream and count > 1:
        raise invalid(f"A stream has one image: n must be 1, not {count}.", "n")
    size = _output_size(request.size, model, settings.max_size, image)
    steps = _steps(request, model, settings)
    strength = request.strength if isinstance(request, EditRequest) else None
    if strength is not None and "strength" not in parameters:
        raise invalid(f"{model.name} has no strength: it takes the whole image as a reference.", "strength")
    if strength is not None and steps * strength < 1:
        raise invalid(f"strength is {strength:g}, which leaves none of {steps} steps: raise one of them.", "strength")
    spec = ImageSpec(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt or settings.negative_prompt,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        size=model.size if model.fixed_size else size,
        output_size=size,
        steps=steps,
        guidance=_guidance(request, model.name, parameters),
        cache=requested_cache(
            request.cache, default_cache, settings.max_steps, requested_quality(request, model, default_cache)
        ),
        request_id=request_id,
        image=image,
        strength=model.strength if strength is None and image is not None else strength,
    )
    previews = request.partial_images or 0
    if previews and not request.stream:
        raise invalid("partial_images needs a stream: set stream to true.", "partial_images")
    if previews and not model.partial_images:
        raise invalid(f"{model.name} has no previews of unfinished images.", "partial_images")
    if previews > settings.max_previews:
        raise too_large(f"partial_images is {previews}; at most {settings.max_previews} are allowed.", "partial_images")
    spec = dataclasses.replace(spec, preview_steps=preview_steps(previews, spec.run_steps))
    return [dataclasses.replace(spec, seed=spec.seed + index) for index in range(count)]


def validate_video(
    request: VideoRequest,
    model: ModelInfo,
    settings: Settings,
    default_cache: Config,
    request_id: str = "",
    image: Image | None = None,
) -> VideoSpec:
    """The video that a request asks for, with defaults filled in; an ApiError names the field that is wrong."""
    check_kind(model, video=True)
    video, parameters = model.video, model.parameters
    assert video is not None
    _check_texts(request, model, settings, parameters)
    if image is not None and video.image == "none":
        message = f"{model.name} takes no image: {model.pipeline} generates from text."
        raise invalid(message, "input_reference", "unsupported")
    if image is None and video.image == "required":
        raise invalid(f"{model.name} needs an image to start from.", "input_reference", "missing_field")
    fps = video.fps if request.fps is None else request.fps
    if request.fps is not None and fps != int(fps) and parameters & {"fps", "frame_rate"}:
        raise invalid(f"fps is {fps:g}; {model.name} takes whole numbers.", "fps")
    frames = _frames(request, video, fps)
    if frames > (most := model.limit("max_frames", settings)):
        name = "num_frames" if request.seconds is None else "seconds"
        raise too_large(f"The video has {frames} frames; this server allows at most {most}.", name)
    if request.num_frames is not None and (frames - 1) % video.multiple:
        nearest = round((frames - 1) / video.multiple) * video.multiple + 1
        message = f"num_frames is {frames}; {model.name} generates a multiple of {video.multiple} plus 1"
        raise invalid(f"{message}, such as {nearest}.", "num_frames")
    size = _output_size(request.size, model, model.limit("max_size", settings), image)
    guidance = _guidance(request, model.name, parameters)
    if request.guidance_scale_2 is not None:
        if "guidance_scale_2" not in parameters:
            raise invalid(f"{model.name} has no second guidance scale.", "guidance_scale_2")
        guidance = (*guidance, ("guidance_scale_2", float(request.guidance_scale_2)))
    return VideoSpec(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt or settings.negative_prompt,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        size=size,
        output_size=size,
        steps=_steps(request, model, settings),
        guidance=guidance,
        cache=requested_cache(
            request.cache, default_cache, settings.max_steps, requested_quality(request, model, default_cache)
        ),
        request_id=request_id,
        image=image,
        frames=frames,
        fps=fps,
        compare=bool(request.compare),
    )


def _frames(request: VideoRequest, video: VideoDefaults, fps: float) -> int:
    """The number of frames that a request asks for: exactly, or the nearest to its seconds."""
    if request.seconds is not None:
        try:
            seconds = float(request.seconds)
        except ValueError:
            seconds = math.nan
        if not 0 < seconds <= MAX_SECONDS:
            raise invalid(f"seconds must be a number above 0, at most {MAX_SECONDS}.", "seconds")
        frames = round((seconds * fps - 1) / video.multiple) * video.multiple + 1
        frames = max(frames, 1)
        if request.num_frames is not None and request.num_frames != frames:
            message = (
                f"num_frames is {request.num_frames}, but {seconds:g} s at {fps:g} frames per second are {frames}: "
            )
            raise invalid(f"{message}send only one.", "num_frames")
        return frames
    return video.num_frames if request.num_frames is None else request.num_frames


def _check_texts(request: GenerationRequest, model: ModelInfo, settings: Settings, parameters: frozenset[str]) -> None:
    """Raise an error for another model, and for a prompt that is too long or not supported."""
    if request.model not in (None, model.name):
        hint = did_you_mean(request.model or "", [model.name]) or f" This server has {model.name!r}."
        raise ApiError(404, f"There is no model {(request.model or '')[:100]!r}.{hint}", "model_not_found", "model")
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if text is not None and len(text) > settings.max_prompt:
            raise too_large(f"{name} has {len(text)} characters; at most {settings.max_prompt} are allowed.", name)
    if request.negative_prompt and "negative_prompt" not in parameters:
        raise invalid(f"{model.name} has no negative prompt.", "negative_prompt")


def _steps(request: GenerationRequest, model: ModelInfo, settings: Settings) -> int:
    asked = _merge_aliases("steps", request.steps, "num_inference_steps", request.num_inference_steps)
    steps = min(model.steps, settings.max_steps) if asked is None else int(asked)
    if steps > settings.max_steps:
        raise too_large(f"steps is {steps}; this server allows at most {settings.max_steps}.", "steps")
    return steps


def _output_size(size: str | None, model: ModelInfo, max_size: int, image: Image | None) -> Size:
    if size is None or size == "auto":
        if image is None or model.fixed_size:
            return model.size
        multiple, scale = model.size_multiple, 1.0
        if model.video is not None:  # time and memory grow with the area: that of the default, in the image's shape
            scale = min(1.0, math.sqrt(model.size[0] * model.size[1] / (image.width * image.height)))
        width, height = (max(min(int(side * scale), max_size) // multiple, 1) * multiple for side in image.size)
        return width, height
    width, height = (int(side) for side in size.split("x"))
    if max(width, height) > max_size:
        raise too_large(f"size is {size}; the longest side may have {max_size} pixels.", "size")
    if model.fixed_size and width != height:
        raise invalid(f"size is {size}; {model.name} generates squares, such as {format_size(model.size)}.", "size")
    if not model.fixed_size and (width % model.size_multiple or height % model.size_multiple):
        raise invalid(f"size is {size}; width and height must be multiples of {model.size_multiple}.", "size")
    return width, height


def format_size(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _guidance(request: GenerationRequest, name: str, parameters: frozenset[str]) -> tuple[tuple[str, float], ...]:
    """The guidance scales, under the names of the pipeline's parameters."""
    guidance = _merge_aliases("guidance", request.guidance, "guidance_scale", request.guidance_scale)
    if "true_cfg_scale" in parameters:
        scales = {"guidance_scale": guidance, "true_cfg_scale": request.cfg_scale}
    else:
        scales = {"guidance_scale": _merge_aliases("guidance", guidance, "cfg_scale", request.cfg_scale)}
    found = tuple((scale, float(value)) for scale, value in scales.items() if value is not None)
    if any(scale not in parameters for scale, _ in found):
        raise invalid(f"{name} has no guidance scale.", "guidance")
    return found


def _merge_aliases(name: str, value: float | None, alias: str, other: float | None) -> float | None:
    """The value of a field that has two names."""
    if value is not None and other is not None and value != other:
        raise invalid(f"{name} is {value:g} and {alias} is {other:g}: here they mean the same, send only one.", alias)
    return value if value is not None else other


def preview_steps(count: int, steps: int) -> frozenset[int]:
    """The steps after which to send `count` previews, evenly spaced; the last step gives the image itself."""
    count = min(count, steps - 1)
    return frozenset(round((i + 1) * steps / (count + 1)) for i in range(count))


_IGNORED: dict[str, tuple[tuple[str, ...], str]] = {  # values that need no note; why others are ignored
    "quality": (("auto",), f"{', '.join(QUALITY_TARGETS)} choose a plan, which needs a profile of the model"),
    "style": ((), "describe the style in the prompt"),
    "background": (("auto", "opaque"), "images are opaque"),
    "moderation": ((), "prompts are not moderated"),
    "complexity": ((), "the number of steps decides it"),
    "user": ((), "requests are counted by their key"),
    "safety_identifier": ((), "requests are counted by their key"),
    "input_fidelity": ((), "strength decides it"),
}


def ignored_fields(request: GenerationRequest, model: ModelInfo, default: Config) -> list[str]:
    """A note for each field of OpenAI's API that has no meaning here."""
    notes, has_quality = [], requested_quality(request, model, default) is not None
    for name, (silent, reason) in _IGNORED.items():
        value = getattr(request, name, None)
        if value is not None and value not in silent and not (name == "quality" and has_quality):
            notes.append(f"{name} is ignored: {reason}.")
    if not isinstance(request, ImageRequest):
        return notes
    if request.output_compression is not None and request.output_format not in ("jpeg", "webp"):
        notes.append("output_compression is ignored: a png is lossless.")
    return notes


def requested_quality(request: GenerationRequest, model: ModelInfo, default: Config) -> str | None:
    """The quality of plan that the request's field `quality` names; None where the field is ignored."""
    if request.quality not in QUALITY_TARGETS:
        return None
    has_profile = model.has_profile
    if default.method == TARGET_METHOD and (profile := default.as_dict()["profile"]) is not None:
        has_profile = profile != "none"
    if has_profile:
        return request.quality
    if request.quality == "high":  # clients of OpenAI's API send it by habit
        return None
    message = (
        f"quality {request.quality!r} needs a profile of {model.name}: measure one with `holdover calibrate --model "
        'MODEL --out FILE`, and start the server with --cache-backend plan --cache-config \'{"profile": "FILE"}\'.'
    )
    raise invalid(message, "quality", "cannot_cache")


def requested_cache(
    cache: Mapping[str, Any] | None, default: Config, max_steps: int, quality: str | None = None
) -> Config:
    """The cache that a request asks for: a method by name has its own defaults, settings alone change `default`.

    `quality` is that of the request itself: one more setting, of plan.
    """
    if cache is None and quality is None:
        return default
    settings = dict(cache or {})
    if len(settings) > MAX_FIELDS:
        raise too_large(f"cache has {len(settings)} settings; at most {MAX_FIELDS} are allowed.", "cache")
    for name, value in settings.items():
        _check_length(name, value, max_steps)
    if quality is not None:
        if settings.get("quality") not in (None, quality):
            raise invalid(f"quality is {quality!r} and cache has another one: send only one.", "quality")
        settings["quality"] = quality
    method = settings.pop("method", TARGET_METHOD if {"target", "quality"} & settings.keys() else None)
    if method is not None and not isinstance(method, str):
        raise invalid(f"cache.method must be a name, not {method!r}.", "cache.method")
    try:
        reserved = [name for name in config_class(method or default.method).field_names() if is_server_setting(name)]
        for name in settings:
            if name in reserved:
                raise invalid(f"{name!r} is set when the server starts, with --cache-config.", f"cache.{name}")
        if method is None:
            own_config(default.method, settings)  # raises if a key belongs to another method
            config = default.replaced(**settings)
        else:
            kept = {name: getattr(default, name) for name in reserved} if method == default.method else {}
            config = own_config(method, kept | settings)
    except ConfigError as error:
        message, param = str(error), "cache"
        named = [name for name in settings if f".{name} " in message or f"{name!r}" in message]
        if (method or default.method) not in methods():
            param = "cache.method"
        elif named or len(settings) == 1:
            param = f"cache.{[*named, *settings][0]}"
        if quality is not None and param in ("cache", "cache.quality"):
            param = "quality"
        raise invalid(message, param) from None
    for name in settings:  # integers count steps or blocks, and cache-dit makes lists of them
        if type(getattr(config, name)) is int and getattr(config, name) > MAX_COUNT:
            raise too_large(f"cache.{name} is too large; at most {MAX_COUNT} is allowed.", f"cache.{name}")
    return config


def _check_length(name: str, value: Any, max_steps: int, depth: int = 2) -> None:
    """Raise an error if a setting is longer than its use allows: the time to set up a cache grows with its length."""
    param, limit = f"cache.{name}", max_items(name, max_steps)
    if len(name) > MAX_TEXT:
        raise too_large(f"A name in cache has {len(name)} characters; at most {MAX_TEXT} are allowed.", "cache")
    if isinstance(value, str) and len(value) > MAX_TEXT:
        raise too_large(f"{param} has {len(value)} characters; at most {MAX_TEXT} are allowed.", param)
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise too_large(f"{param} has a number above {MAX_INTEGER}.", param)
    if isinstance(value, (list, dict)):
        if len(value) > limit:
            raise too_large(f"{param} has {len(value)} values; at most {limit} are allowed.", param)
        if not depth:
            raise invalid(f"{param} has lists inside lists.", param)
        for item in [*value, *value.values()] if isinstance(value, dict) else value:
            _check_length(name, item, max_steps, depth - 1)


def is_server_setting(name: str) -> bool:
    """Whether only the operator may set it: it reads or writes files, or turns the cache off to calibrate."""
    return any(word in name for word in ("profile", "path", "calibrate"))


def max_items(name: str, max_steps: int) -> int:
    """The largest number of values in a setting that is a list."""
    return MAX_COEFFICIENTS if name == "coefficients" else max_steps
