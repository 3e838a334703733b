"""Throughput and latency of the server, uncached and cached, for 1, 4 and 16 clients: `python -m benchmarks.serve`.

One server process with the built-in model serves clients over loopback; uncached and cached requests take turns, so
that a busy machine disturbs both. `kept` is the ratio of throughputs divided by the ratio of computed forwards;
`kept_of_cpu`, the same ratio of CPU times, is not affected by other work on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import httpx
import psutil

from .report import provenance, save, table

MAG = {"method": "mag_cache", "mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}
CACHES = {"uncached": {"method": "none"}, "cached": MAG}
SUBJECTS = ("red apple", "rocket", "pizza", "cat with sunglasses", "cactus", "ghost")


@dataclass(frozen=True)
class Server:
    """The address and the process of a server."""

    url: str
    process: psutil.Process

    def cpu(self) -> float:
        """CPU seconds so far."""
        times = self.process.cpu_times()
        return times.user + times.system


@contextmanager
def server(*flags: str) -> Iterator[Server]:
    """A server on a free port, with one CPU thread."""
    program = Path(sys.executable).with_name("holdover")
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(
            [program, "serve", "--port", "0", *flags],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            yield Server(_address(Path(log.name), process), psutil.Process(process.pid))
        finally:
            process.terminate()
            process.wait(60)


def _address(log: Path, process: subprocess.Popen[bytes]) -> str:
    while process.poll() is None:
        found = re.search(r"listens on (http://\S+)", log.read_text())
        if found and httpx.get(f"{found[1]}/ready").status_code == 200:
            return found[1]
        time.sleep(0.1)
    raise SystemExit(log.read_text())


def request_image(client: httpx.Client, seed: int, steps: int, cache: dict[str, Any]) -> tuple[float, int]:
    """Seconds to the answer, and the forwards that were computed."""
    asked = {"prompt": f"{SUBJECTS[seed % 6]}, glossy 3d style", "steps": steps, "seed": seed, "cache": cache}
    begin = time.monotonic()
    answer = client.post("/v1/images/generations", json=asked)
    answer.raise_for_status()
    return time.monotonic() - begin, sum(answer.json()["data"][0]["holdover"]["computed"].values())


@dataclass
class Load:
    """Latencies and totals of one kind of request, over all turns."""

    answers: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0
    cpu: float = 0.0

    def figures(self) -> dict[str, float]:
        times = [latency for latency, _ in self.answers]
        return {
            "requests": len(self.answers),
            "images_per_second": round(len(self.answers) / self.seconds, 4),
            "p50": round(median(times), 3),
            "p95": round(quantiles(times, n=20, method="inclusive")[-1], 3),
            "cpu_seconds_per_image": round(self.cpu / len(self.answers), 3),
            "computed": self.answers[0][1],
        }


def drive(to: Server, clients: int, requests: int, request: tuple[int, dict[str, Any]], into: Load) -> None:
    """Send requests from that many clients, each sending the next one as soon as it has an image."""
    seeds, lock = iter(range(requests)), threading.Lock()

    def follow() -> None:
        with httpx.Client(base_url=to.url, timeout=600) as client:
            while True:
                with lock:
                    seed = next(seeds, None)
                if seed is None:
                    return
                into.answers.append(request_image(client, seed, *request))

    threads = [threading.Thread(target=follow) for _ in range(clients)]
    begin, cpu = time.monotonic(), to.cpu()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    into.seconds += time.monotonic() - begin
    into.cpu += to.cpu() - cpu


def measure(to: Server, clients: int, requests: int, steps: int, turns: int) -> dict[str, Any]:
    """Uncached and cached requests in turns under the same load."""
    loads = {name: Load() for name in CACHES}
    for _ in range(turns):
        for name, cache in CACHES.items():
            drive(to, clients, requests, (steps, cache), loads[name])
    row: dict[str, Any] = {"clients": clients, **{name: load.figures() for name, load in loads.items()}}
    plain, cached = row["uncached"], row["cached"]
    saved = plain["computed"] / cached["computed"]
    gained = cached["images_per_second"] / plain["images_per_second"]
    spared = plain["cpu_seconds_per_image"] / cached["cpu_seconds_per_image"]
    return row | {
        "step_ratio": round(saved, 3),
        "speed_up": round(gained, 3),
        "kept": round(gained / saved, 3),
        "kept_of_cpu": round(spared / saved, 3),
    }


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.serve", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps per image, with guidance")
    parser.add_argument("--turns", type=int, default=2, help="turns of uncached and cached requests")
    parser.add_argument("--max-batch", type=int, default=4, help="images per batch in the server")
    options = parser.parse_args()
    with server("--max-batch", str(options.max_batch)) as to:
        for cache in CACHES.values():
            drive(to, 1, 1, (options.steps, cache), Load())  # traces and checks
        counts = {1: 3, 4: 8, 16: 16}
        rows = [measure(to, clients, requests, options.steps, options.turns) for clients, requests in counts.items()]
    result = provenance() | {"steps": options.steps, "max_batch": options.max_batch, "cache": MAG, "loads": rows}
    save("serve", result)
    print(shown(rows))
    print(json.dumps(result))


def shown(rows: list[dict[str, Any]]) -> str:
    """The result as a table."""
    keys = ("images_per_second", "p50", "p95", "cpu_seconds_per_image", "computed")
    head = ["clients", "", "images/s", "p50 s", "p95 s", "cpu s", "forwards", "speedup", "of step ratio", "by cpu"]
    cells: list[list[object]] = []
    for row in rows:
        cells.append([row["clients"], "uncached", *(row["uncached"][key] for key in keys), "", "", ""])
        kept = [row["speed_up"], f"{row['kept']:.0%}", f"{row['kept_of_cpu']:.0%}"]
        cells.append([row["clients"], "cached", *(row["cached"][key] for key in keys), *kept])
    return table([head, *cells])


if __name__ == "__main__":
    main()
