"""Slow, silent, too many and oversized connections, at a server whose application needs no model."""

from __future__ import annotations

import asyncio
import json
import select
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import httpx
import uvicorn
from starlette.types import Receive, Scope, Send

from holdover.serve.connections import ServerConfig
from holdover.serve.settings import Settings

from .servers import PATIENCE, eventually

SHORT, LONG = 0.3, 10 * PATIENCE


class Application:
    """Reads the body of a request and answers with its length; `/wait` does so after `release` is set."""

    def __init__(self) -> None:
        self.release, self.waiting = threading.Event(), 0
        self.connections: set[Any] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for kind in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{kind}.complete"})
            return
        body, more = b"", True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body, more = body + message["body"], message["more_body"]
        self.waiting += 1
        while scope["path"] == "/wait" and not self.release.is_set():
            await asyncio.sleep(0.01)
        size = 50_000_000 if scope["path"] == "/large" else 0
        answer = str(len(body)).encode() + b" " * size
        await send(
            {"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(answer))]}
        )
        await send({"type": "http.response.body", "body": answer})


@contextmanager
def served(**settings: Any) -> Iterator[tuple[tuple[str, int], Application]]:
    """A server on a thread, with its address."""
    app = Application()
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(ServerConfig(app, Settings(**{"grace": 1, **settings})))
    app.connections = server.server_state.connections
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        assert eventually(lambda: server.started)
        yield listener.getsockname(), app
    finally:
        app.release.set()
        server.should_exit = True
        thread.join()


@contextmanager
def connected(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address)) for _ in range(count)]


def received(connection: socket.socket) -> bytes:
    """Everything that arrives until the server closes the connection."""
    connection.settimeout(PATIENCE)
    data = b""
    try:
        while chunk := connection.recv(65536):
            data += chunk
    except ConnectionResetError:
        pass
    return data


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has closed the connection, perhaps after a response."""
    readable, _, _ = select.select([connection], [], [], 0)
    if not readable:
        return False
    try:
        return connection.recv(65536) == b""
    except ConnectionResetError:
        return True


def dribble(connections: Sequence[socket.socket], data: bytes) -> Callable[[], bool]:
    """Sends a little to each connection on every call; says whether the server has closed all of them."""
    closed: set[socket.socket] = set()

    def once() -> bool:
        for connection in set(connections) - closed:
            try:
                connection.sendall(data)
                gone = is_closed(connection)
            except OSError:
                gone = True
            if gone:
                closed.add(connection)
        return len(closed) == len(connections)

    return once


def test_slow_headers_are_not_waited_for() -> None:
    with served(header_timeout=SHORT) as (address, _), connected(address, 60) as slow:
        for connection in slow:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n")
        assert eventually(dribble(slow, b"X-A: b\r\n"))
        assert httpx.get("http://{}:{}/".format(*address), timeout=PATIENCE).status_code == 200


def test_a_client_that_sends_nothing_is_told_so() -> None:
    with served(header_timeout=SHORT) as (address, _), connected(address, 1) as (silent,):
        answer = received(silent)
    assert answer.startswith(b"HTTP/1.1 408 Request Timeout\r\n")
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert error["message"] == "The header of the request did not arrive within 0.3 s."


def test_a_slow_body_is_not_waited_for() -> None:
    with served(body_timeout=SHORT) as (address, app), connected(address, 3) as slow:
        for connection in slow:
            connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert eventually(dribble(slow, b" "))
        assert app.waiting == 0  # no request was complete
        assert httpx.post("http://{}:{}/".format(*address), content=b"abc", timeout=PATIENCE).text == "3"


def test_a_client_that_does_not_read_its_response_is_not_waited_for() -> None:
    with served(body_timeout=SHORT) as (address, app), connected(address, 1) as (deaf,):
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert eventually(lambda: app.waiting == 1)
        assert eventually(lambda: not app.connections)


def test_requests_on_one_connection_each_have_their_own_time() -> None:
    with served(header_timeout=5 * SHORT, keep_alive=60) as (address, _):
        with httpx.Client(base_url="http://{}:{}".format(*address), timeout=PATIENCE) as client:
            ports = set()
            for size in (1, 2, 3):
                answer = client.post("/", content=b"a" * size)
                assert answer.text == str(size)
                ports.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                threading.Event().wait(2 * SHORT)
        assert len(ports) == 1


def test_when_there_are_too_many_connections_the_oldest_idle_one_is_closed() -> None:
    slow = {"header_timeout": LONG, "body_timeout": LONG}
    with served(max_connections=4, **slow) as (address, _), connected(address, 12) as silent:
        for connection in silent[::2]:
            with suppress(OSError):  # it is closed already
                connection.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100000\r\n\r\n")
        assert httpx.get("http://{}:{}/".format(*address), timeout=PATIENCE).status_code == 200
        assert eventually(lambda: [is_closed(one) for one in silent[:9]] == [True] * 9)
        assert [is_closed(one) for one in silent[9:]] == [False] * 3


def test_a_running_request_is_not_closed_for_another() -> None:
    with served(max_connections=1) as (address, app), connected(address, 1) as (running,):
        running.sendall(b"GET /wait HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert eventually(lambda: app.waiting == 1)
        with connected(address, 1) as (second,):
            answer = received(second)
        assert answer.startswith(b"HTTP/1.1 503 Service Unavailable\r\n")
        assert b"Retry-After: 2\r\n" in answer
        assert b"This server has 1 connections, which is its limit." in answer
        app.release.set()
        assert received(running).startswith(b"HTTP/1.1 200 OK\r\n")


def test_a_large_header_is_refused() -> None:
    with served(max_header=2000) as (address, _):
        url = "http://{}:{}/".format(*address)
        assert httpx.get(url, headers={"x-a": "b" * 1000}, timeout=PATIENCE).status_code == 200
        refused = httpx.get(url, headers={"x-a": "b" * 4000}, timeout=PATIENCE)
    assert (refused.status_code, refused.json()["error"]["code"]) == (431, "header_too_large")


def test_what_is_not_http_is_refused() -> None:
    with served() as (address, _), connected(address, 1) as (other,):
        other.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        assert received(other).startswith(b"HTTP/1.1 400 Bad Request\r\n")
