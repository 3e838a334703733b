"""Validation of a request against the model and the server's limits: from an `ImageRequest` to images to generate."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..config import Config
from ..errors import ConfigError, did_you_mean
from ..selector import config_class, methods, own_config
from .errors import ApiError, invalid, too_large
from .openapi import is_server_setting
from .queue import ImageSpec, Size
from .schemas import ImageRequest
from .settings import Settings

TARGET_METHOD = "plan"  # a request with a quality target and no method gets this one


@dataclass(frozen=True)
class ModelInfo:
    """What validation needs to know about the model.

    A model of `fixed_size` generates at one size only, and its images are resized; for others, width and height are
    multiples of `size_multiple`. `parameters` are those of the pipeline's call.
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


def validate(
    request: ImageRequest, model: ModelInfo, settings: Settings, default_cache: Config, request_id: str = ""
) -> list[ImageSpec]:
    """The images that a request asks for, with defaults filled in; an ApiError names the field that is wrong."""
    if request.model not in (None, model.name):
        hint = did_you_mean(request.model or "", [model.name]) or f" This server has {model.name!r}."
        raise ApiError(404, f"There is no model {request.model!r}.{hint}", "model_not_found", "model")
    for name, text in (("prompt", request.prompt), ("negative_prompt", request.negative_prompt)):
        if text is not None and len(text) > settings.max_prompt:
            raise too_large(f"{name} has {len(text)} characters; at most {settings.max_prompt} are allowed.", name)
    if request.negative_prompt and "negative_prompt" not in model.parameters:
        raise invalid(f"{model.name} has no negative prompt.", "negative_prompt")
    count, size, steps = _count(request, settings), _size(request, model, settings), _steps(request, model, settings)
    seed = secrets.randbits(32) if request.seed is None else request.seed
    common: dict[str, Any] = {
        "prompt": request.prompt,
        "negative_prompt": request.negative_prompt,
        "size": model.size if model.fixed_size else size,
        "output_size": size,
        "steps": steps,
        "guidance": _guidance(request, model),
        "cache": requested_cache(request.cache, default_cache),
        "preview_steps": _preview_steps(request, model, steps),
        "request_id": request_id,
    }
    return [ImageSpec(seed=seed + index, **common) for index in range(count)]


def _count(request: ImageRequest, settings: Settings) -> int:
    count = request.n or 1
    if count > settings.max_images:
        raise too_large(f"n is {count}; one request may have at most {settings.max_images} images.", "n")
    if request.stream and count > 1:
        raise invalid(f"A stream has one image: n must be 1, not {count}.", "n")
    return count


def _size(request: ImageRequest, model: ModelInfo, settings: Settings) -> Size:
    if request.size is None or request.size == "auto":
        return model.size
    width, height = (int(side) for side in request.size.split("x"))
    if max(width, height) > settings.max_size:
        raise too_large(f"size is {request.size}; the longest side may have {settings.max_size} pixels.", "size")
    if model.fixed_size and width != height:
        example = format_size(model.size)
        raise invalid(f"size is {request.size}; {model.name} generates squares, such as {example}.", "size")
    if not model.fixed_size and (width % model.size_multiple or height % model.size_multiple):
        message = f"size is {request.size}; width and height must be multiples of {model.size_multiple}."
        raise invalid(message, "size")
    return width, height


def format_size(size: Size) -> str:
    return f"{size[0]}x{size[1]}"


def _steps(request: ImageRequest, model: ModelInfo, settings: Settings) -> int:
    steps = _merge_aliases("steps", request.steps, "num_inference_steps", request.num_inference_steps)
    if steps is not None and steps > settings.max_steps:
        raise too_large(f"steps is {steps}; this server allows at most {settings.max_steps}.", "steps")
    return min(model.steps, settings.max_steps) if steps is None else int(steps)


def _guidance(request: ImageRequest, model: ModelInfo) -> tuple[tuple[str, float], ...]:
    """The guidance scales, under the names of the pipeline's parameters."""
    guidance = _merge_aliases("guidance", request.guidance, "guidance_scale", request.guidance_scale)
    if "true_cfg_scale" in model.parameters:
        scales = {"guidance_scale": guidance, "true_cfg_scale": request.cfg_scale}
    else:
        scales = {"guidance_scale": _merge_aliases("guidance", guidance, "cfg_scale", request.cfg_scale)}
    for name, scale in scales.items():
        if scale is not None and name not in model.parameters:
            raise invalid(f"{model.name} has no guidance scale.", "guidance")
    return tuple((name, float(scale)) for name, scale in scales.items() if scale is not None)


def _merge_aliases(name: str, value: float | None, alias: str, other: float | None) -> float | None:
    """The value of a field that has two names."""
    if value is not None and other is not None and value != other:
        raise invalid(f"{name} is {value:g} and {alias} is {other:g}: here they mean the same, send only one.", alias)
    return value if value is not None else other


def _preview_steps(request: ImageRequest, model: ModelInfo, steps: int) -> frozenset[int]:
    count = request.partial_images or 0
    if count and not request.stream:
        raise invalid("partial_images needs a stream: set stream to true.", "partial_images")
    if count and not model.partial_images:
        raise invalid(f"{model.name} has no previews of unfinished images.", "partial_images")
    return preview_steps(count, steps)


def preview_steps(count: int, steps: int) -> frozenset[int]:
    """The steps after which to send `count` previews, evenly spaced; the last step gives the image itself."""
    count = min(count, steps - 1)
    return frozenset(round((i + 1) * steps / (count + 1)) for i in range(count))


# The cache of a request


def requested_cache(cache: Mapping[str, Any] | None, default: Config) -> Config:
    """The cache that a request asks for: a method by name has its own defaults, settings alone change `default`."""
    if cache is None:
        return default
    settings = dict(cache)
    method = settings.pop("method", TARGET_METHOD if "target" in settings else None)
    if method is not None and not isinstance(method, str):
        raise invalid(f"cache.method must be a name, not {method!r}.", "cache.method")
    try:
        return _cache_config(method, settings, default)
    except ConfigError as error:
        raise invalid(str(error), _wrong_field(method or default.method, settings, error)) from None


def _cache_config(method: str | None, settings: dict[str, Any], default: Config) -> Config:
    names = config_class(method or default.method).field_names()
    for name in settings:
        if is_server_setting(name) and name in names:
            raise invalid(f"{name!r} is set when the server starts, with --cache-config.", f"cache.{name}")
    if method is None:
        own_config(default.method, settings)  # raises if a key belongs to another method
        return default.replaced(**settings)
    kept = (
        {name: getattr(default, name) for name in names if is_server_setting(name)} if method == default.method else {}
    )
    return own_config(method, kept | settings)


def _wrong_field(method: str, settings: Mapping[str, Any], error: ConfigError) -> str:
    """The field that the error's message names."""
    if method not in methods():
        return "cache.method"
    named = [name for name in settings if f".{name} " in str(error) or f"{name!r}" in str(error)]
    candidates = named or (list(settings) if len(settings) == 1 else [])
    return f"cache.{candidates[0]}" if candidates else "cache"
