"""What is compared: a method with its settings, fewer steps, or anything that can be put around a pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from ..base import CacheBackend
from ..config import Config
from ..errors import ConfigError
from ..selector import own_config

Strips = Mapping[str, str]
Yielded = CacheBackend | Callable[[], Strips] | None


@dataclass(frozen=True)
class Method:
    """A caching method by name, with the settings that are not its defaults.

    `title` stands for it in tables; candidates of one `series` are joined in plots, by the method's name without it.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    title: str = ""
    series: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(dict(self.settings).items()))
        self.config()

    def config(self) -> Config:
        """The method's own config; unknown names and impossible values are errors."""
        return own_config(self.name, dict(self.settings))

    @property
    def label(self) -> str:
        """How it is called in tables: `mag_cache 0.06 / 3`."""
        return self.title or f"{self.name} {' / '.join(map(_shown, self._plain().items()))}".strip()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        own = {"kind": "method", "label": self.label, "name": self.name, "settings": self._plain()}
        return own | _named(self.series)

    def _plain(self) -> dict[str, Any]:
        """The given settings as JSON would give them back, so that what is read equals what was written."""
        values = self.config().as_dict()
        plain: dict[str, Any] = json.loads(json.dumps({key: values[key] for key, _ in self.settings}))
        return plain


@dataclass(frozen=True)
class FewerSteps:
    """No cache, only fewer steps: with the pipeline's scheduler, or with a solver of second order."""

    steps: int
    second_order: bool = False

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"Fewer steps are at least 1, not {self.steps}.")

    @property
    def label(self) -> str:
        """How it is called in tables."""
        return f"{self.steps} steps, second order" if self.second_order else f"{self.steps} steps"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        kind = "second_order" if self.second_order else "fewer_steps"
        return {"kind": kind, "label": self.label, "steps": self.steps}


@dataclass(frozen=True)
class Custom:
    """Anything else: `around(pipe)` is a context manager, and the pictures are drawn inside it.

    What it yields says which steps were computed: a holdover cache, or a function that returns a strip for each branch
    (`{"cond": "ChhC"}`) of the newest generation, or None where nobody knows. The label stands for it in result files.
    """

    label: str
    around: Callable[[Any], AbstractContextManager[Yielded]] = field(compare=False)
    series: str = ""

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ConfigError("A custom candidate needs a label.")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {"kind": "custom", "label": self.label} | _named(self.series)


Candidate = Method | FewerSteps | Custom


def parse_method(text: str) -> Method:
    """`tea_cache:rel_l1_thresh=0.15` as a method; several settings are separated by commas."""
    name, _, rest = text.partition(":")
    return Method(name.strip(), tuple(parse_settings(_entries(rest)).items()))


def parse_settings(entries: list[str]) -> dict[str, Any]:
    """`["key=value", ...]` as settings; a value is read as JSON where it is JSON, else as a word."""
    settings: dict[str, Any] = {}
    for entry in entries:
        key, equals, value = entry.partition("=")
        key = key.strip()
        if not equals or not key:
            raise ConfigError(f"A setting is written key=value, not {entry!r}.")
        if key in settings:
            raise ConfigError(f"The setting {key!r} is given twice.")
        settings[key] = _value(value.strip())
    return settings


def _named(series: str) -> dict[str, Any]:
    return {"series": series} if series else {}


def _entries(text: str) -> list[str]:
    """Split at the commas that are not inside brackets: `a=1,b=[1,2]`."""
    entries, depth = [""], 0
    for character in text:
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    return [entry for entry in entries if entry.strip()]


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def _shown(entry: tuple[str, Any]) -> str:
    """A setting in a label: its value, a switch's name, how many values a list has."""
    key, value = entry
    if isinstance(value, bool):
        return key if value else f"no {key}"
    if isinstance(value, (list, dict)):
        return f"{key} of {len(value)}"
    return f"{value:g}" if isinstance(value, float) else str(value)
