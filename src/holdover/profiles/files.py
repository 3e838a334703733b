"""Profile files: dataclasses as JSON and back, checked by the types of their fields, with digests and safe writing.

Files are JSON and safetensors; nothing in them can run code. Decoding accepts exactly the declared types and says in
plain words which value is wrong, with "Did you mean" for unknown names at every level.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError

from ..errors import ProfileError, WriteError, did_you_mean

T = TypeVar("T")

SUFFIX = ".safetensors"  # of measured profiles

_WORDS: dict[type, str] = {
    str: "text",
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    type(None): "null",
    dict: "an object",
    list: "a list",
}


def encode(value: Any) -> Any:
    """A dataclass as JSON values: tuples of (name, value) pairs become objects; default values are left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = dataclasses.fields(value)
        return {f.name: encode(v) for f in fields if (v := getattr(value, f.name)) != f.default}
    if isinstance(value, tuple):
        if value and all(isinstance(item, tuple) for item in value):
            return {name: encode(item) for name, item in value}
        return [encode(item) for item in value]
    return value


def decode(cls: type[T], values: Any, where: str) -> T:
    """An instance of a dataclass from JSON values; a wrong value is a ProfileError that names it."""
    _check_type(values, (dict,), where)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in fields:
            raise ProfileError(f"{where} has no entry {name!r}.{did_you_mean(name, fields)}")
    missing = [n for n, f in fields.items() if f.default is dataclasses.MISSING and n not in values]
    if missing:
        raise ProfileError(f"{where} lacks {', '.join(missing)}.")
    hints = typing.get_type_hints(cls)
    decoded = {name: _decode_value(hints[name], value, f"{where}.{name}") for name, value in values.items()}
    try:
        return cls(**decoded)
    except ProfileError as error:
        raise ProfileError(f"{where}: {error}") from None


def _decode_value(hint: Any, value: Any, where: str) -> Any:
    """A JSON value as the type of a field: a dataclass, a tuple, a scalar or a union of scalars."""
    if dataclasses.is_dataclass(hint):
        return decode(typing.cast("type[Any]", hint), value, where)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) is tuple:
        item = arguments[0]
        if typing.get_origin(item) is tuple:  # (name, value) pairs are an object
            _check_type(value, (dict,), where)
            inner = typing.get_args(item)[1]
            return tuple((name, _decode_value(inner, v, f"{where}.{name}")) for name, v in value.items())
        _check_type(value, (list,), where)
        return tuple(_decode_value(item, v, f"{where}[{i}]") for i, v in enumerate(value))
    options = arguments or (hint,)
    if not (type(value) is int and float in options):
        _check_type(value, options, where)
    if type(value) is float or (type(value) is int and int not in options):
        try:
            value = float(value)
        except OverflowError:
            value = math.inf
        if not math.isfinite(value):
            raise ProfileError(f"{where} must be a finite number, not {value}.")
    return value


def _check_type(value: Any, options: tuple[type, ...], where: str) -> None:
    if type(value) not in options:
        wanted = " or ".join(_WORDS[option] for option in options)
        raise ProfileError(f"{where} must be {wanted}, not {_WORDS[type(value)]}.")


def parse_json(text: str, where: str) -> Any:
    """The values of a JSON text; text that is not JSON, truncated or not finite is a ProfileError."""

    def refuse(word: str) -> NoReturn:
        raise ProfileError(f"{where} holds {word}; only finite numbers are allowed.")

    try:
        return json.loads(text, parse_constant=refuse)
    except ProfileError:
        raise
    except json.JSONDecodeError as error:
        is_cut = text.strip()[:1] in ("", "{") and not text.rstrip().endswith("}")
        hint = " The file ends too early: it is truncated." if is_cut else ""
        raise ProfileError(f"{where} is not JSON: {error}.{hint}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where} is not JSON that can be read: {error}.") from None


def check_version(values: Mapping[str, Any], version: int, where: str) -> None:
    """Raise ProfileError if a file has another version than the one that this holdover reads."""
    found = values.get("version")
    if found != version or isinstance(found, bool):
        raise ProfileError(f"{where} has version {found!r}; this holdover reads version {version}.")


def compute_digest(facts: Any, arrays: Mapping[str, NDArray[np.float64]]) -> str:
    """The SHA-256 of JSON values and arrays."""
    hashed = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for name in sorted(arrays):
        hashed.update(name.encode())
        hashed.update(str(arrays[name].shape).encode())
        hashed.update(np.ascontiguousarray(arrays[name]).tobytes())
    return hashed.hexdigest()


def write_file(path: str | PathLike[str], content: bytes) -> Path:
    """Write a file and its folder; an existing file is replaced completely or not at all."""
    with replace_file(Path(path)) as new:
        new.parent.mkdir(parents=True, exist_ok=True)
        new.write_bytes(content)
    return Path(path)


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Where to write a new file, which then replaces `path`; an error names `path` and leaves nothing of the file."""
    new = path.with_name(path.name + ".new")
    try:
        yield new
        new.replace(path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or re.sub(r".*I/O error: | \(os error.*", "", str(error))
        raise WriteError(f"Cannot write {path}: {reason}.") from None
    finally:
        with suppress(OSError):
            new.unlink()
