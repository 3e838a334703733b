"""What a request may ask for: the OpenAPI document says it, and `validate` checks it and fills in the defaults.

Both depend on the model, the limits of the server, and the settings of every caching method.
"""

from __future__ import annotations

import dataclasses
import inspect
import secrets
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ..config import Config, allowed_values
from ..errors import ConfigError, did_you_mean
from ..selector import backend_class, config_class, methods, own_config
from .errors import ApiError, invalid, too_large
from .queue import ImageSpec, Size
from .schemas import CompletedImage, ImageRequest, MethodInfo, PartialImage, SettingInfo
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
    count = request.n or 1
    if count > settings.max_images:
        raise too_large(f"n is {count}; one request may have at most {settings.max_images} images.", "n")
    if request.stream and count > 1:
        raise invalid(f"A stream has one image: n must be 1, not {count}.", "n")
    size = _output_size(request.size, model, settings.max_size)
    asked = _merge_aliases("steps", request.steps, "num_inference_steps", request.num_inference_steps)
    steps = min(model.steps, settings.max_steps) if asked is None else int(asked)
    if steps > settings.max_steps:
        raise too_large(f"steps is {steps}; this server allows at most {settings.max_steps}.", "steps")
    guidance = _guidance(request, model)
    if request.partial_images and not request.stream:
        raise invalid("partial_images needs a stream: set stream to true.", "partial_images")
    if request.partial_images and not model.partial_images:
        raise invalid(f"{model.name} has no previews of unfinished images.", "partial_images")
    image = ImageSpec(
        prompt=request.prompt,
        negative_prompt=request.negative_prompt or settings.negative_prompt,
        seed=secrets.randbits(32) if request.seed is None else request.seed,
        size=model.size if model.fixed_size else size,
        output_size=size,
        steps=steps,
        guidance=guidance,
        cache=requested_cache(request.cache, default_cache),
        preview_steps=preview_steps(request.partial_images or 0, steps),
        request_id=request_id,
    )
    return [dataclasses.replace(image, seed=image.seed + index) for index in range(count)]


def _output_size(size: str | None, model: ModelInfo, max_size: int) -> Size:
    if size is None or size == "auto":
        return model.size
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


def _guidance(request: ImageRequest, model: ModelInfo) -> tuple[tuple[str, float], ...]:
    """The guidance scales, under the names of the pipeline's parameters."""
    guidance = _merge_aliases("guidance", request.guidance, "guidance_scale", request.guidance_scale)
    if "true_cfg_scale" in model.parameters:
        scales = {"guidance_scale": guidance, "true_cfg_scale": request.cfg_scale}
    else:
        scales = {"guidance_scale": _merge_aliases("guidance", guidance, "cfg_scale", request.cfg_scale)}
    found = tuple((name, float(scale)) for name, scale in scales.items() if scale is not None)
    if any(name not in model.parameters for name, _ in found):
        raise invalid(f"{model.name} has no guidance scale.", "guidance")
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


def requested_cache(cache: Mapping[str, Any] | None, default: Config) -> Config:
    """The cache that a request asks for: a method by name has its own defaults, settings alone change `default`."""
    if cache is None:
        return default
    settings = dict(cache)
    method = settings.pop("method", TARGET_METHOD if "target" in settings else None)
    if method is not None and not isinstance(method, str):
        raise invalid(f"cache.method must be a name, not {method!r}.", "cache.method")
    try:
        reserved = [name for name in config_class(method or default.method).field_names() if _is_server_setting(name)]
        for name in settings:
            if name in reserved:
                raise invalid(f"{name!r} is set when the server starts, with --cache-config.", f"cache.{name}")
        if method is None:
            own_config(default.method, settings)  # raises if a key belongs to another method
            return default.replaced(**settings)
        kept = {name: getattr(default, name) for name in reserved} if method == default.method else {}
        return own_config(method, kept | settings)
    except ConfigError as error:
        message, param = str(error), "cache"
        named = [name for name in settings if f".{name} " in message or f"{name!r}" in message]
        if (method or default.method) not in methods():
            param = "cache.method"
        elif named or len(settings) == 1:
            param = f"cache.{[*named, *settings][0]}"
        raise invalid(message, param) from None


# The methods and settings that a request may have


_KINDS: dict[Any, tuple[Literal["number", "integer", "boolean", "text"], str]] = {
    float: ("number", "number"),
    int: ("integer", "integer"),
    bool: ("boolean", "boolean"),
    str: ("text", "string"),
}


def _is_server_setting(name: str) -> bool:
    """Whether only the operator may set it: it reads or writes files, or turns the cache off to calibrate."""
    return any(word in name for word in ("profile", "path", "calibrate"))


def method_infos() -> list[MethodInfo]:
    """Every method and its settings."""
    return [
        MethodInfo(
            method=method,
            doc=(inspect.getdoc(backend_class(method)) or "").split("\n")[0],
            batched=config_class(method)().batchable,
            settings=[info for info, _ in _request_settings(method)],
        )
        for method in methods()
    ]


def _request_settings(method: str) -> list[tuple[SettingInfo, Any]]:
    """The settings of a method that a request may have, with their types."""
    config, found = config_class(method), []
    hints = typing.get_type_hints(config)
    for setting in config.settings():
        if not _is_server_setting(setting.name):
            hint, allowed = hints[setting.name], setting.metadata.get("allowed", {})
            info = SettingInfo(
                name=setting.name,
                kind=_KINDS[hint][0] if hint in _KINDS else "other",
                default=setting.default,
                minimum=allowed.get("ge"),
                maximum=allowed.get("le"),
                choices=allowed.get("choices"),
                allowed=allowed_values(setting),
                doc=setting.metadata.get("doc", ""),
            )
            found.append((info, hint))
    return found


def settings_schema(method: str) -> dict[str, dict[str, Any]]:
    """The same settings in JSON Schema, by name."""
    schemas = {}
    for info, hint in _request_settings(method):
        schema = {"enum": info.choices} if info.choices is not None else _type_schema(hint)
        limits = {"minimum": info.minimum, "maximum": info.maximum, "description": info.doc}
        schemas[info.name] = schema | {word: limit for word, limit in limits.items() if limit is not None}
    return schemas


def _type_schema(hint: Any) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    if hint in _KINDS:
        return {"type": _KINDS[hint][1]}
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(option) for option in arguments]}
    if typing.get_origin(arguments[0]) is tuple:  # pairs of a name and a value
        return {"type": "object", "additionalProperties": _type_schema(typing.get_args(arguments[0])[1])}
    return {"type": "array", "items": _type_schema(arguments[0])}


# The OpenAPI document


_DESCRIPTION = """An image server in the shape of OpenAI's image API. Every response has an `x-request-id`; every error
is `{"error": {"message", "type", "param", "code"}}`."""
_REF = "#/components/schemas/{model}"
_EVENT_DATA = [{"$ref": _REF.format(model=name)} for name in ("PartialImage", "CompletedImage", "ErrorResponse")]
_EVENT = {
    "type": "object",
    "description": "One event; its data is JSON.",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": ["image_generation.partial_image", "image_generation.completed", "error"]},
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": _EVENT_DATA}},
    },
}
IMAGES_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The images; with `stream`, events.", "content": {"text/event-stream": {"schema": _EVENT}}}
}


def openapi_document(app: FastAPI, settings: Settings, default_method: str) -> dict[str, Any]:
    """FastAPI's document with the limits and methods of this server."""
    document = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            operation["responses"].pop("422", None)  # the server answers 400 instead
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for event in (PartialImage, CompletedImage):
        schemas[event.__name__] = event.model_json_schema(ref_template=_REF)
        schemas[event.__name__].pop("$defs", None)  # they are components already
    request = schemas["ImageRequest"]["properties"]
    request["n"]["anyOf"][0]["maximum"] = settings.max_images
    for name in ("steps", "num_inference_steps"):
        request[name]["anyOf"][0]["maximum"] = settings.max_steps
    request["prompt"]["maxLength"] = settings.max_prompt
    request["negative_prompt"]["anyOf"][0]["maxLength"] = settings.max_prompt
    request["model"] |= {"anyOf": [{"const": settings.model}, {"type": "null"}]}
    # `cache` may be each method by name, settings of the default method, or a target.
    closed = {"type": "object", "additionalProperties": False}
    default = closed | {"title": f"{default_method}, the default", "properties": settings_schema(default_method)}
    target = {"target": {"type": "string", "examples": ["psnr>=40"]}}
    named = [
        closed
        | {"title": method, "required": ["method"]}
        | {"properties": {"method": {"const": method}} | settings_schema(method)}
        for method in methods()
    ]
    by_target = {"type": "object", "title": "target", "properties": target, "required": ["target"]}
    request["cache"] |= {"anyOf": [*named, default, by_target, {"type": "null"}]}
    return document
