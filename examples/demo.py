"""The demo: six emoji from the built-in model, uncached, under each method, and with fewer steps instead.

Prints computed and held steps, the time, and the distance to the uncached images; writes the figures, a report and the
rows of images in README. `python examples/demo.py FOLDER` writes to another folder than `demo`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont

import holdover
from holdover.cli.application import one_line_errors
from holdover.cli.generation import run_and_report
from holdover.compare import Comparison, MethodCandidate, Results, Row
from holdover.metrics import as_images, each, psnr
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
CLIP, CLIP_STEPS = "a bouncing blue heart", 20
FILMED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("uncached", "none", {}),
    ("plan", "plan", {"budget": 9}),
    ("easy_cache", "easy_cache", {"threshold": 0.05}),
    ("mag_cache", "mag_cache", {"mag_threshold": 0.12, "mag_max_skip_steps": 3, "mag_retention_ratio": 0.2}),
)
IMAGE, FRAME, LABEL, GAP = 112, 72, 252, 12


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


def write_sheet(rows: Sequence[tuple[list[str], list[Image.Image]]], path: Path, image: int, scale: int = 2) -> None:
    """Write one image: rows of images, each with lines of text on its left."""
    bold, plain = ImageFont.load_default(17 * scale), ImageFont.load_default(14 * scale)
    width, height = LABEL + len(rows[0][1]) * (image + GAP), len(rows) * (image + GAP) + GAP
    canvas = Image.new("RGB", (width * scale, height * scale), "white")
    pen = ImageDraw.Draw(canvas)
    for y, (lines, images) in enumerate(rows):
        top = GAP + y * (image + GAP)
        for line, text in enumerate(lines):
            place = (GAP * scale, (top + image // 2 - 32 + 23 * line) * scale)
            pen.text(place, text, "#111" if line == 0 else "#555", bold if line == 0 else plain)
        for x, small in enumerate(images):
            large = small.resize((image * scale, image * scale), Image.Resampling.BICUBIC)
            canvas.paste(large, ((LABEL + x * (image + GAP)) * scale, top * scale))
    canvas.quantize(256, dither=Image.Dither.NONE).save(path, optimize=True)


def film(path: Path) -> None:
    """Write a film strip of one clip of the video model: uncached, with each method, and with fewer steps instead."""
    pipe = holdover.load("emoji-motion")
    pipe.set_progress_bar_config(disable=True)
    rows: list[tuple[list[str], list[Image.Image]]] = []
    clips: list[torch.Tensor] = []
    usual, fewest = 0.0, CLIP_STEPS
    for label, method, settings in (*FILMED, ("fewer steps instead", "none", {})):
        steps = fewest if label == "fewer steps instead" else CLIP_STEPS
        with holdover.enable(pipe, method, **settings) as cache:
            begin = time.process_time()
            frames = pipe(CLIP, num_inference_steps=steps, generator=torch.Generator().manual_seed(0)).frames
            seconds = time.process_time() - begin
            computed = cache.stats().generations[-1].computed["cond"]
        clips.append(as_images(frames))
        usual, fewest = usual or seconds, min(fewest, computed)
        lines = [label, f"{computed} of {CLIP_STEPS} steps, {seconds:.1f} s, {usual / seconds:.1f}x"]
        lines += [CLIP if len(clips) == 1 else f"PSNR {each(psnr, clips[-1], clips[0]).item():.1f} dB"]
        print("  ".join(lines))
        stills = (clips[-1][0].movedim(1, -1) * 255).round().byte().numpy()
        rows.append((lines, [Image.fromarray(still) for still in stills]))
    write_sheet(rows, path, FRAME)


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
    images = {row.label: [Image.open(folder / name) for name in row.images] for row in select_rows(results)}
    write_sheet(
        [(describe(row, results), images[row.label]) for row in select_rows(results)], folder / "emoji.png", IMAGE
    )
    film(folder / "motion.png")
    print(f"\nThe report is {folder / 'report.html'}; rows of images are in emoji.png and motion.png next to it.")


if __name__ == "__main__":
    main()
