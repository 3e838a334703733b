"""From `--cache-config`, as vLLM-Omni hands it on, to a method's own settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..selector import config_class, own_config

REQUEST_KEY = "holdover"
"""Where a request's own settings are among the `extra_args` of its sampling parameters."""
OFF = "off"
UNKNOWN = "_extra_params"
"""Where a `DiffusionCacheConfig` keeps the keys it has no field for."""


def config_for(method: str, given: Any) -> Config:
    """A method's settings; a key it does not have is an error that names the nearest it has."""
    return own_config(method, given if isinstance(given, Mapping) else _said(given, config_class(method)))


def _said(given: object, own: type[Config]) -> dict[str, Any]:
    """What a `DiffusionCacheConfig` was told.

    It has a field for each setting of vLLM-Omni's own methods, and keeps the keys it does not know beside them. A field
    the method shares counts as it is, unless it is None; any other only where it differs from its default, so that a
    setting of another method is noticed.
    """
    if given is None:
        return {}
    if not dataclasses.is_dataclass(given) or isinstance(given, type):
        raise ConfigError(f"--cache-config must be a JSON object, not {type(given).__name__}.")
    said: dict[str, Any] = dict(getattr(given, UNKNOWN))
    untold, shared = type(given)(), own.field_names()
    for field in dataclasses.fields(given):
        value = getattr(given, field.name)
        told = value is not None if field.name in shared else value != getattr(untold, field.name)
        if told and not field.name.startswith("_"):
            said[field.name] = value
    return said


def request_settings(batch: Any) -> list[Mapping[str, Any] | str]:
    """What the requests of a batch ask of the cache, each different wish once; nothing asked is no settings."""
    wishes: list[Mapping[str, Any] | str] = []
    for request in batch.requests:
        wish = _checked((request.sampling_params.extra_args or {}).get(REQUEST_KEY) or {})
        if wish not in wishes:
            wishes.append(wish)
    return wishes


def _checked(wish: Any) -> Mapping[str, Any] | str:
    if not isinstance(wish, Mapping) and wish != OFF:
        raise ConfigError(f"extra_args[{REQUEST_KEY!r}] must be settings as an object, or {OFF!r}, not {wish!r}.")
    return OFF if wish == OFF else dict(wish)
