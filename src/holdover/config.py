"""Typed, frozen settings: declared once, checked always, JSON and back.

A config is a frozen dataclass whose fields are declared with `setting`. It knows nothing of torch, models or methods.
"""

from __future__ import annotations

import dataclasses
import json
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self

from .errors import ConfigError, did_you_mean


def setting(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] | None = None,
    doc: str = "",
) -> Any:
    """A config field with its default, the values it may take and one line on what it does."""
    allowed = {"ge": ge, "gt": gt, "le": le, "choices": choices}
    return dataclasses.field(default=default, metadata={"allowed": allowed, "doc": doc})


def allowed_values(field: dataclasses.Field[Any]) -> str:
    """The values a field may take, in words: `at least 0 and at most 1`."""
    allowed = field.metadata.get("allowed", {})
    if allowed.get("choices"):
        return "one of " + ", ".join(repr(c) for c in allowed["choices"])
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    bounds = [f"{text} {allowed[key]:g}" for key, text in words.items() if allowed.get(key) is not None]
    return " and ".join(bounds)


@dataclasses.dataclass(frozen=True)
class Config:
    """Base of every config: values are checked on construction, whoever constructs it."""

    method: ClassVar[str] = ""  # name in `holdover.enable`
    color: ClassVar[str] = "grey"  # color of its series in reports: a name in the page's style sheet
    vllm_omni: ClassVar[str] = ""  # name of its cache backend in vLLM-Omni; empty where it is not offered

    @property
    def batchable(self) -> bool:
        """Whether every decision depends on the step alone, so that requests may share a generation."""
        return False

    def __post_init__(self) -> None:
        hints = typing.get_type_hints(type(self))
        for field in dataclasses.fields(self):
            value = _coerced(getattr(self, field.name), hints[field.name], field, type(self).__name__)
            object.__setattr__(self, field.name, value)

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def settings(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The declared settings, with default, allowed values and documentation."""
        return dataclasses.fields(cls)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown key is an error that names the nearest valid one."""
        cls.check_keys(values)
        return cls(**values)

    @classmethod
    def check_keys(cls, keys: Iterable[str]) -> None:
        """Raise for the first key that is not a setting."""
        for key in keys:
            if key not in cls.field_names():
                raise unknown_key(key, cls)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from a JSON object; malformed text is an error, never the defaults."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f'This is not JSON: {error}. Write an object like {{"rel_l1_thresh": 0.2}}.') from None
        if not isinstance(values, dict):
            raise ConfigError(f"Settings must be a JSON object, not {type(values).__name__}.")
        return cls.from_dict(values)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values; what has a name of its own, a profile, is given by its name."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def replaced(self, **changes: Any) -> Self:
        """A copy with some settings changed; unknown names are errors."""
        self.check_keys(changes)
        return dataclasses.replace(self, **changes)


def unknown_key(key: str, cls: type[Config], others: Iterable[type[Config]] = ()) -> ConfigError:
    """The error for a key `cls` does not have: where it belongs, or what was probably meant."""
    owner = next((other for other in others if other.method and key in other.field_names()), None)
    if owner is not None:
        return ConfigError(f"{key!r} is a setting of {owner.method!r}, not of {cls.method or cls.__name__!r}.")
    hint = did_you_mean(key, cls.field_names()) or f" Known settings: {', '.join(cls.field_names())}."
    return ConfigError(f"{cls.__name__} has no setting {key!r}.{hint}")


def _coerced(value: Any, hint: Any, field: dataclasses.Field[Any], owner: str) -> Any:
    """`value` in the field's type (lists become tuples, ints become floats), or a ConfigError."""
    try:
        value = _as_type(value, hint)
    except TypeError:
        wanted = str(hint).replace("typing.", "") if typing.get_origin(hint) else hint.__name__
        raise ConfigError(f"{owner}.{field.name} must be {wanted}, not {value!r} ({type(value).__name__}).") from None
    if not _within(value, field.metadata.get("allowed", {})):
        wanted = allowed_values(field) or "a finite number"
        raise ConfigError(f"{owner}.{field.name} must be {wanted}, not {value!r}.")
    return value


def _as_type(value: Any, hint: Any) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _as_one_of(value, typing.get_args(hint))
    if origin is tuple:
        return _as_tuple(value, typing.get_args(hint)[0])
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise TypeError from None
    if hint is bool or not isinstance(value, bool):
        if hint is Any or isinstance(value, hint):
            return value
    raise TypeError


def _as_one_of(value: Any, options: tuple[Any, ...]) -> Any:
    if value is None and type(None) in options:
        return None
    for option in options:
        try:
            return _as_type(value, option)
        except TypeError:
            continue
    raise TypeError


def _as_tuple(value: Any, item: Any) -> tuple[Any, ...]:
    if hasattr(value, "tolist"):  # a tensor or an array, as the documents pass their ratios
        value = value.tolist()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if not isinstance(value, (list, tuple)):
        raise TypeError
    if typing.get_origin(item) is tuple:
        name, inner = typing.get_args(item)
        if any(not isinstance(pair, (list, tuple)) or len(pair) != 2 for pair in value):
            raise TypeError
        return tuple((_as_type(key, name), _as_type(rest, inner)) for key, rest in value)
    return tuple(_as_type(v, item) for v in value)


def _within(value: Any, allowed: Mapping[str, Any]) -> bool:
    if allowed.get("choices") is not None:
        return value in allowed["choices"]
    if value is None or not isinstance(value, (int, float)):
        return True
    low, above, high = allowed.get("ge"), allowed.get("gt"), allowed.get("le")
    return (
        math.isfinite(value)
        and (low is None or value >= low)
        and (above is None or value > above)
        and (high is None or value <= high)
    )


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        if value and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value):
            return {name: _plain(rest) for name, rest in value}
        return [_plain(v) for v in value]
    return getattr(value, "name", value)
