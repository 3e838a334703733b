"""Errors in the shape of OpenAI's API: every one is `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..errors import did_you_mean
from .schemas import ErrorResponse

_STATUSES = {  # the error's type in OpenAI's API, and its description in the OpenAPI document
    400: ("invalid_request_error", "The request is wrong; `param` names the field."),
    401: ("authentication_error", "The key is missing or wrong."),
    403: ("permission_error", "The host of the request, or the page that sent it, is not allowed."),
    404: ("not_found_error", "There is no such model or video."),
    405: ("invalid_request_error", "The path does not support this method."),
    408: ("invalid_request_error", "The request did not arrive in time."),
    413: ("invalid_request_error", "The request exceeds a limit of this server."),
    429: (
        "rate_limit_error",
        "The queue is full, or a key sends too many requests; Retry-After says when to try again.",
    ),
    431: ("invalid_request_error", "The header of the request is too large."),
    499: ("client_closed_request", "The client disconnected."),
    500: ("server_error", "The server failed."),
    503: ("service_unavailable_error", "The model is loading, or the server is shutting down."),
    507: ("server_error", "The folder of the videos is full or cannot be written."),
}


class ApiError(HTTPException):
    """An error response; `param` is the request's field that caused it."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, _encodable(message), dict(headers or {}))
        self.code, self.param = code, None if param is None else _encodable(param)

    @property
    def body(self) -> dict[str, Any]:
        kind, _ = _STATUSES.get(self.status_code, _STATUSES[500])
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def _encodable(text: str) -> str:
    """Text without lone surrogates, which JSON may have and UTF-8 may not."""
    return text.encode("utf-8", "backslashreplace").decode()


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, code, param)


def invalid_json(error: ValueError | RecursionError) -> ApiError:
    """The body is not JSON that this server reads; `error` is that of `json.loads`."""
    reason = "a number in it has too many digits"  # the other ValueError
    if isinstance(error, json.JSONDecodeError):
        reason = str(error)
    elif isinstance(error, UnicodeDecodeError):
        reason = "it is not text in UTF-8"
    elif isinstance(error, RecursionError):
        reason = "it is nested too deeply"
    return invalid(f"The request is not JSON: {reason}.", code="invalid_json")


def too_large(message: str, param: str | None = None) -> ApiError:
    """The request is well formed but exceeds a limit of this server."""
    return ApiError(413, message, "limit_exceeded", param)


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot take the request now; the client may retry."""
    return ApiError(503, message, code, headers={"Retry-After": "2"})


def queue_full(length: int, seconds: int, noun: str = "image") -> ApiError:
    message = f"The queue is full with {length} {noun}s. Try again in {seconds} s."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})


def rate_limited(per_minute: int, seconds: int) -> ApiError:
    message = f"At most {per_minute} requests per minute are allowed. Try again in {seconds} s."
    return ApiError(429, message, "rate_limit_exceeded", headers={"Retry-After": str(seconds)})


def storage_failed(message: str) -> ApiError:
    """A video cannot be stored."""
    return ApiError(507, message, "storage_failed")


def internal() -> ApiError:
    """An unexpected failure; its cause is in the server's log, not in the response."""
    return ApiError(500, "The server failed at this request; its log says why, under this x-request-id.", "internal")


KEY_MISSING = "This server requires a key: send it as `Authorization: Bearer KEY`."
KEY_WRONG = "This key is wrong."
_EXAMPLES = (
    ApiError(400, "There is no field 'promt'. Did you mean 'prompt'?", "unknown_field", "promt"),
    ApiError(401, KEY_MISSING, "invalid_api_key"),
    ApiError(403, "Pages of https://example.com may not use this server.", "origin_not_allowed"),
    ApiError(404, "There is no model 'emojy'. Did you mean 'emoji'?", "model_not_found", "model"),
    ApiError(413, "steps is 500; this server allows at most 100.", "limit_exceeded", "steps"),
    queue_full(64, 90),
    ApiError(499, "The client disconnected.", "client_closed_request"),
    internal(),
    ApiError(503, "The model is still loading.", "model_loading"),
    storage_failed("Cannot write to /srv/videos: No space left on device."),
)


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The errors that a path may answer with, and 500, as FastAPI documents responses."""
    responses: dict[int | str, dict[str, Any]] = {}
    for error in _EXAMPLES:
        status = error.status_code
        if status in (*statuses, 500):
            content = {"application/json": {"example": error.body}}
            responses[status] = {"model": ErrorResponse, "description": _STATUSES[status][1], "content": content}
        if status in statuses and status in (429, 503):
            retry = {"description": "Seconds to wait.", "schema": {"type": "integer"}}
            responses[status]["headers"] = {"Retry-After": retry}
    return responses


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    """The response to an error of ours or of Starlette."""
    assert isinstance(error, HTTPException)
    path = request.url.path
    if isinstance(error, ApiError):
        found = error
    elif error.status_code == 404:
        hint = did_you_mean(path, request.app.openapi()["paths"])
        found = ApiError(404, f"There is nothing at {path[:200]}.{hint}", "not_found")
    elif error.status_code == 405:
        message = f"{path[:200]} does not support {request.method}."
        found = ApiError(405, message, "method_not_allowed", headers=error.headers)
    elif isinstance(error.__cause__, ValueError | RecursionError):  # FastAPI only says that parsing failed
        found = invalid_json(error.__cause__)
    else:
        found = ApiError(error.status_code, str(error.detail), "invalid_request")
    return found.response()


async def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    """The first problem pydantic found; an unknown field goes first, since it often explains a missing one."""
    assert isinstance(error, RequestValidationError)
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    param = ".".join(str(part) for part in problem["loc"][1:]) or None  # the first part is body or query
    if problem["type"] == "json_invalid":
        found = invalid(f"The request is not JSON: {problem['ctx']['error']}.", code="invalid_json")
    elif problem["type"] == "too_many_fields":
        found = too_large(problem["msg"])
    elif param is None:
        found = invalid("The request must be a JSON object, sent as application/json.", code="invalid_json")
    elif problem["type"] == "extra_forbidden":
        body = request.scope["route"].body_field
        schema = request.state.schema if body is None else body.field_info.annotation  # of a form: read_request
        fields = list(schema.model_fields)
        hint = did_you_mean(param, fields) or f" Fields: {', '.join(fields)}."
        found = invalid(f"There is no field {param[:100]!r}.{hint}", param, "unknown_field")
    elif problem["type"] == "missing":
        found = invalid(f"{param} is missing.", param, "missing_field")
    else:
        found = invalid(f"{param}: {problem['msg']}.", param)
    return found.response()


EXCEPTION_HANDLERS: dict[Any, Any] = {
    HTTPException: _handle_http_error,
    RequestValidationError: _handle_validation_error,
}
