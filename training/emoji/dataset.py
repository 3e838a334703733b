"""The emoji set as training batches: everything lives on the device, nothing is read while training."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from model import PATCH
from transformers import PreTrainedTokenizerFast

from holdover.zoo.emoji import MAX_TOKENS, STYLES
from holdover.zoo.emoji.pipeline import pack

PLAIN_VARIANTS, VARIANTS = 5, 8
CHANGES: dict[str, float] = {"": 0.85, "mirrored": 0.15}
"""Lossless changes of an image, each named by its caption, with their share of a batch."""
UNKNOWN, SPECIAL = 1, 3  # numbers of [UNK] and of the last special token


def read(folder: Path) -> tuple[np.ndarray, list[dict[str, Any]]]:
    """The images (uint8 N,64,64,3) and their rows, as build_data.py wrote them."""
    images: np.ndarray = np.load(folder / "images.npz")["images"]
    with (folder / "captions.jsonl").open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    if len(rows) != len(images):
        raise SystemExit(f"{folder}: {len(images)} images but {len(rows)} captions")
    return images, rows


def tokenizer_texts(rows: list[dict[str, Any]]) -> list[str]:
    """What the tokenizer is trained on: captions and tags of the training rows."""
    train = [row for row in rows if row["split"] == "train"]
    return [row["caption"] for row in train] + [" ".join(row["tags"]) for row in train] + list(CHANGES) * 100


def caption_variants(row: dict[str, Any], chance: random.Random) -> list[str]:
    """Five times the caption itself, then: without style, with tags added, tags in place of the label."""
    phrase, label = STYLES[row["style"]], row["label"]
    tags = chance.sample(row["tags"], min(len(row["tags"]), chance.randint(1, 4)))
    added = ", ".join([label, *tags[:2], phrase])
    replaced = f"{' '.join(tags)}, {phrase}" if len(tags) > 1 else row["caption"]
    return [row["caption"]] * PLAIN_VARIANTS + [label, added, replaced]


def change(images: torch.Tensor, kinds: torch.Tensor) -> torch.Tensor:
    """Pixels (B, 3, 64, 64), each changed in the way that its caption names."""
    return torch.where((kinds == 1).view(-1, 1, 1, 1), images.flip(3), images)


def tokenise(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> torch.Tensor:
    batch = tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    ids: torch.Tensor = batch["input_ids"]
    return ids


@dataclass
class Emoji:
    """One split on the device: images, tokenized captions, the empty caption, the pixel statistics."""

    images: torch.Tensor  # uint8 N,3,64,64
    captions: torch.Tensor  # int64 N,VARIANTS,CHANGES,MAX_TOKENS
    empty: torch.Tensor  # int64 MAX_TOKENS
    mean: torch.Tensor  # 1,3,1,1
    std: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def __post_init__(self) -> None:
        self.shares = torch.tensor(list(CHANGES.values()), device=self.images.device)

    def pixels(self, index: torch.Tensor) -> torch.Tensor:
        """Images in [-1, 1]."""
        return self.images[index].float() / 127.5 - 1

    def tokens(self, pixels: torch.Tensor) -> torch.Tensor:
        """Images as normalized, packed tokens."""
        return pack((pixels - self.mean) / self.std, PATCH)

    def batch(
        self, size: int, dropout: float, unknown: float, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Random images, some of them changed, with caption variants that say so.

        `dropout` is the share of empty captions, `unknown` that of tokens replaced by [UNK].
        """
        device = self.images.device
        index = torch.randint(len(self), (size,), generator=generator, device=device)
        variant = torch.randint(VARIANTS, (size,), generator=generator, device=device)
        kinds = torch.multinomial(self.shares, size, replacement=True, generator=generator)
        captions = self.captions[index, variant, kinds]
        hidden = torch.rand(captions.shape, generator=generator, device=device) < unknown
        captions = torch.where(hidden & (captions > SPECIAL), UNKNOWN, captions)
        dropped = torch.rand(size, generator=generator, device=device) < dropout
        captions = torch.where(dropped[:, None], self.empty, captions)
        return self.tokens(change(self.pixels(index), kinds)), captions

    def rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `size` rows as they are, with plain captions, repeated from the start where there are fewer."""
        index = torch.arange(size, device=self.images.device) % len(self)
        return self.tokens(self.pixels(index)), self.captions[index, 0, 0]


def pixel_statistics(images: np.ndarray, rows: list[dict[str, Any]]) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each color over the training images, for pixels in [-1, 1]."""
    train = np.array([row["split"] == "train" for row in rows])
    pixels = images[train].astype(np.float32) / 127.5 - 1
    mean, std = pixels.mean((0, 1, 2), dtype=np.float64), pixels.std((0, 1, 2), dtype=np.float64)
    return [round(float(value), 4) for value in mean], [round(float(value), 4) for value in std]


def load_split(
    images: np.ndarray,
    rows: list[dict[str, Any]],
    split: str,
    tokenizer: PreTrainedTokenizerFast,
    device: torch.device,
) -> Emoji:
    chosen = [index for index, row in enumerate(rows) if row["split"] == split]
    chance = random.Random(split)
    variants = [
        f"{name} {text}".strip()
        for index in chosen
        for text in caption_variants(rows[index], chance)
        for name in CHANGES
    ]
    mean, std = pixel_statistics(images, rows)
    return Emoji(
        images=torch.from_numpy(images[chosen]).permute(0, 3, 1, 2).contiguous().to(device),
        captions=tokenise(tokenizer, variants).view(len(chosen), VARIANTS, len(CHANGES), MAX_TOKENS).to(device),
        empty=tokenise(tokenizer, [""])[0].to(device),
        mean=torch.tensor(mean, device=device).view(1, 3, 1, 1),
        std=torch.tensor(std, device=device).view(1, 3, 1, 1),
    )
