"""Errors of the server, all in the shape of OpenAI's API: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse

from ..errors import did_you_mean

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    499: "client_closed_request",
    503: "service_unavailable_error",
}


class ApiError(HTTPException):
    """An error response; `param` is the request's field that caused it."""

    def __init__(
        self,
        status: int,
        message: str,
        code: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients parse it."""
        kind = _TYPES.get(self.status_code, "server_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, code, param)


def too_large(message: str, param: str | None = None) -> ApiError:
    """The request is well formed but exceeds a limit of this server."""
    return ApiError(413, message, "limit_exceeded", param)


def unavailable(message: str, code: str, seconds: int = 2) -> ApiError:
    """The server cannot take the request now; the client may retry after `seconds`."""
    return ApiError(503, message, code, headers={"Retry-After": str(seconds)})


def queue_full(length: int, seconds: int) -> ApiError:
    message = f"The queue is full with {length} images. Try again in {seconds} s."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})


def client_disconnected() -> ApiError:
    """No client reads this response; logs and metrics count it."""
    return ApiError(499, "The client disconnected.", "client_closed_request")


def internal() -> ApiError:
    """An unexpected failure; its cause is in the server's log, not in the response."""
    return ApiError(500, "The server failed at this request; its log says why, under this x-request-id.", "internal")


def install_handlers(app: FastAPI) -> None:
    """Turn every error that FastAPI raises into an `ApiError`."""
    app.add_exception_handler(HTTPException, _handle_http_error)
    app.add_exception_handler(RequestValidationError, _handle_validation_error)


async def _handle_http_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    path = request.url.path
    if error.status_code == 404:
        hint = did_you_mean(path, request.app.openapi()["paths"])
        return ApiError(404, f"There is nothing at {path}.{hint}", "not_found").response()
    if error.status_code == 405:
        message = f"{path} does not support {request.method}."
        return ApiError(405, message, "method_not_allowed", headers=error.headers).response()
    return ApiError(error.status_code, str(error.detail), "invalid_request").response()


async def _handle_validation_error(request: Request, error: Exception) -> JSONResponse:
    """The first problem pydantic found; an unknown field goes first, since it often explains a missing one."""
    assert isinstance(error, RequestValidationError)
    problem = min(error.errors(), key=lambda problem: problem["type"] != "extra_forbidden")
    param = ".".join(str(part) for part in problem["loc"] if part != "body") or None
    if problem["type"] == "json_invalid":
        found = invalid(f"The request is not JSON: {problem['ctx']['error']}.", code="invalid_json")
    elif param is None:
        found = invalid("The request must be a JSON object, sent as application/json.", code="invalid_json")
    elif problem["type"] == "extra_forbidden":
        fields = list(request.scope["route"].body_field.field_info.annotation.model_fields)
        hint = did_you_mean(param, fields) or f" Fields: {', '.join(fields)}."
        found = invalid(f"There is no field {param!r}.{hint}", param, "unknown_field")
    elif problem["type"] == "missing":
        found = invalid(f"{param} is missing.", param, "missing_field")
    else:
        found = invalid(f"{param}: {problem['msg']}.", param)
    return found.response()
