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
    return [row["caption"] for row in train] + [" ".join(row["tags"]) for row in train]


def caption_variants(row: dict[str, Any], chance: random.Random) -> list[str]:
    """Five times the caption itself, then: without style, with tags added, tags in place of the label."""
    phrase, label = STYLES[row["style"]], row["label"]
    tags = chance.sample(row["tags"], min(len(row["tags"]), chance.randint(1, 4)))
    added = ", ".join([label, *tags[:2], phrase])
    replaced = f"{' '.join(tags)}, {phrase}" if len(tags) > 1 else row["caption"]
    return [row["caption"]] * PLAIN_VARIANTS + [label, added, replaced]


def tokenise(tokenizer: PreTrainedTokenizerFast, captions: list[str]) -> torch.Tensor:
    batch = tokenizer(captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt")
    ids: torch.Tensor = batch["input_ids"]
    return ids


@dataclass
class Emoji:
    """One split on the device: images, tokenized caption variants, the empty caption, the pixel statistics."""

    images: torch.Tensor  # uint8 N,3,64,64
    captions: torch.Tensor  # int64 N,VARIANTS,MAX_TOKENS
    empty: torch.Tensor  # int64 MAX_TOKENS
    mean: torch.Tensor  # 1,3,1,1
    std: torch.Tensor

    def __len__(self) -> int:
        return len(self.images)

    def tokens(self, index: torch.Tensor) -> torch.Tensor:
        """Images as normalized, packed tokens."""
        pixels = self.images[index].float() / 127.5 - 1
        return pack((pixels - self.mean) / self.std, PATCH)

    def batch(self, size: int, dropout: float, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        """Random images with random caption variants, some captions dropped."""
        device = self.images.device
        index = torch.randint(len(self), (size,), generator=generator, device=device)
        variant = torch.randint(VARIANTS, (size,), generator=generator, device=device)
        dropped = torch.rand(size, generator=generator, device=device) < dropout
        captions = torch.where(dropped[:, None], self.empty, self.captions[index, variant])
        return self.tokens(index), captions

    def rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The first `size` rows with their plain captions, repeated from the start where there are fewer."""
        index = torch.arange(size, device=self.images.device) % len(self)
        return self.tokens(index), self.captions[index, 0]


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
    variants = [text for index in chosen for text in caption_variants(rows[index], chance)]
    mean, std = pixel_statistics(images, rows)
    return Emoji(
        images=torch.from_numpy(images[chosen]).permute(0, 3, 1, 2).contiguous().to(device),
        captions=tokenise(tokenizer, variants).view(len(chosen), VARIANTS, MAX_TOKENS).to(device),
        empty=tokenise(tokenizer, [""])[0].to(device),
        mean=torch.tensor(mean, device=device).view(1, 3, 1, 1),
        std=torch.tensor(std, device=device).view(1, 3, 1, 1),
    )
