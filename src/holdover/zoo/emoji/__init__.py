"""A small text-to-emoji model whose weights ship with the package (recipe and model card: training/emoji)."""

from __future__ import annotations

from pathlib import Path

from ...errors import ConfigError, did_you_mean
from .pipeline import EmojiPipeline

__all__ = ["MAX_TOKENS", "STYLES", "WEIGHTS", "EmojiPipeline", "caption"]

WEIGHTS = Path(__file__).parent / "weights"
MAX_TOKENS = 24  # tokens of a caption that the text encoder reads

STYLES: dict[str, str] = {
    "noto": "google noto style",
    "twemoji": "twitter style",
    "fluent3d": "glossy 3d style",
    "fluentflat": "microsoft flat style",
    "fluentmodern": "microsoft gradient style",
    "notov1": "old google blob style",
    "emojione": "emojione style",
    "fxemoji": "firefox style",
}
"""Short name of a style -> the phrase for it in captions."""


def caption(subject: str, style: str | None = None) -> str:
    """The training caption "subject, style phrase"; the style is a short name or a phrase: `caption("dog", "noto")`."""
    subject = subject.strip()
    if not subject:
        raise ConfigError("the subject is empty; say what to generate, for example 'red apple'")
    if style is None:
        return subject
    phrase = STYLES.get(style, style)
    if phrase not in STYLES.values():
        hint = did_you_mean(style, [*STYLES, *STYLES.values()])
        raise ConfigError(f"unknown style {style!r}; known styles: {', '.join(STYLES)}.{hint}")
    return f"{subject}, {phrase}"
