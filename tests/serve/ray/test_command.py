"""`holdover serve --ray`: a Ray cluster for as long as the command runs."""

from __future__ import annotations

import secrets
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from typer.testing import CliRunner

from holdover.cli import app

from ..servers import PATIENCE, Server
from .conftest import BUSY_MACHINE

ENVIRONMENT = BUSY_MACHINE | {"RAY_AUTH_TOKEN": secrets.token_hex(16), "HOLDOVER_API_KEYS": "correct horse"}
AUTHORIZED = {"authorization": "Bearer correct horse"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--replicas", "2"], "--replicas is for many replicas: say --ray as well."),
        (["--ray", "--replicas", "0"], "RaySettings.replicas must be at least 1, not 0."),
        (
            ["--ray", "--replicas", "3", "--max-replicas", "2"],
            "max_replicas is 2, less than replicas, which is 3.",
        ),
        (["--ray", "--cache-backend", "magcache"], "There is no caching method 'magcache'. Did you mean 'mag_cache'?"),
    ],
)
def test_a_wrong_flag_is_one_clear_line(flags: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["serve", *flags])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {said}")
    assert result.stderr.count("\n") == 1


def test_it_serves_until_sigterm_and_finishes_running_requests() -> None:
    flags = ("--ray", "--num-cpus", "0.5", "--num-gpus", "0", "--grace", "30")
    server = Server(*flags, environment=ENVIRONMENT).wait_until_ready()
    assert httpx.get(f"{server.url}/v1/models", timeout=PATIENCE).status_code == 401
    server.http.headers.update(AUTHORIZED)
    begun, lines = threading.Event(), list[str]()

    def follow() -> str:
        asked = {"prompt": "rocket", "steps": 30, "guidance": 1.0, "stream": True, "partial_images": 20}
        with server.http.stream("POST", "/v1/images/generations", json=asked) as answer:
            for line in answer.iter_lines():
                begun.set()
                lines.append(line)
        return "".join(lines)

    with ThreadPoolExecutor(1) as pool:
        following = pool.submit(follow)
        assert begun.wait(PATIENCE)
        assert server.stop() == 0, server.log
        assert "image_generation.completed" in following.result()
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")
