"""The captions the emoji model was trained on: "<what>, <style phrase>"."""

from __future__ import annotations

from ...errors import ConfigError, did_you_mean

MAX_TOKENS = 24

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
"""Short name of a drawing style -> the words that ask for it in a caption."""


def caption(subject: str, style: str | None = None) -> str:
    """The caption for a subject in a style, named short or in full: `caption("dog", "fluent3d")`."""
    subject = subject.strip()
    if not subject:
        raise ConfigError("the subject is empty; say what to draw, for example 'red apple'")
    if style is None:
        return subject
    phrase = STYLES.get(style, style)
    if phrase not in STYLES.values():
        known = [*STYLES, *STYLES.values()]
        names = ", ".join(STYLES)
        raise ConfigError(f"unknown style {style!r}; known styles: {names}.{did_you_mean(style, known)}")
    return f"{subject}, {phrase}"
