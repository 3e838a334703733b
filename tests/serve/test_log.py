"""The log of a server in a process of its own: one JSON object for each record, and no prompts."""

from __future__ import annotations

import json
import logging
import socket
import sys
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from holdover.serve import running
from holdover.serve.launch import JsonFormatter, TextFormatter

from .servers import PATIENCE, Server, eventually

SECRET = "a very long and secret prompt " * 8  # longer than the model takes, which it warns about


@pytest.fixture(scope="module")
def logging_server() -> Iterator[Server]:
    flags = (
        "--log-format",
        "json",
        "--header-timeout",
        "1",
        "--allowed-host",
        "images.example",
        "--rate-limit",
        "1000",
    )
    running = Server(*flags).wait_until_ready()
    yield running
    running.stop()


def entries(server: Server, request_id: str) -> list[dict[str, Any]]:
    records = [json.loads(line) for line in server.log.splitlines()]  # every line is an object
    return [record for record in records if record.get("request_id") == request_id]


def test_a_request_is_one_json_object_without_its_prompt(logging_server: Server) -> None:
    asked = {"prompt": SECRET, "steps": 1, "guidance": 1.0}
    path = "/v1/images/generations"
    answer = logging_server.http.post(path, json=asked, headers={"x-request-id": "one"})
    assert answer.status_code == 200
    refused = logging_server.http.post(f"{path}?prompt=secret", json=asked, headers={"x-request-id": "two"})
    assert refused.status_code == 400
    for sent in ("one", "two"):
        assert eventually(lambda sent=sent: len(entries(logging_server, sent)) == 1)
    (record,) = entries(logging_server, "one")
    assert set(record) == {"time", "level", "logger", "client", "method", "path", "status", "seconds", "request_id"}
    assert (record["client"], record["method"], record["status"]) == ("127.0.0.1", "POST", 200)
    assert record["path"] == "/v1/images/generations"
    assert record["seconds"] > 0
    assert record["time"].endswith("Z")
    assert "secret" not in logging_server.log


def test_flags_reach_the_connections_and_the_middleware(logging_server: Server) -> None:
    assert logging_server.http.get("/health", headers={"host": "images.example"}).status_code == 200
    assert logging_server.http.get("/health", headers={"host": "evil.example"}).status_code == 403
    host, port = logging_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE) as silent:
        assert silent.recv(1000).startswith(b"HTTP/1.1 408 ")


def test_prompts_are_logged_when_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    asked = {"prompt": "ghost", "steps": 1, "guidance": 1.0}
    with caplog.at_level(logging.INFO, "holdover.serve.requests"), running(log_prompts=True) as server:
        httpx.post(f"{server.url}/v1/images/generations", json=asked, timeout=PATIENCE)
        assert eventually(lambda: any(record.name == "holdover.serve.requests" for record in caplog.records))
    (record,) = [record for record in caplog.records if record.name == "holdover.serve.requests"]
    text, entry = format_both(record)
    assert text.endswith(" 'ghost'")
    assert entry["prompt"] == "ghost"


def format_both(record: logging.LogRecord) -> tuple[str, dict[str, Any]]:
    return TextFormatter().format(record), json.loads(JsonFormatter().format(record))


def test_other_records_have_a_message_and_their_traceback() -> None:
    try:
        raise ValueError("broken")
    except ValueError:
        record = logging.LogRecord("a.b", logging.ERROR, "x.py", 1, "it %s", ("failed",), sys.exc_info())
    text, entry = format_both(record)
    assert text.startswith(entry["time"] + " ERROR a.b: it failed\nTraceback")
    assert (entry["level"], entry["logger"], entry["message"]) == ("error", "a.b", "it failed")
    assert "ValueError: broken" in entry["exception"]
