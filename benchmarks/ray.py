"""Throughput with one replica and with two on Ray Serve, with the built-in model: `python -m benchmarks.ray`.

One Ray cluster on this machine has two applications, one with one replica and one with two; each replica has one CPU
thread. They take turns under the same load, so that a busy machine disturbs both; the ratio is that of all turns
together, its range that of single turns. The client, HTTP and Ray need CPU time too, so that two replicas on two cores
cannot double the throughput.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any

import psutil
import ray
import torch
from ray import serve

from holdover.serve.app import encode_png
from holdover.serve.ray import app

from .report import provenance, save, table
from .serve import MAG, Load, Server, drive

REPLICAS = (1, 2)


@contextmanager
def cluster(max_batch: int) -> Iterator[dict[int, Server]]:
    """Both applications, by their number of replicas."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(address="local", include_dashboard=False, num_cpus=4, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    try:
        for count in REPLICAS:
            settings = {"replicas": count, "num_cpus": 0.5, "num_gpus": 0, "max_batch": max_batch, "log_level": "error"}
            serve.run(app(settings), name=f"of{count}", route_prefix=f"/of{count}")
        yield {count: Server(f"http://127.0.0.1:{port}/of{count}", psutil.Process()) for count in REPLICAS}
    finally:
        serve.shutdown()
        ray.shutdown()


def measure(to: dict[int, Server], clients: int, requests: int, steps: int, turns: int) -> dict[str, Any]:
    """One and two replicas in turns under the same load."""
    loads, ratios = {count: Load() for count in REPLICAS}, []
    for _ in range(turns):
        before = {count: load.seconds for count, load in loads.items()}
        for count, load in loads.items():
            drive(to[count], clients, requests, (steps, MAG), load)
        one, two = (loads[count].seconds - before[count] for count in REPLICAS)
        ratios.append(round(one / two, 3))
    kept = ("requests", "images_per_second", "p50", "p95")
    rows = [{"replicas": n, **{key: load.figures()[key] for key in kept}} for n, load in loads.items()]
    ratio = loads[1].seconds / loads[2].seconds
    return {"clients": clients, "rows": rows, "speed_up": round(ratio, 3), "by_turn": ratios}


def png_seconds() -> float:
    """CPU seconds to encode one PNG of 1024x1024 noise, the slowest image to encode."""
    noise = torch.randint(256, (1024, 1024, 3), dtype=torch.uint8).numpy()
    begin = time.process_time()
    encode_png(noise, (1024, 1024))
    return round(time.process_time() - begin, 3)


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ray", description=__doc__)
    parser.add_argument("--steps", type=int, default=20, help="steps per image, with guidance")
    parser.add_argument("--turns", type=int, default=4, help="turns of one and two replicas")
    parser.add_argument("--requests", type=int, default=12, help="images per turn")
    parser.add_argument("--clients", type=int, default=4, help="concurrent clients")
    options = parser.parse_args()
    load = round(os.getloadavg()[0], 2)
    with cluster(max_batch=1) as to:
        for server in to.values():
            drive(server, 4, 4, (options.steps, MAG), Load())  # traces and checks, on every replica
        found = measure(to, options.clients, options.requests, options.steps, options.turns)
    made = provenance() | {"cores": os.cpu_count(), "load_before": load, "steps": options.steps, "cache": MAG}
    made["versions"]["ray"] = version("ray")
    made["png_cpu_s"] = png_seconds()
    save("ray", made | found)
    print(shown(found))
    print(json.dumps(made | found))


def shown(found: dict[str, Any]) -> str:
    """The result as a table."""
    rows = [list(row.values()) for row in found["rows"]]
    head = ["replicas", "requests", "images/s", "p50 s", "p95 s"]
    return f"{table([head, *rows])}\nspeedup {found['speed_up']}, by turn {found['by_turn']}"


if __name__ == "__main__":
    main()
