"""The middleware around every request: request ids, security headers, access, limits, metrics and the log."""

from __future__ import annotations

import fnmatch
import hmac
import ipaddress
import logging
import math
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import KEY_MISSING, KEY_WRONG, ApiError, internal, rate_limited, too_large
from .metrics import RequestMetrics
from .settings import Settings

logger = logging.getLogger("holdover.serve.requests")

MAX_JSON = 1_000_000
"""Bytes of a request that has no image in it: parsing a larger one would delay other requests."""

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HTTP_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
_KEY_REQUIRED = ("/v1/", "/metrics")
_WITH_IMAGES = ("/v1/images/compare", "/v1/images/edits", "/v1/videos")
_POLLED = ("/health", "/ready", "/metrics", "/page/{name}", "/v1/videos/{video_id}")  # logged at debug level
_SECURITY_HEADERS = {
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "content-security-policy": "default-src 'self'; img-src 'self' data:; media-src 'self' blob:; "
    "frame-ancestors 'none'; base-uri 'none'",
}


class RequestMiddleware:
    """The outermost layer of the server; with `behind_proxy` a proxy sets the request id on responses."""

    def __init__(
        self, app: ASGIApp, metrics: RequestMetrics, settings: Settings, keys: Sequence[str], behind_proxy: bool
    ) -> None:
        self._app, self._metrics, self._settings, self._behind_proxy = app, metrics, settings, behind_proxy
        self._keys = [key.encode() for key in keys]
        self._rates = RateLimits(settings.rate_limit)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start, headers = time.monotonic(), Headers(scope=scope)
        given, path = headers.get("x-request-id", ""), scope["path"].removeprefix(scope.get("root_path", ""))
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        max_body = self._settings.max_body if path in _WITH_IMAGES else min(self._settings.max_body, MAX_JSON)
        received, status, complete = 0, 0, False

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > max_body:
                raise too_large(f"The request is larger than {max_body} bytes.")
            return message

        async def send_with_headers(message: Message) -> None:
            nonlocal status, complete
            if message["type"] == "http.response.start":
                status, sent = message["status"], MutableHeaders(scope=message)
                if not self._behind_proxy:
                    sent["x-request-id"] = request_id
                for name, value in _SECURITY_HEADERS.items():
                    sent.setdefault(name, value)
            await send(message)
            complete = message["type"] == "http.response.body" and not message.get("more_body", False)

        try:
            try:
                self._check_origin(scope["method"], headers)
                length = headers.get("content-length", "0")
                if length.isdecimal() and int(length[:20]) > max_body:
                    raise too_large(f"The request is larger than {max_body} bytes.")
                client = self._check_key(headers) if self._keys and path.startswith(_KEY_REQUIRED) else None
                if scope["method"] == "POST":
                    self._rates.check(client or _address(scope))
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

    def _check_origin(self, method: str, headers: Headers) -> None:
        """Raise an error for a host name that is not this server's, and for a change from a page of another site."""
        host = headers.get("host", "")
        name = (host.rpartition(":")[0] if re.search(r":\d*$", host) else host).strip("[]").rstrip(".").lower()
        if not _is_local_name(name) and not any(fnmatch.fnmatchcase(name, known) for known in self._settings.hosts):
            message = (
                f"This server does not answer for the host {name[:100]!r}: start it with --allowed-host to allow it."
            )
            raise ApiError(403, message, "host_not_allowed")
        origin = headers.get("origin")
        allowed = self._settings.cors_origin
        if method in ("POST", "DELETE") and origin is not None and origin.partition("://")[2] != host:
            if origin not in allowed and "*" not in allowed:
                message = f"Pages of {origin[:100]} may not use this server: start it with --cors-origin to allow them."
                raise ApiError(403, message, "origin_not_allowed")

    def _check_key(self, headers: Headers) -> str:
        """The name under which the requests of a key are counted; an error if the key is missing or wrong."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        given = key.strip().encode("latin-1")  # the bytes that were sent
        matches = [hmac.compare_digest(given, known) for known in self._keys]  # all, in constant time
        if scheme.lower() != "bearer" or not any(matches):
            message = KEY_WRONG if given else KEY_MISSING
            raise ApiError(401, message, "invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        return f"key {matches.index(True)}"

    def _record(self, scope: Scope, status: int, seconds: float, request_id: str) -> None:
        route = getattr(scope.get("route"), "path", "other")
        method = scope["method"] if scope["method"] in _HTTP_METHODS else "other"
        self._metrics.requests.labels(route, method, str(status)).inc()
        self._metrics.latency.labels(route).observe(seconds)
        fields: dict[str, Any] = {  # no query: a link of the page has the prompt in it
            "client": _address(scope),
            "method": scope["method"],
            "path": scope.get("raw_path", scope["path"].encode())
            .partition(b"?")[0]
            .decode("ascii", "backslashreplace"),
            "status": status,
            "seconds": round(seconds, 3),
            "request_id": request_id,
        }
        if self._settings.log_prompts and "prompt" in scope["state"]:
            fields["prompt"] = scope["state"]["prompt"]
        level = logging.DEBUG if route in _POLLED and method == "GET" else logging.INFO
        text = "{client} {method} {path} {status} {seconds:.3f} s {request_id}".format(**fields)
        prompt = f" {fields['prompt']!r}" if "prompt" in fields else ""
        logger.log(level, "%s%s", text, prompt, extra={"fields": fields})


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "-"


def _is_local_name(name: str) -> bool:
    """Whether no DNS server decides where requests to this host go."""
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class RateLimits:
    """A token bucket for each client, which holds the requests of a minute and refills evenly."""

    MAX_CLIENTS = 10_000  # buckets that are kept; above it, full ones are dropped

    def __init__(self, per_minute: int) -> None:
        self._limit, self._buckets = per_minute, dict[str, tuple[float, float]]()  # requests left, when that was

    def check(self, client: str, now: float | None = None) -> None:
        """Count a request; an error says when the next one is allowed."""
        if not self._limit:
            return
        now = time.monotonic() if now is None else now
        left = self._left(client, now)
        if left < 1:
            raise rate_limited(self._limit, math.ceil((1 - left) * 60 / self._limit))
        self._buckets[client] = left - 1, now
        if len(self._buckets) > self.MAX_CLIENTS:
            full = [name for name in self._buckets if self._left(name, now) >= self._limit]
            for name in full or list(self._buckets)[:1]:
                del self._buckets[name]

    def _left(self, client: str, now: float) -> float:
        left, then = self._buckets.get(client, (float(self._limit), now))
        return min(self._limit, left + (now - then) * self._limit / 60)
