"""What `serve run holdover.serve.ray:app` builds; imports what draws only after the settings are found to be right."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .settings import RaySettings

if TYPE_CHECKING:
    from ray import serve


def app(args: Mapping[str, Any]) -> serve.Application:
    """The application; `args` of its YAML file are settings, checked as flags are."""
    settings = RaySettings.from_args(args)
    from .deployments import built

    return built(settings)
