"""Which cache a picture is drawn with: from a request's `cache` object to a checked method and its settings."""

from __future__ import annotations

import dataclasses
import inspect
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..config import Config, allowed_values
from ..errors import ConfigError
from ..selector import backend_class, config_class, methods, own_config
from .errors import invalid

TARGETED = "plan"  # the method that works towards a quality instead of settings
SCHEDULED = frozenset({"none", "mag_cache", TARGETED})
"""Methods that decide by the step alone. The others look at the data, and a batch would decide as one; so does a plan
with a guard."""

_SERVER_ONLY = ("profile", "path", "calibrate")  # they read or write files, or switch the cache off to measure


@dataclass(frozen=True)
class Choice:
    """A method with its settings: equal for requests that may be drawn together."""

    method: str
    config: Config

    @property
    def scheduled(self) -> bool:
        """Whether decisions depend on the step alone, so that company changes nothing."""
        return self.method in SCHEDULED and not self.config.as_dict().get("guard", False)

    @property
    def param(self) -> str:
        """The field of a request to blame when this cannot be done."""
        return "cache" if self.config.as_dict().get("target") is None else "cache.target"

    def as_dict(self) -> dict[str, Any]:
        return {"method": self.method, "settings": self.config.as_dict()}


def choice(method: str, settings: Mapping[str, Any]) -> Choice:
    """A method and its settings, checked."""
    return Choice(method, own_config(method, settings))


def requested(cache: Mapping[str, Any] | None, standing: Choice) -> Choice:
    """What a request asks for: a method that is named with its own defaults, settings alone on the server's."""
    if cache is None:
        return standing
    settings = dict(cache)
    method = settings.pop("method", TARGETED if "target" in settings else None)
    if method is not None and not isinstance(method, str):
        raise invalid(f"cache.method must be a name, not {method!r}.", "cache.method")
    try:
        return _named(method, settings, standing) if method is not None else _changed(settings, standing)
    except ConfigError as error:
        raise invalid(str(error), _blamed(method or standing.method, settings, error)) from None


def _changed(settings: dict[str, Any], standing: Choice) -> Choice:
    """The server's own method with some settings changed."""
    _refuse_server_only(standing.method, settings)
    own_config(standing.method, settings)  # an unknown key is told with the method it belongs to
    return Choice(standing.method, standing.config.replaced(**settings))


def _named(method: str, settings: dict[str, Any], standing: Choice) -> Choice:
    """A method by name; what only the server may say of it stays as the server stands."""
    _refuse_server_only(method, settings)
    names = standing.config.field_names() if method == standing.method else ()
    return choice(method, {name: getattr(standing.config, name) for name in names if _is_server_only(name)} | settings)


def _refuse_server_only(method: str, settings: Mapping[str, Any]) -> None:
    for name in settings:
        if _is_server_only(name) and name in config_class(method).field_names():
            raise invalid(f"{name!r} is set when the server starts, with --cache-config.", f"cache.{name}")


def _blamed(method: str, settings: Mapping[str, Any], error: ConfigError) -> str:
    """The field that is wrong: the one the message names."""
    if method not in methods():
        return "cache.method"
    named = [name for name in settings if f".{name} " in str(error) or f"{name!r}" in str(error)]
    blamed = named or (list(settings) if len(settings) == 1 else [])
    return f"cache.{blamed[0]}" if blamed else "cache"


def _is_server_only(name: str) -> bool:
    return any(word in name for word in _SERVER_ONLY)


@dataclass(frozen=True)
class Field:
    """One setting of a method, as a form would show it."""

    name: str
    kind: str
    default: Any
    minimum: float | None
    maximum: float | None
    choices: tuple[Any, ...] | None
    allowed: str
    doc: str


_KINDS: dict[Any, str] = {float: "number", int: "integer", bool: "boolean", str: "text"}
_JSON: dict[Any, str] = {float: "number", int: "integer", bool: "boolean", str: "string", type(None): "null"}


def fields(method: str) -> tuple[Field, ...]:
    """The settings of a method that a request may give; the kind is `other` for lists and for what may be absent."""
    return tuple(
        Field(
            name=field.name,
            kind=_KINDS.get(hint, "other"),
            default=field.default,
            minimum=_allowed(field, "ge"),
            maximum=_allowed(field, "le"),
            choices=_allowed(field, "choices"),
            allowed=allowed_values(field),
            doc=field.metadata.get("doc", ""),
        )
        for field, hint in _settings(method)
    )


def schemas(method: str) -> dict[str, dict[str, Any]]:
    """The same settings in JSON Schema."""
    return {field.name: _schema(field, hint) for field, hint in _settings(method)}


def _settings(method: str) -> list[tuple[dataclasses.Field[Any], Any]]:
    config = config_class(method)
    hints = typing.get_type_hints(config)
    return [(field, hints[field.name]) for field in config.settings() if not _is_server_only(field.name)]


def _allowed(field: dataclasses.Field[Any], name: str) -> Any:
    return field.metadata.get("allowed", {}).get(name)


def _schema(field: dataclasses.Field[Any], hint: Any) -> dict[str, Any]:
    choices = _allowed(field, "choices")
    if choices is not None:
        return {"enum": list(choices), "description": field.metadata.get("doc", "")}
    words = {"minimum": _allowed(field, "ge"), "maximum": _allowed(field, "le")}
    limits = {word: limit for word, limit in words.items() if limit is not None}
    return _typed(hint) | limits | {"description": field.metadata.get("doc", "")}


def _typed(hint: Any) -> dict[str, Any]:
    if hint in _JSON:
        return {"type": _JSON[hint]}
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return {"anyOf": [_typed(option) for option in arguments]}
    if typing.get_origin(arguments[0]) is tuple:  # pairs of a name and a value
        return {"type": "object", "additionalProperties": _typed(typing.get_args(arguments[0])[1])}
    return {"type": "array", "items": _typed(arguments[0])}


def described() -> list[dict[str, Any]]:
    """Every method with what a form needs to ask for its settings."""
    return [
        {
            "method": name,
            "doc": (inspect.getdoc(backend_class(name)) or "").split("\n")[0],
            "batched": name in SCHEDULED,
            "settings": [dataclasses.asdict(field) for field in fields(name)],
        }
        for name in methods()
    ]
