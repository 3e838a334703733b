"""How a server starts: its flags, its model, what it answers until it is ready."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from holdover.cli import app
from holdover.errors import ConfigError
from holdover.serve import Settings, create_app, running
from holdover.serve.launch import ServeError
from holdover.serve.model import ServedModel

from .servers import PATIENCE


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["serve", *arguments])
    return result.exit_code, result.stderr


# Flags


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--cache-backend", "magcache"], "There is no caching method 'magcache'. Did you mean 'mag_cache'?"),
        (["--cache-backend", "mag_cache", "--cache-config", "{"], "cache_config is not JSON: "),
        (["--cache-config", "[]"], "cache_config must be a JSON object"),
        (
            ["--cache-backend", "mag_cache", "--cache-config", '{"mag_treshold": 1}'],
            "MagCacheConfig has no setting 'mag_treshold'. Did you mean 'mag_threshold'?",
        ),
        (["--port", "70000"], "Settings.port must be at least 0 and at most 65535, not 70000."),
        (["--video-hours", "inf"], "video_hours must be a finite number; 0 keeps the videos."),
        (["--max-wait", "inf"], "Settings.max_wait must be a finite number of at least 0, not inf."),
        (["--max-batch", "0"], "Settings.max_batch must be at least 1, not 0."),
        (["--queue-size", "2"], "max_images is 4, but the queue holds only 2: raise queue_size."),
        (["--dtype", "int8"], "Settings.dtype must be one of 'auto', 'float32', 'bfloat16', 'float16', not 'int8'."),
    ],
)
def test_a_wrong_flag_is_one_clear_line(flags: list[str], said: str) -> None:
    code, err = run(*flags)
    assert code == 2
    assert err.startswith(f"Error: {said}")
    assert err.count("\n") == 1


def test_every_setting_is_a_flag() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    flags = {name.replace("-", "_") for name in re.findall(r"--([a-z-]+)", shown)}
    assert set(Settings.field_names()) - {"model"} <= flags
    assert "OpenAI's image and video API" in shown
    assert "Emoji, emoji-motion, the folder of a diffusers pipeline" in " ".join(shown.split())


def test_the_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from holdover.cli import app; app(['serve', '--help'], standalone_mode=False); print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=300)
    loaded = set(done.stdout.split("\n")[-2].split())
    assert "holdover.serve.settings" in loaded
    assert loaded & {"torch", "diffusers", "fastapi", "uvicorn", "numpy"} == set()


def test_a_port_in_use_is_one_clear_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, err = run("--port", str(port))
    assert code == 1
    assert err.startswith(f"Error: Cannot listen on 127.0.0.1 port {port}: Address already in use")


# The model


def test_a_model_that_is_not_there_ends_the_server(tmp_path: Path) -> None:
    with pytest.raises(ServeError, match="cannot be served"), running(model=str(tmp_path / "nothing")):
        pass


def test_a_cache_without_constants_ends_the_server(tmp_path: Path) -> None:
    settings = json.dumps({"profile": str(tmp_path / "none.json")})
    with pytest.raises(ServeError, match=r"none\.json"), running(cache_backend="mag_cache", cache_config=settings):
        pass


# Before the model is loaded


def test_until_the_model_is_loaded_requests_get_503() -> None:
    """The application is never started, so its model never finishes loading."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(create_app())
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            generation = await client.post("/v1/images/generations", json={"prompt": "x"})
            return [generation, *[await client.get(path) for path in ("/ready", "/v1/models", "/v1/cache")]]

    for answer in asyncio.run(ask()):
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_loading"
        assert int(answer.headers["retry-after"]) >= 1


def test_a_key_is_required_below_a_prefix_too() -> None:
    """Ray Serve uses prefixes when several applications share an address."""

    async def ask(path: str) -> int:
        transport = httpx.ASGITransport(create_app(api_keys=["correct horse"]), root_path="/images")
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return (await client.get(path)).status_code

    assert [asyncio.run(ask(f"/images{path}")) for path in ("/v1/models", "/metrics", "/health")] == [401, 401, 200]


def test_a_server_in_this_process_ends_with_its_block() -> None:
    with running(cache_backend="mag_cache") as server:
        answer = httpx.post(
            f"{server.url}/v1/images/generations",
            json={"prompt": "ghost", "steps": 2, "guidance": 1.0},
            timeout=PATIENCE,
        )
        assert answer.json()["data"][0]["holdover"]["method"] == "mag_cache"
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{server.url}/health")


def test_an_unexpected_failure_hides_its_details_and_the_next_image_is_generated(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("a secret of the server")

    with running() as server:

        def generate() -> httpx.Response:
            asked = {"prompt": "ghost", "steps": 1, "guidance": 1.0}
            return httpx.post(f"{server.url}/v1/images/generations", json=asked, timeout=PATIENCE)

        with monkeypatch.context() as broken:
            broken.setattr(ServedModel, "generate", fail)
            answer = generate()
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal")
        assert "secret" not in answer.text
        assert "a secret of the server" in caplog.text
        assert answer.headers["x-request-id"] in caplog.text
        assert generate().status_code == 200


def test_unknown_settings_are_errors() -> None:
    with pytest.raises(ConfigError, match="Did you mean 'max_batch'?"), running(max_bach=3):
        pass
