"""Models that ship with the package. Importing this module imports neither torch nor diffusers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, overload

from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from .emoji import EmojiPipeline
    from .motion import EmojiMotionPipeline
    from .pixels import PixelPipeline

__all__ = ["MODELS", "find", "load"]

MODELS = ("emoji", "emoji-motion")


def find(name: str) -> tuple[type[PixelPipeline], Path]:
    """The pipeline class of a model that ships with the package, and the folder of its weights."""
    if name not in MODELS:
        raise ConfigError(
            f"There is no built-in model {name!r}. Known: {', '.join(MODELS)}.{did_you_mean(name, MODELS)}"
        )
    from . import emoji, motion

    return {
        "emoji": (emoji.EmojiPipeline, emoji.WEIGHTS),
        "emoji-motion": (motion.EmojiMotionPipeline, motion.WEIGHTS),
    }[name]


@overload
def load(name: Literal["emoji"] = "emoji") -> EmojiPipeline: ...


@overload
def load(name: Literal["emoji-motion"]) -> EmojiMotionPipeline: ...


@overload
def load(name: str) -> PixelPipeline: ...


def load(name: str = "emoji") -> PixelPipeline:
    """Load a model that ships with the package, in float32 on the CPU: no network, only safetensors and JSON."""
    cls, folder = find(name)
    import torch

    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    pipeline: PixelPipeline = cls.from_pretrained(folder, **options)
    return pipeline
