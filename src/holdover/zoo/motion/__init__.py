"""A small text-to-video model of moving emoji whose weights ship with the package (card: training/motion)."""

from __future__ import annotations

from pathlib import Path

from ..emoji import STYLES as EMOJI_STYLES
from .pipeline import EmojiMotionPipeline

__all__ = ["FRAMES", "MAX_TOKENS", "MOTIONS", "SIZE", "STYLES", "WEIGHTS", "EmojiMotionPipeline"]

WEIGHTS = Path(__file__).parent / "weights"
FRAMES, SIZE = 9, 48
MAX_TOKENS = 24  # tokens of a caption that the text encoder reads

MOTIONS = ("still", "spinning", "bouncing", "pulsing", "sliding left", "sliding right", "wobbling", "flipping")
STYLES = {name: EMOJI_STYLES[name] for name in ("noto", "twemoji", "fluent3d")}
"""Short name of a style -> the phrase for it in captions."""
