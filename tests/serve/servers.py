"""Real servers: `holdover serve` in a process of its own, on a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx

HOLDOVER = Path(sys.executable).with_name("holdover")
DEADLINE = 90.0


class Client:
    """What tests ask a server."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=120)

    def draw(self, **request: Any) -> httpx.Response:
        """POST what to draw: one branch and three steps unless told otherwise."""
        asked = {"prompt": "red apple, glossy 3d style", "steps": 3, "guidance": 1.0, "seed": 1} | request
        return self.http.post("/v1/images/generations", json=asked)

    def metric(self, name: str, **labels: str) -> float:
        """The value of a counter, of all replicas together; 0 where it has not been counted yet."""
        wanted = {f'{key}="{value}"' for key, value in labels.items()}
        return sum(value for found, value in self.samples(name) if wanted <= found)

    def samples(self, name: str) -> list[tuple[set[str], float]]:
        """Every sample of a counter with its labels."""
        lines = [
            re.fullmatch(rf"{name}(?:{{(.*)}})? (\S+)", line) for line in self.http.get("/metrics").text.splitlines()
        ]
        return [(set((found[1] or "").split(",")), float(found[2])) for found in lines if found]


class Server(Client):
    """One process and a client for it."""

    def __init__(self, *flags: str, environment: Mapping[str, str] | None = None, deadline: float = DEADLINE) -> None:
        self._deadline = deadline
        self._log = tempfile.NamedTemporaryFile(mode="w+", suffix=".log")  # noqa: SIM115
        self.process = subprocess.Popen(
            [HOLDOVER, "serve", "--port", "0", *flags],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
        )
        super().__init__(self._address())

    def _address(self) -> str:
        until = time.monotonic() + self._deadline
        while time.monotonic() < until and self.process.poll() is None:
            found = re.search(r"listens on (http://\S+)", self.log)
            if found:
                return found[1]
            time.sleep(0.05)
        raise AssertionError(f"the server did not start:\n{self.log}")

    @property
    def log(self) -> str:
        return Path(self._log.name).read_text()

    def wait_until_ready(self) -> Server:
        until = time.monotonic() + self._deadline
        while time.monotonic() < until and self.process.poll() is None:
            if self.http.get("/ready").status_code == 200:
                return self
            time.sleep(0.05)
        raise AssertionError(f"the server did not get ready:\n{self.log}")

    def stop(self, timeout: float = 60) -> int:
        """SIGTERM, and the exit status."""
        self.process.send_signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = 60) -> int:
        """The exit status of a server that is stopping."""
        try:
            return self.process.wait(timeout)
        finally:
            self.process.kill()
            self.http.close()
