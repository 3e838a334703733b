"""Measure the motion model on seen and unseen captions, and make a sheet of clips without any selection.

    python training/motion/evaluate.py build/emoji --pipeline src/holdover/zoo/motion/weights --out build/motion/report

Four kinds of captions: training pairs of image and motion, held-out motions of known emoji, held-out styles of known
emoji, and emoji never seen. Writes metrics.json and sheet.png: one row a clip, generated frames left, real ones right.
"""

from __future__ import annotations

import argparse
import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import torch
from clips import Clips, chosen_rows, describe, load_split, normalize
from network import load_run

from holdover.zoo.motion import MOTIONS, EmojiMotionPipeline

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emoji"))

from dataset import read

FREE_CAPTIONS = (
    "a spinning red apple, glossy 3d style",
    "a bouncing rocket, twitter style",
    "a pulsing blue heart, google noto style",
    "a pizza sliding left, glossy 3d style",
    "wobbling robot",
    "a flipping green car, twitter style",
    "a bouncing cat with sunglasses, google noto style",
    "red apple, glossy 3d style",
)


def write_png(image: torch.Tensor, path: Path) -> None:
    """Write (3, H, W) in [0, 1] as PNG, without a library."""
    pixels = (image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()
    lines = torch.nn.functional.pad(pixels.flatten(1), (1, 0)).contiguous()  # every line starts with its filter, none

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", image.shape[2], image.shape[1], 8, 2, 0, 0, 0)
    data = zlib.compress(lines.numpy().tobytes(), 9)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b""))


def generate(pipe: EmojiMotionPipeline, captions: list[str], options: argparse.Namespace) -> torch.Tensor:
    """One clip a caption, (N, FRAMES, 3, SIZE, SIZE) in [0, 1]; clip i depends on caption i and seed i alone."""
    parts = []
    for start in range(0, len(captions), options.batch):
        part = captions[start : start + options.batch]
        seeds = [torch.Generator("cpu").manual_seed(start + index) for index in range(len(part))]
        output: Any = pipe(
            part,
            guidance_scale=options.guidance,
            num_inference_steps=options.steps,
            generator=seeds,
            output_type="pt",
        )
        parts.append(output.frames.float().cpu())
    return torch.cat(parts)


def real_clips(data: Clips, pairs: torch.Tensor, sign: int) -> torch.Tensor:
    """The clips of (image, motion) pairs, as the pipeline returns them."""
    index, motions = pairs.to(data.images.device).unbind(1)
    clips = data.clips(index, motions, torch.full_like(motions, sign)) * data.std + data.mean
    return ((clips + 1) / 2).clamp(0, 1).transpose(1, 2).cpu()


def measure(generated: torch.Tensor, data: Clips, pairs: torch.Tensor) -> dict[str, float]:
    """How close clips are to the real ones, and how often the motion (and the image) asked for is the closest one."""
    errors = torch.stack([(generated - real_clips(data, pairs, sign)).square().mean((1, 2, 3, 4)) for sign in (1, -1)])
    nearest = []
    for motion in range(len(MOTIONS)):  # the same image in every motion
        others = torch.stack([pairs[:, 0], torch.full_like(pairs[:, 1], motion)], 1)
        gaps = [(generated - real_clips(data, others, sign)).square().mean((1, 2, 3, 4)) for sign in (1, -1)]
        nearest.append(torch.stack(gaps).amin(0))
    found = torch.stack(nearest).argmin(0)
    gaps = torch.cdist(generated.mean(1).flatten(1), real_clips(data, pairs, 1).mean(1).flatten(1))
    first = (gaps.argmin(1) == torch.arange(len(gaps))).float()
    return {
        "clips": len(generated),
        "median_psnr_to_truth": round((-10 * errors.amin(0).log10()).median().item(), 2),
        "motion_as_asked": round((found == pairs[:, 1]).float().mean().item(), 3),
        "truth_nearest_of_these": round(first.mean().item(), 3),
    }


def strip(clip: torch.Tensor) -> torch.Tensor:
    """Frames side by side."""
    return clip.permute(1, 2, 0, 3).flatten(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("data", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--pipeline", type=Path, help="a pipeline folder")
    source.add_argument("--run", type=Path, help="a folder train.py wrote")
    parser.add_argument("--weights", default="best", choices=("best", "last"), help="which ones of --run")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--guidance", type=float, default=3.0)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--limit", type=int, default=128, help="clips of each kind")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    torch.set_float32_matmul_precision("high")
    pipe = (
        EmojiMotionPipeline.from_pretrained(options.pipeline, dtype=torch.float32)
        if options.pipeline
        else load_run(options.run, options.weights)
    )
    pipe.to(options.device).set_progress_bar_config(disable=True)
    images, rows = chosen_rows(*read(options.data))
    device = torch.device(options.device)
    splits = {
        name: load_split(images, rows, name, pipe.tokenizer, device) for name in ("train", "val_pair", "val_concept")
    }
    normalize(splits["train"], [splits["val_pair"], splits["val_concept"]])
    cases = {"train": ("train", False), "held-out motion": ("train", True)}
    cases |= {"held-out style": ("val_pair", False), "emoji never seen": ("val_concept", False)}
    figures: dict[str, Any] = {"guidance": options.guidance, "steps": options.steps, "weights": options.weights}
    lines = []
    for name, (split, held) in cases.items():
        data = splits[split]
        pairs = data.pairs(options.limit, held)
        chosen = [row for row in rows if row["split"] == split]
        captions = [describe(chosen[index]["caption"], MOTIONS[motion], 0) for index, motion in pairs.tolist()]
        generated = generate(pipe, captions, options)
        figures[name] = measure(generated, data, pairs)
        real = real_clips(data, pairs, 1)
        shown = min(10 if split == "train" and not held else 6, len(generated))
        lines += [torch.cat([strip(generated[i]), strip(real[i])], 2) for i in range(shown)]
        figures[name]["shown"] = captions[:shown]
        print(json.dumps({name: figures[name]}), flush=True)
    free = generate(pipe, list(FREE_CAPTIONS), options)
    lines += [torch.cat([strip(free[i]), strip(free[i + 1])], 2) for i in range(0, len(free), 2)]
    write_png(torch.cat(lines, 1), options.out / "sheet.png")
    (options.out / "metrics.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
