"""What all responses share: errors in the shape of OpenAI's API, and the middleware around every request.

Every error is `{"error": {"message", "type", "param", "code"}}`. The middleware adds request ids and security headers,
checks API keys and the size of requests, and records metrics and the log.
"""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..errors import did_you_mean
from .metrics import RequestMetrics
from .schemas import ErrorResponse

logger = logging.getLogger("holdover.serve.requests")

_STATUSES = {  # the error's type in OpenAI's API, and its description in the OpenAPI document
    400: ("invalid_request_error", "The request is wrong; `param` names the field."),
    401: ("authentication_error", "The key is missing or wrong."),
    404: ("not_found_error", "There is no such model."),
    405: ("invalid_request_error", "The path does not support this method."),
    413: ("invalid_request_error", "The request exceeds a limit of this server."),
    429: ("rate_limit_error", "The queue is full; Retry-After says when to try again."),
    499: ("client_closed_request", "The client disconnected."),
    500: ("server_error", "The server failed."),
    503: ("service_unavailable_error", "The model is loading, or the server is shutting down."),
}


class ApiError(HTTPException):
    """An error response; `param` is the request's field that caused it."""

    def __init__(
        self, status: int, message: str, code: str, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(status, message, dict(headers or {}))
        self.code, self.param = code, param

    @property
    def body(self) -> dict[str, Any]:
        kind, _ = _STATUSES.get(self.status_code, _STATUSES[500])
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status_code, self.headers)


def invalid(message: str, param: str | None = None, code: str = "invalid_value") -> ApiError:
    """The request is wrong."""
    return ApiError(400, message, code, param)


def too_large(message: str, param: str | None = None) -> ApiError:
    """The request is well formed but exceeds a limit of this server."""
    return ApiError(413, message, "limit_exceeded", param)


def unavailable(message: str, code: str) -> ApiError:
    """The server cannot take the request now; the client may retry."""
    return ApiError(503, message, code, headers={"Retry-After": "2"})


def queue_full(length: int, seconds: int) -> ApiError:
    message = f"The queue is full with {length} images. Try again in {seconds} s."
    return ApiError(429, message, "queue_full", headers={"Retry-After": str(seconds)})


def internal() -> ApiError:
    """An unexpected failure; its cause is in the server's log, not in the response."""
    return ApiError(500, "The server failed at this request; its log says why, under this x-request-id.", "internal")


_NO_KEY = "This server requires a key: send it as `Authorization: Bearer KEY`."
_EXAMPLES = (
    ApiError(400, "There is no field 'promt'. Did you mean 'prompt'?", "unknown_field", "promt"),
    ApiError(401, _NO_KEY, "invalid_api_key"),
    ApiError(404, "There is no model 'emojy'. Did you mean 'emoji'?", "model_not_found", "model"),
    ApiError(413, "steps is 500; this server allows at most 100.", "limit_exceeded", "steps"),
    queue_full(64, 90),
    ApiError(499, "The client disconnected.", "client_closed_request"),
    internal(),
    ApiError(503, "The model is still loading.", "model_loading"),
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
        found = ApiError(404, f"There is nothing at {path}.{hint}", "not_found")
    elif error.status_code == 405:
        message = f"{path} does not support {request.method}."
        found = ApiError(405, message, "method_not_allowed", headers=error.headers)
    else:
        found = ApiError(error.status_code, str(error.detail), "invalid_request")
    return found.response()


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


EXCEPTION_HANDLERS: dict[Any, Any] = {
    HTTPException: _handle_http_error,
    RequestValidationError: _handle_validation_error,
}


# The middleware


_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_KEY_REQUIRED = ("/v1/", "/metrics")
_POLLED = ("/health", "/ready", "/metrics", "/page/{name}")  # logged at debug level
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
}


class RequestMiddleware:
    """The outermost layer of the server; with `behind_proxy` a proxy sets the request id on responses."""

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, keys: Sequence[str], max_body: int, behind_proxy: bool
    ) -> None:
        self._app, self._metrics, self._max_body, self._behind_proxy = app, metrics, max_body, behind_proxy
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, given = time.monotonic(), Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        received, status, complete = 0, 0, False

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            self._check_size(received)
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status, headers = message["status"], MutableHeaders(scope=message)
                if not self._behind_proxy:
                    headers["x-request-id"] = request_id
                for name, value in _SECURITY_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            try:
                self._check_headers(scope)
                await self._app(scope, receive_limited, send_with_headers)
            except ClientDisconnect:
                pass
            except Exception as error:
                if not isinstance(error, ApiError):
                    logger.exception("request %s failed", request_id)
                if not status:
                    response = (error if isinstance(error, ApiError) else internal()).response()
                    await response(scope, receive, send_with_headers)
        finally:  # 499: the client disconnected before the response was complete
            self._record(scope, status if complete else 499, time.monotonic() - start, request_id)

    def _check_headers(self, scope: Scope) -> None:
        path, headers = scope["path"].removeprefix(scope.get("root_path", "")), Headers(scope=scope)
        length = headers.get("content-length", "0")
        self._check_size(int(length) if length.isdecimal() else 0)
        if self._keys and path.startswith(_KEY_REQUIRED):
            scheme, _, key = headers.get("authorization", "").partition(" ")
            given = key.strip().encode("latin-1")  # the bytes that were sent
            matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, in constant time
            if scheme.lower() != "bearer" or not any(matches):
                raise ApiError(401, _NO_KEY, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _check_size(self, length: int) -> None:
        if length > self._max_body:
            raise too_large(f"The request is larger than {self._max_body} bytes.")

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _HTTP_METHODS else "other"
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        level = logging.DEBUG if route in _POLLED else logging.INFO
        logger.log(level, "%s %s %d %.3f s %s", scope["method"], route, status, seconds, request_id)
