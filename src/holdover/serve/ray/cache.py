"""The settings of the cache as they travel to ingress and replicas, with the profile they name and its content."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ConfigError, did_you_mean
from ..choice import Choice, choice
from ..settings import Settings

CHANGEABLE = ("cache_backend", "cache_config")
"""What may change while replicas run; as Serve's `user_config` in YAML."""

MOST = 32_000_000
"""Bytes of a profile that may travel with the settings."""


@dataclass(frozen=True)
class Shared:
    """A profile's name and content, loaded once for all."""

    name: str
    content: bytes

    def written(self) -> Path:
        """A file of this user's own, named by its content: the same path on every machine."""
        folder = Path(tempfile.gettempdir()) / f"holdover-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to somebody else: remove it, or set TMPDIR.")
        path = folder / f"{hashlib.sha256(self.content).hexdigest()[:32]}-{self.name}"
        if not path.exists() or path.stat().st_size != len(self.content):
            with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
                file.write(self.content)
            Path(file.name).replace(path)
        return path


def packed(values: Mapping[str, Any]) -> dict[str, Any]:
    """The cache in plain JSON values, checked; a profile that is a file goes along with its content."""
    if "profile" in values:
        return dict(values)
    for name in values:
        if name not in CHANGEABLE:
            hint = did_you_mean(name, CHANGEABLE)
            raise ConfigError(f"{name!r} cannot change while replicas run.{hint} What can: {', '.join(CHANGEABLE)}.")
    settings = Settings.from_dict(
        {name: value if isinstance(value, str) else json.dumps(value) for name, value in values.items()}
    )
    choice(settings.cache_backend, settings.cache_settings)
    sent: dict[str, Any] = {name: getattr(settings, name) for name in CHANGEABLE}
    named = settings.cache_settings.get("profile")
    if isinstance(named, str) and Path(named).is_file():
        sent["profile"] = {"name": Path(named).name, "content": _encoded(Path(named))}
    return sent


def shared(sent: Mapping[str, Any]) -> Shared | None:
    """The profile that goes along."""
    profile = sent.get("profile")
    return None if profile is None else Shared(profile["name"], base64.b64decode(profile["content"]))


def unpacked(sent: Mapping[str, Any]) -> dict[str, str]:
    """The same as settings of a server on this machine."""
    settings = {name: str(sent[name]) for name in CHANGEABLE}
    profile = shared(sent)
    if profile is not None:
        path = str(profile.written())
        settings["cache_config"] = json.dumps(json.loads(settings["cache_config"]) | {"profile": path})
    return settings


def chosen(sent: Mapping[str, Any]) -> Choice:
    """The cache to stand with."""
    settings = Settings.from_dict(unpacked(sent))
    return choice(settings.cache_backend, settings.cache_settings)


def _encoded(path: Path) -> str:
    size = path.stat().st_size
    if size > MOST:
        raise ConfigError(f"The profile {path} has {size} bytes; at most {MOST} are sent to replicas.")
    return base64.b64encode(path.read_bytes()).decode("ascii")
