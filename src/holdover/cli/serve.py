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

_SERVER = ("fastapi", "prometheus_client", "uvicorn")


def serve(ray: bool = False, **flags: Any) -> None:
    """Checks the flags before anything is loaded, then serves until it is told to stop."""
    try:
        settings = RaySettings(**flags) if ray else _alone(flags)
        _check_installed(ray)
        settings.check_cache()
    except ConfigError as error:
        raise _end(error, 2) from None
    try:
        _serve_until_stopped(settings)
    except HoldoverError as error:
        raise _end(error, 1) from None


def _serve_until_stopped(settings: Settings) -> None:
    if isinstance(settings, RaySettings):
        from ..serve.ray import serve as serve_many

        serve_many(settings)
    else:
        from ..serve.launch import serve as serve_one

        serve_one(settings)


def _alone(flags: dict[str, Any]) -> Settings:
    """The settings of one process, which has no use for those of many."""
    for field in RaySettings.settings():
        if field.name not in Settings.field_names() and flags.pop(field.name) != field.default:
            raise ConfigError(f"--{field.name.replace('_', '-')} is for many replicas: say --ray as well.")
    return Settings(**flags)


def _end(error: Exception, code: int) -> typer.Exit:
    typer.echo(f"Error: {error}", err=True)
    return typer.Exit(code)


def _check_installed(ray: bool) -> None:
    needed, extra = ((*_SERVER, "ray"), "ray") if ray else (_SERVER, "server")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"The server needs {', '.join(missing)}: pip install 'holdover[{extra}]'.")


def _parameter(field: dataclasses.Field[Any], hint: Any) -> inspect.Parameter:
    allowed = allowed_values(field)
    text = f"{field.metadata['doc']} ({allowed})" if allowed else field.metadata["doc"]
    text = text[0].upper() + text[1:] + "."
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    kind = list[str] if isinstance(field.default, tuple) else hint
    flag = typer.Argument(help=text) if field.name == "model" else typer.Option(help=text)
    return inspect.Parameter(
        field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, flag]
    )


_RAY = inspect.Parameter(
    "ray",
    inspect.Parameter.KEYWORD_ONLY,
    default=False,
    annotation=Annotated[bool, typer.Option("--ray", help="Serve with many replicas, on Ray.")],
)
_HINTS = typing.get_type_hints(RaySettings)
_PARAMETERS = [*(_parameter(field, _HINTS[field.name]) for field in RaySettings.settings()), _RAY]

serve.__signature__ = inspect.Signature(_PARAMETERS)  # type: ignore[attr-defined]
serve.__annotations__ = {parameter.name: parameter.annotation for parameter in _PARAMETERS}
serve.__doc__ = f"""Serve a model over HTTP, in the shape of OpenAI's image API, with a page at /.

Clients must send a key where {API_KEYS} names some, apart by commas.
"""
