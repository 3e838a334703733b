"""Find a model's profile, load one, save one. Files are JSON: nothing that is loaded can run code."""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cache
from importlib import resources
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, overload

from ..errors import ProfileError, did_you_mean
from .codec import decode, encode
from .measured import SUFFIX, Profile
from .profile import (
    MagCacheDefaults,
    MagCacheProfile,
    MagCacheRatios,
    MethodProfile,
    TeaCacheFit,
    TeaCacheProfile,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "MagCacheDefaults",
    "MagCacheProfile",
    "MagCacheRatios",
    "Method",
    "MethodProfile",
    "TeaCacheFit",
    "TeaCacheProfile",
    "find",
    "load",
    "save",
    "shipped",
]

Method = Literal["tea_cache", "mag_cache"]

FORMAT = "holdover-profile"
VERSION = 1
_KINDS: dict[str, type[MethodProfile]] = {"tea_cache": TeaCacheProfile, "mag_cache": MagCacheProfile}
_FILES = {"tea_cache": "teacache.json", "mag_cache": "magcache.json"}
_ABSENT = object()
_ANY = "*"


@overload
def shipped(method: Literal["tea_cache"]) -> tuple[TeaCacheProfile, ...]: ...
@overload
def shipped(method: Literal["mag_cache"]) -> tuple[MagCacheProfile, ...]: ...
def shipped(method: Method) -> tuple[MethodProfile, ...]:
    """Every profile that comes with holdover; of one class, the first is the one to take when in doubt."""
    if method not in _FILES:
        raise ProfileError(f"No profiles are kept for {method!r}.{did_you_mean(method, _FILES)}")
    return _shipped(method)


@cache
def _shipped(method: str) -> tuple[MethodProfile, ...]:
    text = resources.files(__package__).joinpath(_FILES[method]).read_text(encoding="utf-8")
    entries = _body(_parsed(text, _FILES[method]), f"{FORMAT}s", method, _FILES[method])["profiles"]
    return tuple(decode(_KINDS[method], entry, f"{_FILES[method]}[{i}]") for i, entry in enumerate(entries))


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
    method: Method,
    transformer: nn.Module,
    pipeline: object = None,
    name: Profile | str | None = None,
    signal: str | None = None,
) -> MethodProfile | None:
    """The profile asked for (the object, a file, a shipped one's name), else the one that fits best, else None.

    A file is a `.json` that `save` wrote, or the `.safetensors` of `holdover.calibrate`. `signal` leaves only profiles
    that were measured with that signal.
    """
    if name is not None:
        if isinstance(name, Profile) or name.endswith(SUFFIX):
            return _calibrated(method, name, transformer, pipeline)
        return load(name, method) if name.endswith(".json") else _named(method, name, transformer)
    entries = [p for p in _of_class(method, transformer) if signal is None or getattr(p, "signal", None) == signal]
    agreeing = [(count, p) for p in entries if (count := _agreement(p, transformer, pipeline)) is not None]
    if agreeing:
        return max(agreeing, key=lambda pair: pair[0])[1]
    return entries[0] if entries else None


@cache
def measured() -> tuple[Profile, ...]:
    """Every profile that was measured by `holdover.calibrate` and comes with holdover."""
    files = [f for f in resources.files(__package__).iterdir() if f.name.endswith(SUFFIX)]
    loaded = []
    for file in files:
        with resources.as_file(file) as path:
            loaded.append(Profile.load(path))
    return tuple(sorted(loaded, key=lambda profile: profile.name))


def _named(method: Method, name: str, transformer: nn.Module) -> MethodProfile:
    known = {profile.name: profile for profile in shipped(method)}
    if name in known:
        return known[name]
    own = [profile.name for profile in _of_class(method, transformer)]
    listed = f" For {type(transformer).__name__} there are {', '.join(own)}." if own else ""
    hint = did_you_mean(name, known) or listed
    raise ProfileError(f"There is no {method} profile {name!r}.{hint} A path to a file must end in .json or {SUFFIX}.")


def _calibrated(method: Method, asked: Profile | str, transformer: nn.Module, pipeline: object) -> MethodProfile:
    """This method's part of what `holdover.calibrate` measured; of two experts, that of the one at hand."""
    facts = (asked if isinstance(asked, Profile) else Profile.load(asked)).facts
    parts: Iterable[tuple[str, MethodProfile]] = facts.tea_cache if method == "tea_cache" else facts.mag_cache
    classes = {cls.__name__ for cls in type(transformer).__mro__}
    of_class = {name: part for name, part in parts if part.transformer_class in classes}
    own = next((part for name, part in of_class.items() if getattr(pipeline, name, None) is transformer), None)
    if of_class:
        return own or next(iter(of_class.values()))
    where = f"Profile {asked.name!r}" if isinstance(asked, Profile) else asked
    raise ProfileError(f"{where} has nothing for {method} on {type(transformer).__name__}.")


def _of_class(method: Method, transformer: nn.Module) -> list[MethodProfile]:
    """The profiles of the transformer's class, or of the nearest base that has any."""
    profiles: tuple[MethodProfile, ...] = shipped(method)
    for cls in type(transformer).__mro__:
        entries = [profile for profile in profiles if profile.transformer_class == cls.__name__]
        if entries:
            return entries
    return []


def _agreement(profile: MethodProfile, transformer: nn.Module, pipeline: Any) -> int | None:
    """How many constraints a profile has, all of which agree; None where one does not."""
    if profile.pipelines and not {cls.__name__ for cls in type(pipeline).__mro__} & set(profile.pipelines):
        return None
    for key, wanted in profile.match:
        found = _configured(key, transformer, pipeline)
        if found is _ABSENT or (found is None if wanted == _ANY else found != wanted):
            return None
    return len(profile.match) + bool(profile.pipelines)


def _configured(key: str, transformer: nn.Module, pipeline: Any) -> object:
    """The value a `match` key speaks of."""
    owner, _, name = key.rpartition(".")
    holder = {"": transformer, "pipeline": pipeline, "scheduler": getattr(pipeline, "scheduler", None)}[owner]
    if key == "scheduler.class":
        return type(holder).__name__
    return (getattr(holder, "config", None) or {}).get(name, _ABSENT)


def save(profile: MethodProfile, path: str | PathLike[str]) -> None:
    """Write a profile as a JSON file, an entry a line; an older file is replaced at once or not at all."""
    method = next((m for m, kind in _KINDS.items() if type(profile) is kind), None)
    if method is None:
        raise ProfileError(f"{type(profile).__name__} is not a profile that can be saved.")
    body = {"format": FORMAT, "version": VERSION, "method": method, **encode(profile)}
    lines = (f" {json.dumps(key)}: {json.dumps(value, allow_nan=False)}" for key, value in body.items())
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.unfinished")
    unfinished.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
    unfinished.replace(target)


def load(path: str | PathLike[str], method: Method | None = None) -> MethodProfile:
    """Read a file that `save` wrote; anything else is a ProfileError that says what is wrong with it."""
    where = str(path)
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ProfileError(f"No profile could be read from {where}: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ProfileError(f"{where} is not JSON: it is not even text.") from None
    values = _parsed(text, where)
    body = _body(values, FORMAT, method, where)
    return decode(_KINDS[values["method"]], body, where)


def _parsed(text: str, where: str) -> Any:
    def refuse(word: str) -> NoReturn:
        raise ProfileError(f"{where} holds {word}; only finite numbers are allowed.")

    try:
        return json.loads(text, parse_constant=refuse)
    except ProfileError:
        raise
    except json.JSONDecodeError as error:
        begun = text.strip()[:1] in ("", "{") and not text.rstrip().endswith("}")
        cut = " The file ends too early: it is truncated." if begun else ""
        raise ProfileError(f"{where} is not JSON: {error}.{cut}") from None
    except (ValueError, RecursionError) as error:
        raise ProfileError(f"{where} is not JSON that can be read: {error}.") from None


def _body(values: Any, format: str, method: str | None, where: str) -> dict[str, Any]:
    """What stands beside the three entries that say what kind of file this is."""
    if not isinstance(values, dict) or values.get("format") != format:
        raise ProfileError(f"{where} is not a holdover profile: it has no entry 'format' of {format!r}.")
    if values.get("version") != VERSION or isinstance(values["version"], bool):
        version = values.get("version")
        raise ProfileError(f"{where} has version {version!r}; this holdover reads version {VERSION}.")
    found = values.get("method")
    if not isinstance(found, str) or found not in _KINDS:
        raise ProfileError(f"{where} is for method {found!r}; known are {', '.join(_KINDS)}.")
    if method is not None and found != method:
        raise ProfileError(f"{where} is a {found} profile; a {method} profile is needed.")
    return {key: value for key, value in values.items() if key not in ("format", "version", "method")}
