"""The shipped profiles, the search for a model's profile, and profiles of one method as JSON files."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from ..errors import ProfileError, did_you_mean
from .facts import MagCacheProfile, MethodProfile, TeaCacheProfile
from .files import SUFFIX, check_version, decode, encode, parse_json, write_file
from .hub import locate, suffix_of
from .profile import Profile

if TYPE_CHECKING:
    from torch import nn

TeaCacheName = Literal["tea_cache"]
MagCacheName = Literal["mag_cache"]
MethodName = Literal["tea_cache", "mag_cache"]  # the methods that have profiles of their own
Source = Profile | str | None

FORMAT = "holdover-profile"
VERSION = 1
_KINDS: dict[str, type[MethodProfile]] = {"tea_cache": TeaCacheProfile, "mag_cache": MagCacheProfile}
_ABSENT = object()


@overload
def shipped(method: TeaCacheName) -> tuple[TeaCacheProfile, ...]: ...
@overload
def shipped(method: MagCacheName) -> tuple[MagCacheProfile, ...]: ...
@cache
def shipped(method: MethodName) -> tuple[MethodProfile, ...]:
    """The shipped profiles of one method; of several for one class, the first is the default."""
    if method not in _KINDS:
        raise ProfileError(f"There are no profiles for method {method!r}.{did_you_mean(method, _KINDS)}")
    name = f"{method.replace('_', '')}.json"
    values = parse_json(Path(__file__).with_name(name).read_text(encoding="utf-8"), name)
    entries = _check_head(values, f"{FORMAT}s", method, name)["profiles"]
    return tuple(decode(_KINDS[method], entry, f"{name}[{i}]") for i, entry in enumerate(entries))


@cache
def measured() -> tuple[Profile, ...]:
    """The shipped profiles that `holdover.calibrate` measured, sorted by name."""
    return tuple(sorted(map(Profile.load, Path(__file__).parent.glob(f"*{SUFFIX}")), key=lambda profile: profile.name))


@overload
def find(
    method: TeaCacheName, transformer: nn.Module, pipeline: Any = None, name: Source = None, signal: str | None = None
) -> TeaCacheProfile | None: ...
@overload
def find(
    method: MagCacheName, transformer: nn.Module, pipeline: Any = None, name: Source = None
) -> MagCacheProfile | None: ...
def find(
    method: MethodName, transformer: nn.Module, pipeline: Any = None, name: Source = None, signal: str | None = None
) -> MethodProfile | None:
    """The profile called `name` (a Profile, a file or a shipped profile's name), else the best match, else None.

    A file is a `.json` written by `save`, or a `.safetensors` written by `holdover.calibrate`; `hf://owner/name/file`
    is one on the Hub. `signal` restricts the search to profiles that were measured with that signal.
    """
    if isinstance(name, Profile) or (name is not None and suffix_of(name) == SUFFIX):
        return _from_measured(method, name, transformer, pipeline)
    if name is not None and suffix_of(name) == ".json":
        return load(name, method)
    profiles: tuple[MethodProfile, ...] = shipped(method)
    entries: list[MethodProfile] = []
    for cls in type(transformer).__mro__:  # the transformer's class, or the nearest base class that has profiles
        entries = entries or [profile for profile in profiles if profile.transformer_class == cls.__name__]
    if name is not None:
        known = {profile.name: profile for profile in profiles}
        if name in known:
            return known[name]
        listed = f" For {type(transformer).__name__} there are {', '.join(p.name for p in entries)}." if entries else ""
        hint = (did_you_mean(name, known) or listed) + f" A path to a file must end in .json or {SUFFIX}."
        raise ProfileError(f"There is no {method} profile {name!r}.{hint}")
    entries = [p for p in entries if signal is None or getattr(p, "signal", None) == signal]
    counts = [_count_matches(profile, transformer, pipeline) for profile in entries]
    return entries[counts.index(max(counts))] if entries else None


def _from_measured(method: MethodName, source: Profile | str, transformer: nn.Module, pipeline: Any) -> MethodProfile:
    """The constants of this method in a measured profile; with two experts, those of this transformer."""
    facts = (source if isinstance(source, Profile) else Profile.load(source)).facts
    classes = {cls.__name__ for cls in type(transformer).__mro__}
    parts: tuple[tuple[str, MethodProfile], ...] = getattr(facts, method)
    of_class = {name: part for name, part in parts if part.transformer_class in classes}
    own = next((part for name, part in of_class.items() if getattr(pipeline, name, None) is transformer), None)
    if of_class:
        found = own or next(iter(of_class.values()))
        return replace(found, origin=facts.origin) if facts.origin else found
    where = f"Profile {source.name!r}" if isinstance(source, Profile) else source
    raise ProfileError(f"{where} has nothing for {method} on {type(transformer).__name__}.")


def _count_matches(profile: MethodProfile, transformer: nn.Module, pipeline: Any) -> int:
    """The number of constraints of a profile if the model meets all of them, else -1."""
    if profile.pipelines and not {cls.__name__ for cls in type(pipeline).__mro__} & set(profile.pipelines):
        return -1
    owners = {"": transformer, "pipeline": pipeline, "scheduler": getattr(pipeline, "scheduler", None)}
    for key, wanted in profile.match:
        owner, _, name = key.rpartition(".")
        config: Any = getattr(owners[owner], "config", None) or {}
        found = type(owners[owner]).__name__ if key == "scheduler.class" else config.get(name, _ABSENT)
        if found is _ABSENT or (found is None if wanted == "*" else found != wanted):
            return -1
    return len(profile.match) + bool(profile.pipelines)


def save(profile: MethodProfile, path: str | PathLike[str]) -> None:
    """Write a profile as a JSON file, one entry per line; an existing file is replaced completely or not at all."""
    method = next((m for m, kind in _KINDS.items() if type(profile) is kind), None)
    if method is None:
        raise ProfileError(f"{type(profile).__name__} is not a profile that can be saved.")
    body = {"format": FORMAT, "version": VERSION, "method": method, **encode(profile)}
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    write_file(path, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def load(path: str | PathLike[str], method: MethodName | None = None) -> MethodProfile:
    """Read a file that `save` wrote, or one on the Hub; a ProfileError says what is wrong with anything else."""
    file, origin = locate(path)
    where = origin or file
    try:
        text = Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"No profile could be read from {where}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{where} is not JSON: it is not even text.") from None
    values = parse_json(text, where)
    contents = _check_head(values, FORMAT, method, where)
    return replace(decode(_KINDS[values["method"]], contents, where), origin=origin)


def _check_head(values: Any, format: str, method: str | None, where: str) -> dict[str, Any]:
    """Check `format`, `version` and `method` of a profile file and return its other entries."""
    if not isinstance(values, dict) or values.get("format") != format:
        raise ProfileError(f"{where} is not a holdover profile: it has no entry 'format' of {format!r}.")
    check_version(values, VERSION, where)
    found = values.get("method")
    if not isinstance(found, str) or found not in _KINDS:
        raise ProfileError(f"{where} is for method {found!r}; known are {', '.join(_KINDS)}.")
    if method is not None and found != method:
        raise ProfileError(f"{where} is a {found} profile; a {method} profile is needed.")
    return {key: value for key, value in values.items() if key not in ("format", "version", "method")}
