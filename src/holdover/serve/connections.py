"""Connections to clients: time limits for slow ones, and a limit on their number.

uvicorn waits without limit for a client that sends a byte of its request now and then, and so a few hundred such
connections occupy a server (Slowloris). Here a client has a fixed time for the header of a request, for its body, and
for reading a response; and if there are too many connections, the oldest one without a running request is closed.
"""

from __future__ import annotations

import asyncio
import http
import itertools
import json
import logging
import re
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from .errors import ApiError
from .settings import Settings

logger = logging.getLogger(__name__)

_numbers = itertools.count()  # of connections, in the order in which they were opened
_BLANK_LINE = re.compile(rb"\n\r?\n")


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, and the settings that `LimitedProtocol` reads."""

    def __init__(self, app: Any, settings: Settings) -> None:
        self.settings = settings
        super().__init__(
            app,
            http=LimitedProtocol,
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=2 * settings.max_header,  # a header is limited exactly in the protocol
            timeout_keep_alive=settings.keep_alive,
            timeout_graceful_shutdown=settings.grace,
        )


class LimitedProtocol(H11Protocol):
    """One connection, which is closed if its client is slow.

    `_awaited` is what the client has to send next: the header or the body of a request, with the request before it.
    The time starts when it changes. More bytes of the same header or body do not extend it.
    """

    def __init__(
        self,
        config: ServerConfig,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._settings = config.settings
        self._number = next(_numbers)
        self._awaited: tuple[str | None, object] = None, None
        self._send_timer: asyncio.TimerHandle | None = None
        self._read_timer: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether no request is running: none has arrived completely, or the response to the last one is complete."""
        return self.cycle is None or self.cycle.more_body or self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        others = [
            other
            for other in self.connections
            if isinstance(other, LimitedProtocol) and other is not self and not other.transport.is_closing()
        ]
        if len(others) >= self._settings.max_connections:
            oldest = min((other for other in others if other.idle), key=lambda other: other._number, default=None)
            if oldest is None:
                message = f"This server has {self._settings.max_connections} connections, which is its limit."
                self._refuse(ApiError(503, message, "too_many_connections", headers={"Retry-After": "2"}))
                return
            oldest.transport.abort()
        self._watch()

    def data_received(self, data: bytes) -> None:
        limit = self._settings.max_header
        if self.conn.their_state is h11.IDLE:  # h11 itself limits only a header that arrives in parts
            header = self.conn.trailing_data[0] + data
            end = _BLANK_LINE.search(header)
            if (len(header) if end is None else end.start()) > limit:
                message = f"The header of the request is larger than {limit} bytes."
                self._refuse(ApiError(431, message, "header_too_large"))
                return
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def pause_writing(self) -> None:
        """The client does not read the response: it has as much time as for sending a body."""
        super().pause_writing()
        self._read_timer = self.loop.call_later(self._settings.body_timeout, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        _cancel(self._read_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        _cancel(self._send_timer)
        _cancel(self._read_timer)

    def _watch(self) -> None:
        """Start the time of what the client has to send now, if that has changed."""
        state, awaited = self.conn.their_state, None
        if state is h11.SEND_BODY:
            awaited = "body"
        elif state is h11.IDLE and (self.cycle is None or self.conn.trailing_data[0]):
            awaited = "header"  # otherwise it is idle between two requests, which uvicorn limits
        if (awaited, self.cycle) == self._awaited:
            return
        self._awaited = awaited, self.cycle
        _cancel(self._send_timer)
        if awaited is not None:
            seconds = getattr(self._settings, f"{awaited}_timeout")
            error = ApiError(408, f"The {awaited} of the request did not arrive within {seconds:g} s.", "timeout")
            self._send_timer = self.loop.call_later(seconds, self._refuse, error)

    def send_400_response(self, msg: str) -> None:
        """uvicorn calls it for a request that is not HTTP."""
        self._refuse(ApiError(400, "The request is not valid HTTP/1.1.", "invalid_request"))

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an error if no other response has begun."""
        if self.transport.is_closing():
            return
        logger.info("connection of %s closed: %s", self.client[0] if self.client else "a client", error.detail)
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = json.dumps(error.body).encode()
            headers = {"content-type": "application/json", "content-length": len(body), "connection": "close"}
            lines = [f"{name}: {value}\r\n" for name, value in {**headers, **(error.headers or {})}.items()]
            status = f"HTTP/1.1 {error.status_code} {http.HTTPStatus(error.status_code).phrase}\r\n"
            self.transport.write((status + "".join(lines) + "\r\n").encode() + body)
        self.transport.close()


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
