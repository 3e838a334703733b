"""The shipped profiles, the search for a model's profile, and profiles of one method as JSON files."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ..errors import ProfileError, did_you_mean
from .files import check_version, decode, encode, parse_json, write_file
from .profile import SUFFIX, MagCacheProfile, MethodProfile, Profile, TeaCacheProfile

if TYPE_CHECKING:
    from torch import nn

MethodName = Literal["tea_cache", "mag_cache"]  # the methods that have profiles of their own

FORMAT = "holdover-profile"
VERSION = 1
_KINDS: dict[str, type[MethodProfile]] = {"tea_cache": TeaCacheProfile, "mag_cache": MagCacheProfile}
_FILES = {"tea_cache": "teacache.json", "mag_cache": "magcache.json"}
_ABSENT = object()


@overload
def shipped(method: Literal["tea_cache"]) -> tuple[TeaCacheProfile, ...]: ...
@overload
def shipped(method: Literal["mag_cache"]) -> tuple[MagCacheProfile, ...]: ...
def shipped(method: MethodName) -> tuple[MethodProfile, ...]:
    """The shipped profiles of one method; of several for one class, the first is the default."""
    if method not in _FILES:
        raise ProfileError(f"There are no profiles for method {method!r}.{did_you_mean(method, _FILES)}")
    return _shipped(method)


@cache
def _shipped(method: str) -> tuple[MethodProfile, ...]:
    name = _FILES[method]
    values = parse_json(resources.files(__package__).joinpath(name).read_text(encoding="utf-8"), name)
    entries = _contents(values, f"{FORMAT}s", method, name)["profiles"]
    return tuple(decode(_KINDS[method], entry, f"{name}[{i}]") for i, entry in enumerate(entries))


@cache
def measured() -> tuple[Profile, ...]:
    """The shipped profiles that `holdover.calibrate` measured, sorted by name."""
    files = [f for f in resources.files(__package__).iterdir() if f.name.endswith(SUFFIX)]
    loaded = []
    for file in files:
        with resources.as_file(file) as path:
            loaded.append(Profile.load(path))
    return tuple(sorted(loaded, key=lambda profile: profile.name))


@overload
def find(
    method: Literal["tea_cache"],
    transformer: nn.Module,
    pipeline: object = None,
    name: Profile | str | None = None,
    signal: str | None = None,
) -> TeaCacheProfile | None: ...
@overload
def find(
    method: Literal["mag_cache"],
    transformer: nn.Module,
    pipeline: object = None,
    name: Profile | str | None = None,
) -> MagCacheProfile | None: ...
def find(
    method: MethodName,
    transformer: nn.Module,
    pipeline: object = None,
    name: Profile | str | None = None,
    signal: str | None = None,
) -> MethodProfile | None:
    """The profile called `name` (a Profile, a file or a shipped profile's name), else the best match, else None.

    A file is a `.json` written by `save`, or a `.safetensors` written by `holdover.calibrate`. `signal` restricts the
    search to profiles that were measured with that signal.
    """
    if isinstance(name, Profile) or (name is not None and name.endswith(SUFFIX)):
        return _from_measured(method, name, transformer, pipeline)
    if name is not None:
        return load(name, method) if name.endswith(".json") else _by_name(method, name, transformer)
    entries = [p for p in _of_class(method, transformer) if signal is None or getattr(p, "signal", None) == signal]
    agreeing = [(count, p) for p in entries if (count := _agreement(p, transformer, pipeline)) is not None]
    if agreeing:
        return max(agreeing, key=lambda pair: pair[0])[1]
    return entries[0] if entries else None


def _by_name(method: MethodName, name: str, transformer: nn.Module) -> MethodProfile:
    """The shipped profile of that name; the error for an unknown name lists those of the transformer's class."""
    known = {profile.name: profile for profile in shipped(method)}
    if name in known:
        return known[name]
    same_class = [profile.name for profile in _of_class(method, transformer)]
    listed = f" For {type(transformer).__name__} there are {', '.join(same_class)}." if same_class else ""
    hint = did_you_mean(name, known) or listed
    raise ProfileError(f"There is no {method} profile {name!r}.{hint} A path to a file must end in .json or {SUFFIX}.")


def _from_measured(
    method: MethodName, source: Profile | str, transformer: nn.Module, pipeline: object
) -> MethodProfile:
    """The constants of this method in a measured profile; with two experts, those of this transformer."""
    facts = (source if isinstance(source, Profile) else Profile.load(source)).facts
    parts: Iterable[tuple[str, MethodProfile]] = facts.tea_cache if method == "tea_cache" else facts.mag_cache
    classes = {cls.__name__ for cls in type(transformer).__mro__}
    of_class = {name: part for name, part in parts if part.transformer_class in classes}
    own = next((part for name, part in of_class.items() if getattr(pipeline, name, None) is transformer), None)
    if of_class:
        return own or next(iter(of_class.values()))
    where = f"Profile {source.name!r}" if isinstance(source, Profile) else source
    raise ProfileError(f"{where} has nothing for {method} on {type(transformer).__name__}.")


def _of_class(method: MethodName, transformer: nn.Module) -> list[MethodProfile]:
    """The shipped profiles of the transformer's class, or of the nearest base class that has any."""
    profiles: tuple[MethodProfile, ...] = shipped(method)
    for cls in type(transformer).__mro__:
        entries = [profile for profile in profiles if profile.transformer_class == cls.__name__]
        if entries:
            return entries
    return []


def _agreement(profile: MethodProfile, transformer: nn.Module, pipeline: Any) -> int | None:
    """The number of constraints of a profile if the model meets all of them, else None."""
    if profile.pipelines and not {cls.__name__ for cls in type(pipeline).__mro__} & set(profile.pipelines):
        return None
    for key, wanted in profile.match:
        found = _config_value(key, transformer, pipeline)
        if found is _ABSENT or (found is None if wanted == "*" else found != wanted):
            return None
    return len(profile.match) + bool(profile.pipelines)


def _config_value(key: str, transformer: nn.Module, pipeline: Any) -> object:
    """The value that a `match` key refers to."""
    owner, _, name = key.rpartition(".")
    holder = {"": transformer, "pipeline": pipeline, "scheduler": getattr(pipeline, "scheduler", None)}[owner]
    if key == "scheduler.class":
        return type(holder).__name__
    return (getattr(holder, "config", None) or {}).get(name, _ABSENT)


def save(profile: MethodProfile, path: str | PathLike[str]) -> None:
    """Write a profile as a JSON file, one entry per line; an existing file is replaced completely or not at all."""
    method = next((m for m, kind in _KINDS.items() if type(profile) is kind), None)
    if method is None:
        raise ProfileError(f"{type(profile).__name__} is not a profile that can be saved.")
    body = {"format": FORMAT, "version": VERSION, "method": method, **encode(profile)}
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    write_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def load(path: str | PathLike[str], method: MethodName | None = None) -> MethodProfile:
    """Read a file that `save` wrote; anything else is a ProfileError that says what is wrong with it."""
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"No profile could be read from {where}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{where} is not JSON: it is not even text.") from None
    values = parse_json(text, where)
    contents = _contents(values, FORMAT, method, where)
    return decode(_KINDS[values["method"]], contents, where)


def _contents(values: Any, format: str, method: str | None, where: str) -> dict[str, Any]:
    """The entries of a profile file without `format`, `version` and `method`, which are checked here."""
    if not isinstance(values, dict) or values.get("format") != format:
        raise ProfileError(f"{where} is not a holdover profile: it has no entry 'format' of {format!r}.")
    check_version(values, VERSION, where)
    found = values.get("method")
    if not isinstance(found, str) or found not in _KINDS:
        raise ProfileError(f"{where} is for method {found!r}; known are {', '.join(_KINDS)}.")
    if method is not None and found != method:
        raise ProfileError(f"{where} is a {found} profile; a {method} profile is needed.")
    return {key: value for key, value in values.items() if key not in ("format", "version", "method")}
