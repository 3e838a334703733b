"""What the API says of itself: the methods and settings that a request may have, and the OpenAPI document."""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from ..config import allowed_values
from ..profiles.targets import QUALITY_TARGETS
from ..selector import backend_class, config_class, methods
from .schemas import CompletedImage, EditRequest, MethodInfo, PartialImage, SettingInfo, VideoRequest
from .settings import Settings
from .validation import MAX_COUNT, MAX_TEXT, is_server_setting, max_items

# Methods

_KINDS: dict[Any, tuple[Literal["number", "integer", "boolean", "text"], str]] = {
    float: ("number", "number"),
    int: ("integer", "integer"),
    bool: ("boolean", "boolean"),
    str: ("text", "string"),
}


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
        if not is_server_setting(setting.name):
            hint, allowed = hints[setting.name], setting.metadata.get("allowed", {})
            # a setting that may be null, but by default is not, is entered as what it is by default
            kind = hint if setting.default is None else type(setting.default)
            info = SettingInfo(
                name=setting.name,
                kind=_KINDS[kind][0] if kind in _KINDS else "other",
                default=setting.default,
                minimum=allowed.get("ge"),
                maximum=allowed.get("le"),
                choices=allowed.get("choices"),
                allowed=allowed_values(setting),
                doc=setting.metadata.get("doc", ""),
            )
            found.append((info, hint))
    return found


def settings_schema(method: str, max_steps: int) -> dict[str, dict[str, Any]]:
    """The same settings in JSON Schema, by name."""
    schemas = {}
    for info, hint in _request_settings(method):
        longest = max_items(info.name, max_steps)
        schema = {"enum": info.choices} if info.choices is not None else _type_schema(hint, longest)
        highest = MAX_COUNT if info.maximum is None and info.kind == "integer" else info.maximum
        limits = {"minimum": info.minimum, "maximum": highest, "description": info.doc}
        schemas[info.name] = schema | {word: limit for word, limit in limits.items() if limit is not None}
    return schemas


def _type_schema(hint: Any, max_items: int) -> dict[str, Any]:
    if hint is type(None):
        return {"type": "null"}
    if hint is str:
        return {"type": "string", "maxLength": MAX_TEXT}
    if hint in _KINDS:
        return {"type": _KINDS[hint][1]}
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"anyOf": [_type_schema(option, max_items) for option in arguments]}
    if typing.get_origin(arguments[0]) is tuple:  # pairs of a name and a value
        values = _type_schema(typing.get_args(arguments[0])[1], max_items)
        return {"type": "object", "additionalProperties": values, "maxProperties": max_items}
    return {"type": "array", "items": _type_schema(arguments[0], max_items), "maxItems": max_items}


# The OpenAPI document


_DESCRIPTION = """An image and video server in the shape of OpenAI's API. Every response has an `x-request-id`; every
error is `{"error": {"message", "type", "param", "code"}}`."""
_REF = "#/components/schemas/{model}"
_EVENT_DATA = [{"$ref": _REF.format(model=name)} for name in ("PartialImage", "CompletedImage", "ErrorResponse")]
_EVENTS = ("partial_image", "completed")
_EVENT = {
    "type": "object",
    "description": "One event; its data is JSON.",
    "required": ["event", "data"],
    "properties": {
        "event": {
            "enum": [f"image_{kind}.{event}" for kind in ("generation", "edit") for event in _EVENTS] + ["error"]
        },
        "data": {"type": "string", "contentMediaType": "application/json", "contentSchema": {"anyOf": _EVENT_DATA}},
    },
}
_UPLOAD = {"type": "string", "format": "binary", "description": "A PNG, JPEG or WebP file."}
EDIT_BODY = {
    "requestBody": {
        "required": True,
        "content": {"multipart/form-data": {"schema": {"$ref": _REF.format(model="EditRequest")}}},
    }
}
VIDEO_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {"schema": {"$ref": _REF.format(model="VideoRequest")}},
            "multipart/form-data": {"schema": {"$ref": _REF.format(model="VideoForm")}},
        },
    }
}
CONTENT_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The file.", "content": {"video/mp4": {"schema": {"type": "string", "format": "binary"}}}}
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
    edit = schemas["EditRequest"] = EditRequest.model_json_schema(ref_template=_REF)
    edit["properties"] = {"image": _UPLOAD} | edit["properties"]
    edit["required"] = ["image", *edit["required"]]
    video = schemas["VideoRequest"] = VideoRequest.model_json_schema(ref_template=_REF)
    schemas |= video.pop("$defs")
    video["properties"]["num_frames"]["anyOf"][0]["maximum"] = settings.max_frames
    schemas["VideoForm"] = video | {"properties": video["properties"] | {"input_reference": _UPLOAD}}
    # `cache` may be each method by name, settings of the default method, a target, or a quality.
    closed = {"type": "object", "additionalProperties": False}
    default = closed | {"title": f"{default_method}, the default"}
    default |= {"properties": settings_schema(default_method, settings.max_steps)}
    target = {"target": {"type": "string", "examples": ["psnr>=40"]}}
    named = [
        closed
        | {"title": method, "required": ["method"]}
        | {"properties": {"method": {"const": method}} | settings_schema(method, settings.max_steps)}
        for method in methods()
    ]
    by_target = {"type": "object", "title": "target", "properties": target, "required": ["target"]}
    quality = {"quality": {"enum": list(QUALITY_TARGETS)}}
    by_quality = {"type": "object", "title": "quality", "properties": quality, "required": ["quality"]}
    for schema in (schemas["ImageRequest"], edit, video):
        request = schema["properties"]
        if schema is not video:
            request["n"]["anyOf"][0]["maximum"] = settings.max_images
            request["partial_images"]["anyOf"][0]["maximum"] = settings.max_previews
        for name in ("steps", "num_inference_steps"):
            request[name]["anyOf"][0]["maximum"] = settings.max_steps
        request["prompt"]["maxLength"] = settings.max_prompt
        request["negative_prompt"]["anyOf"][0]["maxLength"] = settings.max_prompt
        request["model"] |= {"anyOf": [{"const": settings.model}, {"type": "null"}]}
        request["cache"] |= {"anyOf": [*named, default, by_target, by_quality, {"type": "null"}]}
    return document
