"""Models that ship with the package. Importing this module imports neither torch nor diffusers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from .emoji import EmojiPipeline

__all__ = ["MODELS", "load"]

MODELS = ("emoji",)


def load(name: str = "emoji") -> EmojiPipeline:
    """Load a model that ships with the package, in float32 on the CPU: no network, only safetensors and JSON."""
    if name not in MODELS:
        raise ConfigError(
            f"There is no built-in model {name!r}. Known: {', '.join(MODELS)}.{did_you_mean(name, MODELS)}"
        )
    import torch

    from .emoji import WEIGHTS, EmojiPipeline

    options = {"dtype": torch.float32, "local_files_only": True, "use_safetensors": True}
    pipeline: EmojiPipeline = EmojiPipeline.from_pretrained(WEIGHTS, **options)
    return pipeline
