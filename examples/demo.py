"""The demo: six emoji from the model in the box, plain, under each method, and with fewer steps instead.

Prints what was computed and held, the time and the distance from the plain pictures; writes the pictures side by side.
"""

from __future__ import annotations

import json
import platform
import sys
import time
from dataclasses import dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

import holdover
from holdover.zoo.emoji import EmojiPipeline

STEPS = 30
PROMPTS = (
    "red apple, glossy 3d style",
    "rocket, microsoft flat style",
    "pizza, twitter style",
    "cat with sunglasses, google noto style",
    "cactus, glossy 3d style",
    "ghost, emojione style",
)
METHODS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tea_cache", {"rel_l1_thresh": 0.15}),
    ("mag_cache", {"mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}),
    ("mag_cache", {"mag_threshold": 0.06, "mag_max_skip_steps": 3, "mag_retention_ratio": 0.2}),
)


@dataclass
class Row:
    """One way to draw the six pictures."""

    name: str
    computed: int
    seconds: float
    pictures: np.ndarray

    def psnr(self, plain: np.ndarray) -> np.ndarray:
        """Decibels for each picture, from float pictures in 0..1."""
        error = ((self.pictures.astype(np.float64) - plain) ** 2).mean(axis=(1, 2, 3))
        return 10 * np.log10(1 / np.maximum(error, 1e-20))


def draw(pipe: EmojiPipeline, steps: int = STEPS, prompts: tuple[str, ...] = PROMPTS) -> tuple[np.ndarray, float]:
    """The pictures for the prompts, always from the same noise, and the seconds they took."""
    noise = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
    begin = time.perf_counter()
    pictures = pipe(list(prompts), num_inference_steps=steps, generator=noise, output_type="np").images
    return pictures, time.perf_counter() - begin


def under(pipe: EmojiPipeline, method: str, settings: dict[str, Any]) -> Row:
    """The pictures under one method, with its trace; the first generation, which checks the cut, is not timed."""
    name = f"{method} {' / '.join(f'{value:g}' for value in settings.values())}"
    with holdover.enable(pipe, method, **settings) as cache:
        draw(pipe, 2, PROMPTS[:1])
        pictures, seconds = draw(pipe)
        generation = cache.stats().last
    assert generation is not None
    named = ", ".join(f"{key}={value:g}" for key, value in settings.items())
    print(f"\n{method}, {named}    (C computed, h held)")
    for branch in generation.branches:
        print(f"  {branch:<7}{generation.trace(branch)}")
    return Row(name, generation.computed_total // 2, seconds, pictures)


def identical(pipe: EmojiPipeline, plain: np.ndarray) -> None:
    """Hold nothing, and take the cache off: the same bits as the plain pipeline both times."""
    prompt, bits = PROMPTS[:1], plain[:1]
    for method, off in (("tea_cache", {"rel_l1_thresh": 0.0}), ("mag_cache", {"mag_threshold": 0.0})):
        with holdover.enable(pipe, method, **off):
            same = np.array_equal(draw(pipe, STEPS, prompt)[0], bits)
        print(f"{method} at threshold 0 is bit-identical to the plain pipeline: {same}")
    print(f"after disable() it is the plain pipeline again: {np.array_equal(draw(pipe, STEPS, prompt)[0], bits)}")


def table(rows: list[Row]) -> None:
    """Every row beside the plain one: steps, seconds, speed, and what it cost."""
    plain = rows[0]
    print(f"\n{'':<28}computed      time   speed    PSNR mean    worst")
    for row in rows:
        decibels = row.psnr(plain.pictures)
        cost = "" if row is plain else f"{decibels.mean():8.1f} dB {decibels.min():6.1f} dB"
        steps = f"{row.computed:3d} of {STEPS}"
        print(f"{row.name:<28}{steps} {row.seconds:6.1f} s {plain.seconds / row.seconds:6.2f}x {cost}")


def record(rows: list[Row], path: Path) -> None:
    """The table as JSON, with what it was measured on."""
    packages = ("holdover", "torch", "diffusers")
    plain = rows[0]
    figures = [
        {
            "name": row.name,
            "computed": row.computed,
            "seconds": round(row.seconds, 2),
            "psnr_mean": None if row is plain else round(float(row.psnr(plain.pictures).mean()), 2),
            "psnr_worst": None if row is plain else round(float(row.psnr(plain.pictures).min()), 2),
        }
        for row in rows
    ]
    result = {
        "date": date.today().isoformat(),
        "versions": {package: version(package) for package in packages},
        "machine": f"{platform.machine()}, {torch.get_num_threads()} thread",
        "steps": STEPS,
        "prompts": PROMPTS,
        "rows": figures,
    }
    path.write_text(json.dumps(result, indent=1) + "\n")


def sheet(rows: list[Row], path: Path, size: int = 112) -> None:
    """All rows as one picture, time and PSNR under each."""
    font = ImageFont.load_default(15)
    canvas = Image.new("RGB", (len(PROMPTS) * size, len(rows) * (size + 26)), "white")
    pen = ImageDraw.Draw(canvas)
    for y, row in enumerate(rows):
        top = y * (size + 26)
        for x, picture in enumerate(row.pictures):
            image = Image.fromarray((picture * 255).round().astype(np.uint8)).resize((size - 12, size - 12), 1)
            canvas.paste(image, (x * size + 6, top + 6))
        cost = "" if y == 0 else f", {row.psnr(rows[0].pictures).mean():.1f} dB, {rows[0].seconds / row.seconds:.1f}x"
        pen.text((6, top + size), f"{row.name}: {row.computed} of {STEPS} steps computed{cost}", "black", font)
    path.parent.mkdir(parents=True, exist_ok=True)
    canvas.save(path)


def main() -> None:
    """Run the demo."""
    torch.set_num_threads(1)
    output = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    pipe = holdover.load("emoji")
    print(f"{len(PROMPTS)} emoji, {STEPS} steps, guidance 3, one CPU thread.")
    draw(pipe, 1)
    plain, seconds = draw(pipe)
    rows = [Row("plain", STEPS, seconds, plain)]
    rows += [under(pipe, method, settings) for method, settings in METHODS]
    fewer = rows[2].computed
    pictures, seconds = draw(pipe, fewer)
    rows.append(Row("fewer steps instead", fewer, seconds, pictures))
    table(rows)
    print()
    alone, _ = draw(pipe, STEPS, PROMPTS[:1])
    identical(pipe, alone)
    sheet(rows, output / "emoji.png")
    record(rows, output / "emoji.json")
    print(f"\nThe pictures are in {output / 'emoji.png'}, the figures in {output / 'emoji.json'}.")


if __name__ == "__main__":
    main()
