"""Real servers: `holdover serve` in a process of its own, on a free port."""

from __future__ import annotations

import base64
import io
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import httpx
import PIL.Image

HOLDOVER = Path(sys.executable).with_name("holdover")
PATIENCE = 600.0
"""Seconds to wait for what must happen; only a failure takes that long."""


def eventually(holds: Callable[[], bool], seconds: float = PATIENCE) -> bool:
    """Whether a condition becomes true."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if holds():
            return True
        time.sleep(0.1)
    return False


def image_bytes(b64: str | None) -> bytes:
    """The pixels of a PNG in base64."""
    assert b64 is not None
    return PIL.Image.open(io.BytesIO(base64.b64decode(b64))).tobytes()


def nearly_equal(a: bytes, b: bytes, share: float = 0.01) -> bool:
    """Whether two images differ by rounding alone: by at most one of 255, in a small share of their bytes.

    Two loads of the same weights, or batches of other sizes, add in another order.
    """
    differences = [abs(x - y) for x, y in zip(a, b, strict=True)]
    return max(differences) <= 1 and sum(differences) <= share * len(differences)


class Client:
    """A client of a server, with helpers for tests."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=PATIENCE)

    def generate(self, **request: Any) -> httpx.Response:
        """POST a request: by default one branch and three steps."""
        asked = {"prompt": "red apple, glossy 3d style", "steps": 3, "guidance": 1.0, "seed": 1} | request
        return self.http.post("/v1/images/generations", json=asked)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over replicas; 0 if it has no samples yet."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(value for found, value in self.samples(name) if wanted <= found)

    def samples(self, name: str) -> list[tuple[set[str], float]]:
        """All samples of a metric with their labels."""
        lines = [
            re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line) for line in self.http.get("/metrics").text.splitlines()
        ]
        return [(set((found[1] or "").split(",")), float(found[2])) for found in lines if found]


class Server(Client):
    """One process and a client for it."""

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None) -> None:
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [HOLDOVER, "serve", "--port", "0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        assert eventually(lambda: "listens on http" in self.log or self.process.poll() is not None)
        found = re.search(r"listens on (http://[^\s\"]+)", self.log)
        assert found, f"the server did not start:\n{self.log}"
        super().__init__(found[1])

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_until_ready(self) -> Server:
        assert eventually(lambda: self.process.poll() is not None or self.http.get("/ready").status_code == 200)
        assert self.process.poll() is None, f"the server did not get ready:\n{self.log}"
        return self

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(PATIENCE)
        finally:
            self.process.kill()
            self.http.close()
