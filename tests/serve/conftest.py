"""One server for all tests that can share one."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from .servers import Server

MAG = '{"mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}'


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The model in the box with MagCache, started as in the proposal, with the prompt cache on."""
    flags = ("--cache-backend", "mag_cache", "--cache-config", MAG, "--max-wait", "0", "--max-batch", "3")
    running = Server(*flags, environment={"OMNI_DIFFUSION_PROMPT_EMBED_CACHE": "1"}).wait_until_ready()
    yield running
    running.stop()


@pytest.fixture(autouse=True)
def _no_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ignore keys in the environment of the tests."""
    for name in ("HOLDOVER_API_KEYS", "OPENAI_BASE_URL"):
        if name in os.environ:
            monkeypatch.delenv(name)
