"""Models that ship with the package. Importing this module imports neither torch nor diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from .emoji import EmojiPipeline

__all__ = ["MODELS", "load"]

MODELS = ("emoji",)


def load(name: str = "emoji") -> EmojiPipeline:
    """Load the pipeline of a model that ships with the package, in float32 on the CPU."""
    if name not in MODELS:
        raise ConfigError(f"no model {name!r} in the box; there is: {', '.join(MODELS)}.{did_you_mean(name, MODELS)}")
    from . import emoji

    return emoji.load()
