"""What every request passes on its way in and out: an id, a key, a size limit, a count, and never a traceback."""

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

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_VERBS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_GUARDED = ("/v1/", "/metrics")
_OFTEN = ("/health", "/ready", "/metrics", "/page/{name}")
_SAFETY = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; frame-ancestors 'none'; base-uri 'none'",
}


class Front:
    """The outermost layer of the server's own; `proxied` where one before it puts the id on answers."""

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, keys: Sequence[str], max_body: int, proxied: bool = False
    ) -> None:
        self._app, self._metrics, self._max_body, self._proxied = app, metrics, max_body, proxied
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, headers = time.monotonic(), Headers(scope=scope)
        given = headers.get("x-request-id", "")
        name = given if _ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = name
        answer = Answer(send, None if self._proxied else name)
        try:
            self._admit(scope["path"].removeprefix(scope.get("root_path", "")), headers)
            await self._app(scope, Body(receive, self._max_body), answer)
        except ApiError as error:
            await answer.instead(error, scope, receive)
        except ClientDisconnect:
            pass
        except Exception:
            logger.exception("request %s failed", name)
            await answer.instead(internal(), scope, receive)
        finally:
            self._count(scope, answer.outcome, time.monotonic() - begin, name)

    def _admit(self, path: str, headers: Headers) -> None:
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body:
            raise _body_too_large(self._max_body)
        if self._keys and path.startswith(_GUARDED) and not self._knows(headers.get("authorization", "")):
            message = "This server asks for a key: send it as `Authorization: Bearer KEY`."
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})

    def _knows(self, authorization: str) -> bool:
        """Compares with every key, in a time that tells nothing about them."""
        scheme, _, key = authorization.partition(" ")
        given = key.strip().encode("latin-1")  # the bytes that were sent
        matches = [hmac.compare_digest(given, known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _count(self, scope: Scope, status: int, seconds: float, name: str) -> None:
        route = getattr(scope.get("route"), "path", "other")
        verb = scope["method"] if scope["method"] in _VERBS else "other"
        self._metrics.requests.labels(route, verb, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        level = logging.DEBUG if route in _OFTEN else logging.INFO
        logger.log(level, "%s %s %d %.3f s %s", scope["method"], route, status, seconds, name)


class Answer:
    """Sends an answer on, with the request's id, and remembers how it went."""

    def __init__(self, send: Send, name: str | None) -> None:
        self._send, self._name = send, name
        self._status: int | None = None
        self._complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            headers = MutableHeaders(scope=message)
            if self._name is not None:
                headers["x-request-id"] = self._name
            for name, value in _SAFETY.items():
                headers.setdefault(name, value)
        await self._send(message)
        if message["type"] == "http.response.body":
            self._complete = not message.get("more_body", False)

    async def instead(self, error: ApiError, scope: Scope, receive: Receive) -> None:
        """An error, unless an answer has begun."""
        if self._status is None:
            await error.response()(scope, receive, self)

    @property
    def outcome(self) -> int:
        """The status that was sent; 499 where the client went away before all of it was."""
        return self._status if self._status is not None and self._complete else 499


class Body:
    """Hands a request's body on until it is too large."""

    def __init__(self, receive: Receive, most: int) -> None:
        self._receive, self._most, self._length = receive, most, 0

    async def __call__(self) -> Message:
        message = await self._receive()
        self._length += len(message.get("body", b""))
        if self._length > self._most:
            raise _body_too_large(self._most)
        return message


def _body_too_large(most: int) -> ApiError:
    return too_large(f"The request is larger than {most} bytes.")
