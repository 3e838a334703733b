"""The OpenAPI document with this server's limits, and the methods and settings that a request may have."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from typing import Any, Literal

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .. import __version__
from ..config import allowed_values
from ..selector import backend_class, config_class, methods
from .errors import ApiError, client_disconnected, internal, queue_full
from .schemas import CompletedImage, ErrorResponse, MethodInfo, PartialImage, SettingInfo
from .settings import Settings

_KINDS: dict[Any, tuple[Literal["number", "integer", "boolean", "text"], str]] = {
    float: ("number", "number"),
    int: ("integer", "integer"),
    bool: ("boolean", "boolean"),
    str: ("text", "string"),
}


def is_server_setting(name: str) -> bool:
    """Whether only the operator may set it: it reads or writes files, or turns the cache off to calibrate."""
    return any(word in name for word in ("profile", "path", "calibrate"))


def _request_settings(method: str) -> list[tuple[dataclasses.Field[Any], Any]]:
    """The settings of a method that a request may have, with their types."""
    config = config_class(method)
    hints = typing.get_type_hints(config)
    return [(field, hints[field.name]) for field in config.settings() if not is_server_setting(field.name)]


def method_infos() -> list[MethodInfo]:
    """Every method and its settings."""
    return [
        MethodInfo(
            method=method,
            doc=(inspect.getdoc(backend_class(method)) or "").split("\n")[0],
            batched=config_class(method)().batchable,
            settings=[_setting_info(field, hint) for field, hint in _request_settings(method)],
        )
        for method in methods()
    ]


def _setting_info(field: dataclasses.Field[Any], hint: Any) -> SettingInfo:
    allowed = field.metadata.get("allowed", {})
    return SettingInfo(
        name=field.name,
        kind=_KINDS[hint][0] if hint in _KINDS else "other",
        default=field.default,
        minimum=allowed.get("ge"),
        maximum=allowed.get("le"),
        choices=allowed.get("choices"),
        allowed=allowed_values(field),
        doc=field.metadata.get("doc", ""),
    )


def settings_schema(method: str) -> dict[str, dict[str, Any]]:
    """The same settings in JSON Schema, by name."""
    schemas = {}
    for field, hint in _request_settings(method):
        info = _setting_info(field, hint)
        if info.choices is not None:
            schema: dict[str, Any] = {"enum": info.choices}
        else:
            limits = {"minimum": info.minimum, "maximum": info.maximum}
            schema = _type_schema(hint) | {word: limit for word, limit in limits.items() if limit is not None}
        schemas[info.name] = schema | {"description": info.doc}
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
_ERRORS = {  # an example and a description of each
    400: (
        ApiError(400, "There is no field 'promt'. Did you mean 'prompt'?", "unknown_field", "promt"),
        "The request is wrong; `param` names the field.",
    ),
    401: (
        ApiError(401, "This server requires a key: send it as `Authorization: Bearer KEY`.", "invalid_api_key"),
        "The key is missing or wrong.",
    ),
    404: (
        ApiError(404, "There is no model 'emojy'. Did you mean 'emoji'?", "model_not_found", "model"),
        "There is no such model.",
    ),
    413: (
        ApiError(413, "steps is 500; this server allows at most 100.", "limit_exceeded", "steps"),
        "The request exceeds a limit of this server.",
    ),
    429: (queue_full(64, 90), "The queue is full; Retry-After says when to try again."),
    499: (client_disconnected(), "The client disconnected."),
    500: (internal(), "The server failed."),
    503: (
        ApiError(503, "The model is still loading.", "model_loading"),
        "The model is loading, or the server is shutting down.",
    ),
}
_EVENT = {
    "type": "object",
    "description": "One event; its data is JSON.",
    "required": ["event", "data"],
    "properties": {
        "event": {"enum": ["image_generation.partial_image", "image_generation.completed", "error"]},
        "data": {
            "type": "string",
            "contentMediaType": "application/json",
            "contentSchema": {
                "anyOf": [{"$ref": _REF.format(model=m)} for m in ("PartialImage", "CompletedImage", "ErrorResponse")]
            },
        },
    },
}
IMAGES_RESPONSE: dict[int | str, dict[str, Any]] = {
    200: {"description": "The images; with `stream`, events.", "content": {"text/event-stream": {"schema": _EVENT}}}
}


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a path may answer with, and 500."""
    responses: dict[int | str, dict[str, Any]] = {}
    for status in (*statuses, 500):
        error, description = _ERRORS[status]
        content = {"application/json": {"example": error.body}}
        responses[status] = {"model": ErrorResponse, "description": description, "content": content}
        if status in (429, 503):
            retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            responses[status]["headers"] = {"Retry-After": retry}
    return responses


def openapi_document(app: FastAPI, settings: Settings, default_method: str) -> dict[str, Any]:
    """FastAPI's document with the limits and methods of this server."""
    document = get_openapi(title="holdover", version=__version__, description=_DESCRIPTION, routes=app.routes)
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
    request["cache"] |= {"anyOf": [*_cache_schemas(default_method), {"type": "null"}]}
    return document


def _cache_schemas(default_method: str) -> list[dict[str, Any]]:
    """The objects that `cache` may be: each method by name, settings of the default method, a target."""
    closed = {"type": "object", "additionalProperties": False}
    named = [
        closed
        | {"title": method, "required": ["method"]}
        | {"properties": {"method": {"const": method}} | settings_schema(method)}
        for method in methods()
    ]
    default = closed | {"title": f"{default_method}, the default", "properties": settings_schema(default_method)}
    target = {"target": {"type": "string", "examples": ["psnr>=40"]}}
    return [*named, default, {"type": "object", "title": "target", "properties": target, "required": ["target"]}]
