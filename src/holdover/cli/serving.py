"""`holdover serve`: every setting of the server is a flag of the same name."""

from __future__ import annotations

import typing
from typing import Annotated, Any

import typer

from ..errors import ConfigError, HoldoverError
from ..loading import require_packages
from ..serve.settings import API_KEYS, RaySettings, Settings
from .application import app, fail, one_line_errors
from .options import keyword_parameter, make_parameter, set_parameters

_SERVER_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


def serve(ray: bool = False, **flags: Any) -> None:
    """Check the flags before anything is loaded, then serve until stopped."""
    with one_line_errors():
        for field in RaySettings.settings() if not ray else ():
            if field.name not in Settings.field_names() and flags.pop(field.name) != field.default:
                raise ConfigError(f"--{field.name.replace('_', '-')} is for many replicas: say --ray as well.")
        settings = RaySettings(**flags) if ray else Settings(**flags)
        packages = (*_SERVER_PACKAGES, "ray") if ray else _SERVER_PACKAGES
        require_packages("The server", "ray" if ray else "server", *packages)
        settings.check_cache()
        if not ray:  # a replica may have a folder that this machine has not
            settings.check_model()
    try:
        if isinstance(settings, RaySettings):
            from ..serve.ray.deployment import serve as serve_on_ray

            serve_on_ray(settings)
        else:
            from ..serve.launch import serve as serve_here

            serve_here(settings)
    except HoldoverError as error:
        fail(str(error), 1)


_HINTS = typing.get_type_hints(RaySettings)
_RAY = keyword_parameter("ray", False, Annotated[bool, typer.Option("--ray", help="Serve with many replicas, on Ray.")])
_FIELDS = (make_parameter(field, _HINTS[field.name], field.name == "model") for field in RaySettings.settings())
set_parameters(serve, [*_FIELDS, _RAY])
serve.__doc__ = f"""Serve a model over HTTP, in the shape of OpenAI's image and video API, with a web page at /.

Clients must send a key if {API_KEYS} is set to a comma-separated list of keys.
"""
app.command(context_settings={"token_normalize_func": lambda flag: flag.replace("_", "-")})(serve)
