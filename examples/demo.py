"""The demo: six emoji from the built-in model, uncached, under each method, and with fewer steps instead.

Prints computed and held steps, the time, and the distance to the uncached images; writes the figures, a report and the
rows of images in README. `python examples/demo.py FOLDER` writes to another folder than `demo`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

import holdover
from holdover.cli.application import one_line_errors
from holdover.cli.generation import run_and_report
from holdover.compare import Comparison, MethodCandidate, Results, Row
from holdover.selector import methods

PROMPTS = (
    "red apple, glossy 3d style",
    "rocket, microsoft flat style",
    "pizza, twitter style",
    "cat with sunglasses, google noto style",
    "cactus, glossy 3d style",
    "ghost, emojione style",
)
CANDIDATES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("tea_cache", {"rel_l1_thresh": 0.15}),
    ("mag_cache", {"mag_threshold": 0.24, "mag_max_skip_steps": 5, "mag_retention_ratio": 0.1}),
    ("cache_dit", {"residual_diff_threshold": 0.24}),
    ("plan", {"budget": "3x"}),
)
HOLD_NOTHING: dict[str, dict[str, float]] = {
    "tea_cache": {"rel_l1_thresh": 0.0},
    "mag_cache": {"mag_threshold": 0.0},
    "cache_dit": {"residual_diff_threshold": 0.0},
}
CELL, IMAGE, LABEL, GAP = 124, 112, 252, 14


def comparison() -> Comparison:
    """Every prompt under every candidate method that is available."""
    known = [MethodCandidate(name, tuple(settings.items())) for name, settings in CANDIDATES if name in methods()]
    return Comparison(PROMPTS, tuple(known), steps=30, batch_size=len(PROMPTS), clock="cpu")


def check_identity(pipe: Any) -> None:
    """Print whether images are bit-identical to the plain pipeline when nothing is held, and after disable()."""

    def generate() -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        images: torch.Tensor = pipe(PROMPTS[0], num_inference_steps=8, generator=noise, output_type="pt").images
        return images

    plain = generate()
    for method, nothing in HOLD_NOTHING.items():
        if method in methods():
            with holdover.enable(pipe, method, **nothing):
                same = torch.equal(generate(), plain)
            print(f"{method} at threshold 0 is bit-identical to the plain pipeline: {same}")
    print(f"after disable() it is the plain pipeline again: {torch.equal(generate(), plain)}")


def select_rows(results: Results) -> list[Row]:
    """The rows of the sheet: uncached, every method, and no cache with as few steps as the fastest method computed."""
    cached = [row for row in results.rows if row.kind == "method" and row.error is None]
    fewest = min(round(row.computed_steps or 0) for row in cached)
    instead = [row for row in results.rows if row.kind == "fewer_steps" and row.steps == fewest]
    return [results.reference, *cached, *instead]


def describe(row: Row, results: Results) -> list[str]:
    """The lines of text next to a row of images."""
    name = "fewer steps instead" if row.kind == "fewer_steps" else row.label
    seconds, speed = sum(row.seconds), results.speedup(row)
    if row.kind == "reference":
        return [name, f"{row.steps} steps, {seconds:.1f} s", ""]
    psnr = row.summary("psnr")
    steps = f"{row.steps}" if row.kind == "fewer_steps" else f"{row.computed_steps:.3g} of {row.steps}"
    return [name, f"{steps} steps, {seconds:.1f} s, {speed:.1f}x", f"PSNR {psnr.mean:.1f} dB, worst {psnr.worst:.1f}"]


def write_sheet(results: Results, folder: Path, path: Path, scale: int = 2) -> None:
    """Write one image with a row of images per method, and its time and PSNR next to it."""
    rows = select_rows(results)
    bold, plain = ImageFont.load_default(17 * scale), ImageFont.load_default(14 * scale)
    width, height = LABEL + len(PROMPTS) * CELL, len(rows) * (IMAGE + GAP) + GAP
    canvas = Image.new("RGB", (width * scale, height * scale), "white")
    pen = ImageDraw.Draw(canvas)
    for y, row in enumerate(rows):
        top = GAP + y * (IMAGE + GAP)
        for line, text in enumerate(describe(row, results)):
            place = (GAP * scale, (top + 24 + 23 * line) * scale)
            pen.text(place, text, "#111" if line == 0 else "#555", bold if line == 0 else plain)
        for x, name in enumerate(row.images):
            with Image.open(folder / name) as small:
                large = small.resize((IMAGE * scale, IMAGE * scale), Image.Resampling.BICUBIC)
            canvas.paste(large, ((LABEL + x * CELL) * scale, top * scale))
    canvas.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def main() -> None:
    """Run the demo."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    pipe = holdover.load("emoji")
    spec = comparison()
    print(f"{len(PROMPTS)} emoji, {spec.steps} steps, guidance 3, one CPU thread.")
    with one_line_errors():
        run_and_report(pipe, spec, folder)
    results = Results.load(folder / "results.json")
    for row in results.rows:
        for branch, strip in row.strips.items():
            print(f"{row.label:<26}{branch:<8}{strip}")
    pipe.set_progress_bar_config(disable=True)
    check_identity(pipe)
    write_sheet(results, folder, folder / "emoji.png")
    print(f"\nThe report is {folder / 'report.html'}, the rows of images are {folder / 'emoji.png'}.")


if __name__ == "__main__":
    main()
