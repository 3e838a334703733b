"""What the commands share: options of the model, declared once as settings, and checks before work."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import shutil
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from ..config import allowed_values
from ..errors import ConfigError
from ..loading import CallSettings
from .application import one_line_errors


def make_parameter(field: dataclasses.Field[Any], hint: Any, argument: bool = False) -> inspect.Parameter:
    """The option (or argument) of a setting; its help text is the documentation with the allowed values."""
    allowed = allowed_values(field)
    text = f"{field.metadata['doc']} ({allowed})" if allowed else field.metadata["doc"]
    text = text[0].upper() + text[1:] + "."
    default, hint = (list(field.default), list[str]) if isinstance(field.default, tuple) else (field.default, hint)
    option = typer.Argument(help=text) if argument else typer.Option(help=text)
    return keyword_parameter(field.name, default, Annotated[hint, option])


def keyword_parameter(name: str, default: Any, annotation: Any) -> inspect.Parameter:
    """A keyword-only parameter of a command."""
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def set_parameters(command: Callable[..., Any], parameters: list[inspect.Parameter]) -> None:
    """Give a function the signature from which typer makes the options."""
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}


def takes_model(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each of `CallSettings`; it gets them, checked, as its parameter `model`.

    Errors about input are printed in one line.
    """
    hints = typing.get_type_hints(command, include_extras=True)
    own = [
        parameter.replace(annotation=hints[parameter.name])
        for parameter in inspect.signature(command).parameters.values()
        if parameter.name != "model"
    ]
    types = typing.get_type_hints(CallSettings)

    @functools.wraps(command)
    def run(**given: Any) -> None:
        with one_line_errors():
            try:
                model = CallSettings(**{name: given.pop(name) for name in CallSettings.field_names()})
                model.check_model()
                command(**given, model=model)
            except ConfigError as error:
                raise ConfigError(re.sub(r"CallSettings\.(\w+)", _as_flag, str(error))) from error

    set_parameters(run, [*own, *(make_parameter(field, types[field.name]) for field in CallSettings.settings())])
    return run


def _as_flag(name: re.Match[str]) -> str:
    return "--" + name[1].replace("_", "-")


def check_range(least: float, most: float = float("inf"), **values: float | None) -> None:
    """Refuse numbers outside of a range; the names are those of the flags."""
    for name, value in values.items():
        if value is not None and not least <= value <= most:
            limits = f"{least:g} or more" if most == float("inf") else f"between {least:g} and {most:g}"
            raise ConfigError(f"--{name.replace('_', '-')} must be {limits}, not {value:g}.")


def check_writable(folder: Path) -> None:
    """Refuse a folder that cannot be written or created; creates nothing."""
    for place in (folder.absolute(), *folder.absolute().parents):
        if place.exists():
            reason = None if os.access(place, os.W_OK | os.X_OK) else "permission denied"
            if not place.is_dir():
                reason = f"{place} is a file"
            if reason is not None:
                raise ConfigError(f"Cannot write to {folder}: {reason}.")
            return


def check_room(folder: Path, needed: float) -> None:
    """Refuse to start what the disk has no room for; `needed` is an estimate in bytes."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        room, least = (f"{size / 1e6:.0f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB" for size in (free, needed))
        raise ConfigError(f"The disk of {folder} has {room} of room, and about {least} are needed.")
