"""The middleware around every request: request id, API key, body limit, security headers, metrics and logging."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, internal, too_large
from .metrics import RequestMetrics

logger = logging.getLogger(__name__)

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
        self, app: ASGIApp, metrics: RequestMetrics, keys: Sequence[str], max_body: int, behind_proxy: bool = False
    ) -> None:
        self._app, self._metrics, self._max_body, self._behind_proxy = app, metrics, max_body, behind_proxy
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, headers = time.monotonic(), Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        response = _Response(send, None if self._behind_proxy else request_id)
        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body:
                raise self._body_too_large()
            return message

        try:
            self._check_headers(scope["path"].removeprefix(scope.get("root_path", "")), headers)
            await self._app(scope, receive_limited, response)
        except ApiError as error:
            await response.send_error(error, scope, receive)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("request %s failed", request_id)
            await response.send_error(internal(), scope, receive)
        finally:
            self._record(scope, response.status, time.monotonic() - start, request_id)

    def _check_headers(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise self._body_too_large()
        if self._keys and path.startswith(_KEY_REQUIRED) and not self._is_valid_key(headers.get("authorization", "")):
            message = "This server requires a key: send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _is_valid_key(self, authorization: str) -> bool:
        """Compares with every key in constant time."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # the bytes that were sent
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _body_too_large(self) -> ApiError:
        return too_large(f"The request is larger than {self._max_body} bytes.")

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _HTTP_METHODS else "other"
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        level = logging.DEBUG if route in _POLLED else logging.INFO
        logger.log(level, "%s %s %d %.3f s %s", scope["method"], route, status, seconds, request_id)


class _Response:
    """Sends a response with its request id and security headers, and keeps its status."""

    def __init__(self, send: Send, request_id: str | None) -> None:
        self._send, self._request_id = send, request_id
        self._started: int | None = None
        self._complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._started = message["status"]
            headers = MutableHeaders(scope=message)
            if self._request_id is not None:
                headers["x-request-id"] = self._request_id
            for name, value in _SECURITY_HEADERS.items():
                headers.setdefault(name, value)
        await self._send(message)
        if message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)

    async def send_error(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """Send the error, unless a response has started."""
        if self._started is None:
            await error.response()(scope, receive, self)

    @property
    def status(self) -> int:
        """The status that was sent; 499 if the client disconnected before the response was complete."""
        return self._started if self._started is not None and self._complete else 499
