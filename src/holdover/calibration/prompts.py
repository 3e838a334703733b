"""What to generate while measuring."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..errors import ConfigError

Prompt = str | Mapping[str, Any]
GENERATIONS = 4  # of the built-in list, unless more are asked for


def built_in(pipe: Any) -> list[str]:
    """The pipeline's own list of prompts, where it brings one (the model in the box does), or one for any model."""
    own: Any = getattr(type(pipe), "calibration_prompts", None)
    if own is not None:
        return list(own())
    return _lines(resources.files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8"))


def from_file(path: str | Path) -> list[str]:
    """One prompt a line."""
    try:
        prompts = _lines(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"No prompts could be read from {path}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ConfigError(f"No prompts could be read from {path}: it is not text.") from None
    if not prompts:
        raise ConfigError(f"There are no prompts in {path}: write one a line.")
    return prompts


def hash_of(prompts: Sequence[Prompt]) -> str:
    """Tells lists of prompts apart."""
    hashed = hashlib.sha256()
    for prompt in prompts:
        parts = [prompt] if isinstance(prompt, str) else [part for pair in sorted(prompt.items()) for part in pair]
        for part in ("", *parts):
            content = _bytes(part)
            hashed.update(len(content).to_bytes(8, "big") + content)
    return hashed.hexdigest()[:16]


def _bytes(part: Any) -> bytes:
    """The content of a text, a tensor or a picture; of anything else, how it is written."""
    if isinstance(part, str):
        return part.encode()
    if isinstance(part, torch.Tensor):
        values = part.detach().cpu().contiguous()
        return str((part.dtype, tuple(part.shape))).encode() + values.flatten().view(torch.uint8).numpy().tobytes()
    if isinstance(part, Image.Image):
        return part.tobytes()
    return repr(part).encode()


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
