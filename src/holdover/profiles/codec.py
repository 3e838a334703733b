"""Profiles as JSON values and back, by the types of their fields; what does not fit is refused."""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

from ..errors import ProfileError, did_you_mean

T = TypeVar("T")

_WORDS = {str: "text", int: "a whole number", float: "a number", bool: "true or false", type(None): "null"}


def encode(value: Any) -> Any:
    """A dataclass as JSON values: pairs become an object, values that are the default are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: encode(v) for f in fields if (v := getattr(value, f.name)) != f.default}
    if isinstance(value, tuple):
        if value and all(isinstance(item, tuple) for item in value):
            return {name: encode(item) for name, item in value}
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass, or a ProfileError that says which value is wrong."""
    if not isinstance(values, dict):
        raise _wrong(where, "an object", values)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ProfileError(f"{where} has no entry {name!r}.{did_you_mean(name, fields)}")
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ProfileError(f"{where} lacks {', '.join(missing)}.")
    hints = typing.get_type_hints(cls)
    decoded = {name: _value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**decoded)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _value(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return _one_of(typing.get_args(hint), value, where)
    if origin is tuple:
        return _tuple(typing.get_args(hint)[0], value, where)
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value, where)
    if not _is_a(value, hint):
        raise _wrong(where, _WORDS[hint], value)
    return _number(value, where) if hint is float else value


def _one_of(options: tuple[Any, ...], value: Any, where: str) -> Any:
    exact = next((option for option in options if option in _WORDS and type(value) is option), None)
    if exact is not None:
        return _value(exact, value, where)
    near = next((option for option in options if option in _WORDS and _is_a(value, option)), None)
    if near is None:
        raise _wrong(where, " or ".join(_WORDS[option] for option in options), value)
    return _value(near, value, where)


def _tuple(item: Any, value: Any, where: str) -> tuple[Any, ...]:
    if typing.get_origin(item) is tuple:
        if not isinstance(value, dict):
            raise _wrong(where, "an object", value)
        inner = typing.get_args(item)[1]
        return tuple((name, _value(inner, v, f"{where}.{name}")) for name, v in value.items())
    if not isinstance(value, list):
        raise _wrong(where, "a list", value)
    return tuple(_value(item, v, f"{where}[{i}]") for i, v in enumerate(value))


def _is_a(value: Any, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float)) if kind is float else isinstance(value, kind)


def _number(value: float, where: str) -> float:
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ProfileError(f"{where} must be a finite number, not {value}.")
    return number


def _wrong(where: str, wanted: str, value: Any) -> ProfileError:
    words: dict[type, str] = {**_WORDS, dict: "an object", list: "a list"}
    return ProfileError(f"{where} must be {wanted}, not {words[type(value)]}.")
