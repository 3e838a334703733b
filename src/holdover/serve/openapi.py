"""The server's description of itself: FastAPI's, with this server's limits and methods put in."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from .. import __version__
from ..selector import methods
from .choice import schemas as setting_schemas
from .errors import ApiError
from .schemas import Completed, ErrorResponse, PartialImage
from .settings import Settings

_ABOUT = """Pictures over HTTP, in the shape of OpenAI's image API. Every answer carries `x-request-id`; every error is
`{"error": {"message", "type", "param", "code"}}`."""

_REASONS = {
    400: "The request is wrong; `param` names the field.",
    401: "The key is missing or wrong.",
    404: "There is no such model.",
    413: "Beyond a limit of this server.",
    429: "Too many pictures wait; Retry-After says when to try again.",
    499: "The client went away; nobody reads this.",
    500: "The server failed.",
    503: "The model is loading, or the server is shutting down.",
}

_REF = "#/components/schemas/{model}"
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
                "anyOf": [{"$ref": _REF.format(model=m)} for m in ("PartialImage", "Completed", "ErrorResponse")]
            },
        },
    },
}
PICTURES: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The pictures; with `stream` events.",
        "content": {"text/event-stream": {"schema": _EVENT}},
    }
}

_EXAMPLES: dict[int, tuple[str, str] | tuple[str, str, str]] = {
    400: ("There is no field 'promt'. Did you mean 'prompt'?", "unknown_field", "promt"),
    401: ("This server asks for a key: send it as `Authorization: Bearer KEY`.", "invalid_api_key"),
    404: ("There is no model 'emojy'. Did you mean 'emoji'?", "model_not_found", "model"),
    413: ("steps is 500; this server draws with at most 100.", "limit_exceeded", "steps"),
    429: ("64 pictures wait already. Try again in 90 s.", "queue_full"),
    499: ("The client went away.", "client_closed_request"),
    500: ("The server failed at this request; its log says why, under this x-request-id.", "internal"),
    503: ("The model is still loading.", "model_loading"),
}


def refusals(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors a path may answer with."""
    return {status: _refusal(status) for status in (*statuses, 500)}


def _refusal(status: int) -> dict[str, Any]:
    error = ApiError(status, *_EXAMPLES[status])
    told: dict[str, Any] = {
        "model": ErrorResponse,
        "description": _REASONS[status],
        "content": {"application/json": {"example": error.body}},
    }
    if status in (429, 503):
        told["headers"] = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return told


def describe(app: FastAPI, settings: Settings, standing: str) -> dict[str, Any]:
    """The OpenAPI document, made once for each method that the server stands with."""
    if app.openapi_schema is None or app.state.described != standing:
        document = get_openapi(title="holdover", version=__version__, description=_ABOUT, routes=app.routes)
        for path in document["paths"].values():
            for operation in path.values():
                operation["responses"].pop("422", None)  # what it stands for is answered with 400
        schemas = document["components"]["schemas"]
        for name in ("HTTPValidationError", "ValidationError"):
            schemas.pop(name, None)
        for event in (PartialImage, Completed):
            described = event.model_json_schema(ref_template=_REF)
            described.pop("$defs", None)  # they are parts of the answer too
            schemas[event.__name__] = described
        _put_in(schemas["ImageRequest"]["properties"], settings, standing)
        app.openapi_schema, app.state.described = document, standing
    return app.openapi_schema


def _put_in(properties: dict[str, Any], settings: Settings, standing: str) -> None:
    """This server's limits and methods."""
    _limit(properties["n"], maximum=settings.max_images)
    for name in ("steps", "num_inference_steps"):
        _limit(properties[name], maximum=settings.max_steps)
    properties["prompt"]["maxLength"] = settings.max_prompt
    _limit(properties["negative_prompt"], maxLength=settings.max_prompt)
    properties["model"] |= {"anyOf": [{"const": settings.model}, {"type": "null"}]}
    properties["cache"] |= {"anyOf": [*_caches(standing), {"type": "null"}]}


def _limit(schema: dict[str, Any], **limits: int) -> None:
    schema["anyOf"][0] |= limits


def _caches(standing: str) -> list[dict[str, Any]]:
    named = [_cache(method, {"method": {"const": method}}, ["method"]) for method in methods()]
    target = {"target": {"type": "string", "examples": ["psnr>=40"]}}
    wanted = [{"type": "object", "title": "target", "properties": target, "required": ["target"]}]
    return [*named, _cache(standing, {}, []), *wanted]


def _cache(method: str, chosen: dict[str, Any], required: list[str]) -> dict[str, Any]:
    settings = setting_schemas(method)
    title = method if required else f"{method}, as the server stands"
    schema = {"type": "object", "title": title, "properties": chosen | settings, "additionalProperties": False}
    return schema | ({"required": required} if required else {})
