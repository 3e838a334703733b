"""`holdover serve`: every setting of the server is a flag of the same name."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import typing
from typing import Annotated, Any

import typer

from ..config import allowed_values
from ..errors import ConfigError, HoldoverError
from ..serve.settings import API_KEYS, RaySettings, Settings
from .application import app, fail, one_line_errors

_SERVER_PACKAGES = ("fastapi", "prometheus_client", "uvicorn")


def serve(ray: bool = False, **flags: Any) -> None:
    """Check the flags before anything is loaded, then serve until stopped."""
    with one_line_errors():
        for field in RaySettings.settings() if not ray else ():
            if field.name not in Settings.field_names() and flags.pop(field.name) != field.default:
                raise ConfigError(f"--{field.name.replace('_', '-')} is for many replicas: say --ray as well.")
        settings = RaySettings(**flags) if ray else Settings(**flags)
        needed = (*_SERVER_PACKAGES, "ray") if ray else _SERVER_PACKAGES
        if missing := [name for name in needed if importlib.util.find_spec(name) is None]:
            extra = "ray" if ray else "server"
            raise ConfigError(f"The server needs {', '.join(missing)}: pip install 'holdover[{extra}]'.")
        settings.check_cache()
    try:
        if isinstance(settings, RaySettings):
            from ..serve.ray.deployment import serve as serve_on_ray

            serve_on_ray(settings)
        else:
            from ..serve.launch import serve as serve_here

            serve_here(settings)
    except HoldoverError as error:
        fail(str(error), 1)


def _keyword(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _make_parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    """The flag of a setting; its help text is the documentation of the setting with the allowed values."""
    allowed = allowed_values(field)
    text = f"{field.metadata['doc']} ({allowed})" if allowed else field.metadata["doc"]
    text = text[0].upper() + text[1:] + "."
    default, hint = (list(field.default), list[str]) if isinstance(field.default, tuple) else (field.default, hint)
    option = typer.Argument(help=text) if field.name == "model" else typer.Option(help=text)
    return _keyword(field.name, default, Annotated[hint, option])


_HINTS = typing.get_type_hints(RaySettings)
_RAY = _keyword("ray", False, Annotated[bool, typer.Option("--ray", help="Serve with many replicas, on Ray.")])
_PARAMETERS = [*(_make_parameter(field, _HINTS[field.name]) for field in RaySettings.settings()), _RAY]

serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
serve.__doc__ = f"""Serve a model over HTTP, in the shape of OpenAI's image API, with a web page at /.

Clients must send a key if {API_KEYS} is set to a comma-separated list of keys.
"""
app.command(context_settings={"token_normalize_func": lambda flag: flag.replace("_", "-")})(serve)
