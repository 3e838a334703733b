"""Measure the emoji model on seen and unseen captions, and make sheets of images without any selection.

    python training/emoji/evaluate.py build/emoji --pipeline src/holdover/zoo/emoji/weights --out build/emoji/report

Three kinds of captions: training rows, held-out concept/style pairs (the concept was seen in other styles, the style
with other concepts) and concepts never seen. One image for each, seed 0. Writes metrics.json, sheet.png (fixed
captions, no choice) and nearest.png (generated, real, nearest training image side by side). `early_step` is the PSNR
that is left when the second of 50 steps repeats the output of the first; `loss` is that of train.py at its times.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dataset import load_split, read
from diffusers import FlowMatchEulerDiscreteScheduler
from export import load_run
from model import Velocity, keep_times_exact
from PIL import Image, ImageDraw
from train import split_losses

import holdover
from holdover.metrics import psnr
from holdover.zoo.emoji.pipeline import EmojiPipeline

SPLITS = ("train", "val_pair", "val_concept")
NEAR_COPY = 0.05  # root mean square over pixels in [0, 1] under which two images look the same
FREE_CAPTIONS = (
    "red apple, glossy 3d style",
    "blue apple, glossy 3d style",
    "cat with sunglasses, google noto style",
    "purple elephant, twitter style",
    "green heart, firefox style",
    "robot with a heart, microsoft flat style",
    "angry moon, old google blob style",
    "cactus with a party hat, glossy 3d style",
    "yellow car, emojione style",
    "pizza with cheese, microsoft gradient style",
    "smiling sun",
    "snowy mountain, google noto style",
    "pink guitar, glossy 3d style",
    "two birds, twitter style",
    "burning book, microsoft gradient style",
    "ghost holding a balloon, glossy 3d style",
)


@dataclass(frozen=True)
class Case:
    """One group of captions with the real images that belong to them."""

    name: str
    rows: list[dict[str, Any]]
    real: torch.Tensor  # float N,3,64,64 in [0, 1]


def generate(
    pipeline: EmojiPipeline, captions: list[str], guidance: float, steps: int, batch: int = 256
) -> torch.Tensor:
    """One image a caption; image i depends on caption i and seed i alone."""
    parts = []
    for start in range(0, len(captions), batch):
        part = captions[start : start + batch]
        seeds = [torch.Generator("cpu").manual_seed(start + index) for index in range(len(part))]
        output: Any = pipeline(
            part, guidance_scale=guidance, num_inference_steps=steps, generator=seeds, output_type="pt"
        )
        parts.append(output.images.float())
    return torch.cat(parts)


def distances(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Root mean square difference of every image in `one` to every image in `other`."""
    left, right = one.flatten(1), other.flatten(1)
    squares = left.square().sum(1)[:, None] + right.square().sum(1)[None] - 2 * left @ right.T
    return (squares.clamp(min=0) / left.shape[1]).sqrt()


def shrink(images: torch.Tensor) -> torch.Tensor:
    """16x16 versions: what two images of one thing share, without the exact outline."""
    return torch.nn.functional.avg_pool2d(images, 4)


def true_ranks(generated: torch.Tensor, case: Case, images: torch.Tensor, styles: np.ndarray) -> torch.Tensor:
    """For each generated image, the rank (from 1) of the true image among the real ones of its style."""
    ranks = torch.zeros(len(generated))
    requested = np.array([row["style"] for row in case.rows])
    for style in set(requested):
        mine = torch.from_numpy(np.flatnonzero(requested == style)).to(generated.device)
        pool = torch.from_numpy(np.flatnonzero(styles == style)).to(generated.device)
        true = torch.tensor([case.rows[index]["i"] for index in mine.tolist()], device=generated.device)
        gaps = distances(shrink(generated[mine]), shrink(images[pool]))
        at_true = gaps[pool[None] == true[:, None]]
        ranks[mine.cpu()] = (gaps <= at_true[:, None]).sum(1).float().cpu()
    return ranks


def rank_figures(ranks: torch.Tensor) -> dict[str, float]:
    return {
        "top1": round((ranks <= 1).float().mean().item(), 3),
        "top5": round((ranks <= 5).float().mean().item(), 3),
        "median_rank": ranks.median().item(),
    }


def copies_from_other_styles(case: Case, images: torch.Tensor, rows: list[dict[str, Any]]) -> torch.Tensor:
    """The baseline for held-out pairs: a training image of the same concept in another style, at random."""
    chance = random.Random(0)
    known: dict[str, list[int]] = {}
    for row in rows:
        if row["split"] == "train":
            known.setdefault(row["base"], []).append(row["i"])
    chosen = [chance.choice(known.get(row["base"]) or [chance.randrange(len(rows))]) for row in case.rows]
    return images[torch.tensor(chosen, device=images.device)]


def measure(generated: torch.Tensor, case: Case, images: torch.Tensor, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """All figures for one group of captions; the `real` ones are the same figures for the real images."""
    styles = np.array([row["style"] for row in rows])
    train = torch.tensor([row["i"] for row in rows if row["split"] == "train"], device=generated.device)
    train_styles = styles[train.cpu().numpy()]
    requested = np.array([row["style"] for row in case.rows])
    figures: dict[str, Any] = {"pictures": len(generated)}
    figures["rms_to_truth"] = round((generated - case.real).square().mean((1, 2, 3)).sqrt().mean().item(), 4)
    figures["truth_among_style"] = rank_figures(true_ranks(generated, case, images, styles))
    if case.name == "val_pair":
        copied = copies_from_other_styles(case, images, rows)
        figures["truth_among_style_by_copying"] = rank_figures(true_ranks(copied, case, images, styles))
    for name, shown in (("drawn", generated), ("real", case.real)):
        if name == "real" and case.name == "train":
            continue
        nearest = distances(shown, images[train]).min(1)
        alike = train_styles[distances(shrink(shown), shrink(images[train])).argmin(1).cpu().numpy()] == requested
        figures[f"nearest_training_picture_of_{name}"] = {
            "median_rms": round(nearest.values.median().item(), 4),
            "near_copies": round((nearest.values < NEAR_COPY).float().mean().item(), 3),
            "same_style": round(float(alike.mean()), 3),
        }
    return figures


def hold_early_step(pipeline: EmojiPipeline, captions: list[str], guidance: float) -> dict[str, float]:
    """PSNR of images whose second step is held, to those with all 50 steps computed."""
    uncached = generate(pipeline, captions, guidance, 50)
    with holdover.enable(pipeline, "plan", schedule=[0, *range(2, 50)], predictor="hold"):
        values = psnr(generate(pipeline, captions, guidance, 50), uncached)
    figures = {"mean": values.mean(), "p10": values.quantile(0.1), "lowest": values.min()}
    return {name: round(value.item(), 1) for name, value in figures.items()}


def measure_losses(pipeline: EmojiPipeline, images: np.ndarray, rows: list[dict[str, Any]]) -> dict[str, list[float]]:
    """The training loss on the first 512 rows of each split; changes the pipeline, so it comes last."""
    device = pipeline.device
    splits = {name: load_split(images, rows, name, pipeline.tokenizer, device) for name in SPLITS}
    velocity = Velocity(pipeline.text_encoder, pipeline.transformer).to(device).eval()
    keep_times_exact(velocity.transformer, torch.bfloat16)
    with torch.no_grad():
        return {name: split_losses(velocity, data, 512) for name, data in splits.items()}


# -- sheets ------------------------------------------------------------------------------------------


def tile(image: torch.Tensor, scale: int = 2) -> Image.Image:
    array = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu().numpy()
    small = Image.fromarray(array)
    return small.resize((small.width * scale, small.height * scale), Image.Resampling.BICUBIC)


def two_lines(caption: str, width: int = 22) -> str:
    subject, _, style = caption.rpartition(", ")
    return f"{subject[:width]}\n{style[:width]}" if subject else caption[:width]


def sheet(cells: list[tuple[str, list[torch.Tensor]]], columns: int, path: Path) -> None:
    """A grid of captioned cells, each with one or more images side by side."""
    images = len(cells[0][1])
    wide, high = 128 * images + 8, 128 + 30
    page = Image.new("RGB", (columns * wide + 8, -(-len(cells) // columns) * high + 8), "white")
    ink = ImageDraw.Draw(page)
    for index, (caption, shown) in enumerate(cells):
        left, top = 8 + index % columns * wide, 8 + index // columns * high
        for number, image in enumerate(shown):
            page.paste(tile(image), (left + 128 * number, top))
        ink.text((left, top + 128), two_lines(caption, 20 * images), fill="black")
    page.save(path)


def sheets(generated: dict[str, torch.Tensor], cases: list[Case], images: torch.Tensor, options: Any) -> None:
    """sheet.png: the first 16 captions of each group, then the free ones. nearest.png: 24 held-out pairs."""
    cells = [
        (row["caption"], [image])
        for case in cases
        for row, image in list(zip(case.rows, generated[case.name], strict=True))[:16]
    ]
    cells += [(text, [image]) for text, image in zip(FREE_CAPTIONS, generated["free"], strict=True)]
    sheet(cells, 8, options.out / "sheet.png")
    pairs = next(case for case in cases if case.name == "val_pair")
    train = images[options.train_index]
    nearest = train[distances(generated["val_pair"][:24], train).argmin(1)]
    triples = zip(pairs.rows, generated["val_pair"], pairs.real, nearest, strict=False)
    sheet(
        [(row["caption"], [one, two, three]) for row, one, two, three in triples],
        4,
        options.out / "nearest.png",
    )


# -- the whole ---------------------------------------------------------------------------------------


def choose_cases(rows: list[dict[str, Any]], images: torch.Tensor, limit: int) -> list[Case]:
    """Up to `limit` rows of every split, shuffled once with a fixed seed."""
    cases = []
    for name in SPLITS:
        chosen = [row for row in rows if row["split"] == name]
        random.Random(0).shuffle(chosen)
        chosen = chosen[:limit]
        cases.append(Case(name, chosen, images[[row["i"] for row in chosen]]))
    return cases


def settings(options: argparse.Namespace) -> Iterator[tuple[float, float]]:
    for shift in options.shift:
        for guidance in options.guidance:
            yield guidance, shift


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pipeline", type=Path, help="a pipeline folder")
    source.add_argument("--run", type=Path, help="a folder train.py wrote")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--guidance", type=float, nargs="+", default=[3.0], help="the first one makes the sheets")
    parser.add_argument("--shift", type=float, nargs="+", default=[1.0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=int, default=512, help="captions of each kind")
    parser.add_argument("--held", type=int, default=64, help="captions of each kind for `early_step`")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args()


def main() -> None:
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    images, rows = read(options.data)
    for index, row in enumerate(rows):
        row["i"] = index
    pipeline = EmojiPipeline.from_pretrained(options.pipeline) if options.pipeline else load_run(options.run)
    pipeline.to(options.device, torch.float32).set_progress_bar_config(disable=True)
    pixels = torch.from_numpy(images).permute(0, 3, 1, 2).to(options.device).float() / 255
    options.train_index = torch.tensor([row["i"] for row in rows if row["split"] == "train"], device=options.device)
    cases = choose_cases(rows, pixels, options.limit)
    results = []
    for number, (guidance, shift) in enumerate(settings(options)):
        pipeline.scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        generated = {
            case.name: generate(pipeline, [row["caption"] for row in case.rows], guidance, options.steps)
            for case in cases
        }
        if number == 0:
            generated["free"] = generate(pipeline, list(FREE_CAPTIONS), guidance, options.steps)
            sheets(generated, cases, pixels, options)
        entry: dict[str, Any] = {"guidance": guidance, "shift": shift, "steps": options.steps}
        entry |= {case.name: measure(generated[case.name], case, pixels, rows) for case in cases}
        if number == 0:
            for case in cases:
                captions = [row["caption"] for row in case.rows[: options.held]]
                entry[case.name]["early_step"] = hold_early_step(pipeline, captions, guidance)
        print(json.dumps(entry), flush=True)
        results.append(entry)
    for name, losses in measure_losses(pipeline, images, rows).items():
        results[0][name]["loss"] = losses
    (options.out / "metrics.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
