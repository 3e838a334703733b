"""Moving emoji: clips of 9 frames of 48x48, rendered on the device from still images, with captions for the motion.

Every motion is an affine path of the image over the frames. What the caption does not say (which way a spinning emoji
turns) is random.
"""

from __future__ import annotations

import math
import random
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import affine_grid, avg_pool2d, grid_sample
from transformers import PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emoji"))

from dataset import caption_variants, tokenise

from holdover.zoo.motion import FRAMES, MOTIONS, SIZE, STYLES

SCALE = 0.72  # of an emoji in its frame, so that it has room to move
HELD_OUT = 20  # one in so many (emoji, motion) pairs is not trained on
VARIANTS = 8


def paths(motions: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """(B, FRAMES, 5) for each clip: angle, horizontal and vertical scale, horizontal and vertical offset.

    Offsets are in half frames, to the right and down. `signs` (1 or -1) choose the direction where it is free.
    """
    frame = torch.arange(FRAMES, device=motions.device) / FRAMES
    zero, one, wave = torch.zeros_like(frame), torch.ones_like(frame), torch.sin(2 * math.pi * frame)
    squash = (1 - 6 * torch.minimum(frame, 1 - frame)).clamp(min=0)
    height = 0.62 * 4 * frame * (1 - frame)
    ramp = 0.6 * torch.linspace(-1, 1, FRAMES, device=motions.device)
    table = {
        "still": (zero, one, one, zero, zero),
        "spinning": (2 * math.pi * frame, one, one, zero, zero),
        "bouncing": (zero, 1 + 0.12 * squash, 1 - 0.2 * squash, zero, 0.28 + 0.2 * SCALE * squash - height),
        "pulsing": (zero, 1 + 0.32 * wave, 1 + 0.32 * wave, zero, zero),
        "sliding left": (zero, one, one, -ramp, zero),
        "sliding right": (zero, one, one, ramp, zero),
        "wobbling": (0.5 * wave, one, one, zero, zero),
        "flipping": (zero, torch.cos(2 * math.pi * frame), one, zero, zero),
    }
    path = torch.stack([torch.stack(table[name], -1) for name in MOTIONS])[motions]
    path[..., 0] *= signs[:, None]
    return path


def render(images: torch.Tensor, path: torch.Tensor) -> torch.Tensor:
    """Images (B, 3, 64, 64) in [-1, 1] on white along their paths: clips (B, 3, FRAMES, SIZE, SIZE)."""
    angle, across, down, right, low = path.flatten(0, 1).unbind(-1)
    across, down = (scale.sign() * scale.abs().clamp(min=0.05) * SCALE for scale in (across, down))
    cos, sin = angle.cos(), angle.sin()
    top = torch.stack([cos / across, sin / across, -(cos * right + sin * low) / across], -1)
    bottom = torch.stack([-sin / down, cos / down, (sin * right - cos * low) / down], -1)
    inverse = torch.stack([top, bottom], 1)  # from a place in the frame to one in the image
    ink = (1 - images).repeat_interleave(path.shape[1], 0)  # white is 0, which is what lies outside
    grid = affine_grid(inverse, [len(ink), 3, 2 * SIZE, 2 * SIZE], align_corners=False)
    frames = 1 - avg_pool2d(grid_sample(ink, grid, padding_mode="zeros", align_corners=False), 2)
    return frames.unflatten(0, path.shape[:2]).transpose(1, 2)


def is_held_out(row: dict[str, Any], motion: str) -> bool:
    """Whether this emoji is never trained with this motion, in no style; "still" is always trained."""
    return motion != MOTIONS[0] and zlib.crc32(f"{row['base']}|{motion}".encode()) % HELD_OUT == 0


def describe(text: str, motion: str, variant: int) -> str:
    """The caption of a clip: with an article in every other variant; a still clip may be described as an image is."""
    if motion == MOTIONS[0] and variant % 4 == 3:
        return text
    return f"a {motion} {text}" if variant % 2 else f"{motion} {text}"


def tokenizer_texts(rows: list[dict[str, Any]]) -> list[str]:
    train = [row for row in rows if row["split"] == "train"]
    captions = [describe(row["caption"], motion, 1) for row in train for motion in MOTIONS]
    return captions + [" ".join(row["tags"]) for row in train] * 4


@dataclass
class Clips:
    """Images of one split on the device, what may move how, and tokenized captions for every motion."""

    images: torch.Tensor  # uint8 N,3,64,64
    captions: torch.Tensor  # int64 N,MOTIONS,VARIANTS,tokens
    held: torch.Tensor  # bool N,MOTIONS: not trained on
    empty: torch.Tensor  # int64 tokens
    mean: torch.Tensor  # 1,3,1,1,1
    std: torch.Tensor

    def clips(self, index: torch.Tensor, motions: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
        """Normalized clips, float32."""
        images = self.images[index].float() / 127.5 - 1
        return (render(images, paths(motions, signs)) - self.mean) / self.std

    def batch(self, size: int, dropout: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random emoji in random motion with random caption variants, some captions dropped."""
        device = self.images.device

        def below(limit: int) -> torch.Tensor:
            return torch.randint(limit, (size,), generator=generator, device=device)

        index, motions, variants, signs = (
            below(len(self.images)),
            below(len(MOTIONS)),
            below(VARIANTS),
            below(2) * 2 - 1,
        )
        motions = torch.where(self.held[index, motions], 0, motions)
        dropped = torch.rand(size, generator=generator, device=device) < dropout
        captions = torch.where(dropped[:, None], self.empty, self.captions[index, motions, variants])
        return self.clips(index, motions, signs), captions

    def pairs(self, size: int, held: bool = False) -> torch.Tensor:
        """`size` pairs of image and motion, from a fixed shuffle; `held`: of those that are not trained on."""
        pairs = (self.held == held).nonzero().cpu()
        order = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(0))
        return pairs[order[torch.arange(size) % len(order)]]

    def rows(self, size: int, held: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """Clips of `pairs` with their plain captions."""
        index, motions = self.pairs(size, held).to(self.images.device).unbind(1)
        signs = torch.where(torch.arange(size, device=index.device) % 2 == 0, 1, -1)
        return self.clips(index, motions, signs), self.captions[index, motions, 0]


def chosen_rows(images: np.ndarray, rows: list[dict[str, Any]]) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The images of the styles that the model knows, with their rows."""
    chosen = [index for index, row in enumerate(rows) if row["style"] in STYLES]
    return images[chosen], [rows[index] for index in chosen]


def load_split(
    images: np.ndarray,
    rows: list[dict[str, Any]],
    split: str,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Clips:
    chosen = [index for index, row in enumerate(rows) if row["split"] == split]
    chance = random.Random(split)
    texts = [
        describe(text, motion, variant)
        for index in chosen
        for variants in (caption_variants(rows[index], chance),)
        for motion in MOTIONS
        for variant, text in enumerate(variants)
    ]
    held = torch.tensor([[is_held_out(rows[index], motion) for motion in MOTIONS] for index in chosen])
    return Clips(
        images=torch.from_numpy(images[chosen]).permute(0, 3, 1, 2).contiguous().to(device),
        captions=tokenise(tokenizer, texts).view(len(chosen), len(MOTIONS), VARIANTS, -1).to(device),
        held=held.to(device),
        empty=tokenise(tokenizer, [""])[0].to(device),
        mean=torch.zeros(1, 3, 1, 1, 1, device=device),
        std=torch.ones(1, 3, 1, 1, 1, device=device),
    )


def normalize(train: Clips, others: list[Clips]) -> tuple[list[float], list[float]]:
    """Give all splits the mean and standard deviation of each color over 512 training clips."""
    pixels = train.rows(512)[0].cpu()
    mean, std = (
        [round(value, 4) for value in part.tolist()] for part in (pixels.mean((0, 2, 3, 4)), pixels.std((0, 2, 3, 4)))
    )
    for clips in (train, *others):
        clips.mean, clips.std = (
            torch.tensor(part, device=clips.mean.device).view(1, 3, 1, 1, 1) for part in (mean, std)
        )
    return mean, std
