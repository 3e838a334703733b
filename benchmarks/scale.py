"""Images per day on one card, and cards for ten million images a day: `python -m benchmarks.scale`.

Reads result files and measures nothing. docs/generate.py writes the tables into docs/scale.md.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from . import RESULTS
from .speed.table import markdown_table

WANTED = 10_000_000
DAY = 86_400
PEAK = 2.0
"""Load of the busiest hour, relative to the mean."""
OVERHEAD = 1.25
"""Time of an image with prompt, decoder, queue and HTTP, relative to the denoising loop."""
METHODS = (
    "no cache",
    "holdover mag_cache 0.06/3/0.2",
    "holdover mag_cache 0.24/5/0.1",
    "holdover plan, K = 15 of 50",
    "holdover plan, K = 10 of 50",
)
NONE_YET = "Nothing is measured yet: `python -m benchmarks.ray` writes `benchmarks/results/ray.json`."


def cards(path: Path = RESULTS / "speed.json", model: str = "flux") -> str:
    """Cards for ten million images a day, by method, without compilation, as in the server."""
    figures = json.loads(path.read_text("utf-8"))
    rows = [row for row in figures["rows"] if (row["section"], row["model"], row["mode"]) == ("table", model, "eager")]
    named = {f"{row['by']} {row['label']}".strip(): row for row in rows}
    head = ("method", "seconds per image", "images per day on one card", "cards for the mean", "cards for the peak")
    what = f"{rows[0]['title']}, {rows[0]['shape']}, {rows[0]['steps']} steps, {figures['runs'][0]['card']}:"
    return (
        f"{what}\n\n{markdown_table(head, [_card(name, named[name]['seconds']) for name in METHODS if name in named])}"
    )


def _card(name: str, loop: float) -> list[str]:
    seconds = loop * OVERHEAD
    mean = WANTED * seconds / DAY
    return [name, f"{loop:.2f}", f"{DAY / seconds:,.0f}", f"{math.ceil(mean):,}", f"{math.ceil(mean * PEAK):,}"]


def replicas(path: Path = RESULTS / "ray.json") -> str:
    """Throughput with a second replica on one machine."""
    if not path.exists():
        return NONE_YET
    found = json.loads(path.read_text("utf-8"))
    rows = [[str(row[key]) for key in ("replicas", "images_per_second", "p50", "p95")] for row in found["rows"]]
    made = f"{found['cpu']}, {found['cores']} cores, {found['date'][:10]}, Ray {found['versions']['ray']}"
    low, high = min(found["by_turn"]), max(found["by_turn"])
    said = f"{found['speed_up']:.2f} times the throughput, {low:.2f} to {high:.2f} in single turns. {made}."
    load = (
        f" Other work was running on the machine: its load was {found['load_before']:.1f} before."
        if found["load_before"] > 1
        else ""
    )
    png = f"\n\nA PNG of 1024x1024 takes the ingress {found['png_cpu_s']:.2f} s of one core at most."
    return f"{markdown_table(('replicas', 'images per second', 'p50, s', 'p95, s'), rows)}\n\n{said}{load}{png}"


def machine(path: Path = RESULTS / "serve.json") -> str:
    """Throughput of one server process with several clients."""
    loads = json.loads(path.read_text("utf-8"))["loads"]
    best = max(loads, key=lambda load: float(load["cached"]["images_per_second"]))
    plain, cached = (best[kind]["images_per_second"] for kind in ("uncached", "cached"))
    return (
        f"On one CPU thread, with the built-in model, one process generates {plain:.2f} images per second "
        f"uncached and {cached:.2f} cached ({best['clients']} clients, 20 steps): {plain * DAY:,.0f} and "
        f"{cached * DAY:,.0f} a day."
    )


if __name__ == "__main__":
    print(machine(), cards(), replicas(), sep="\n\n")
