"""What to generate while measuring."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

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
    texts = [p if isinstance(p, str) else json.dumps({k: str(v)[:200] for k, v in p.items()}) for p in prompts]
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


def _lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()]
