"""`holdover`: what there is and what it runs on."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from .. import __version__
from .calibrate import calibrate
from .compare import compare
from .failing import one_line_errors
from .generate import generate
from .loading import load_pipeline
from .models import models
from .serve import serve
from .tune import tune

app = typer.Typer(
    name="holdover",
    help="Diffusion transformers, several times faster: what earlier denoising steps computed is held over.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()
app.command()(calibrate)
app.command()(compare)
app.command()(generate)
app.command()(models)
app.command()(serve)
app.command()(tune)


def _version(asked: bool) -> None:
    if asked:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Show it.")] = False,
) -> None:
    """Options that every command has."""


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="One method; all of them without it.")] = None,
) -> None:
    """The caching methods and their settings, with defaults and allowed values."""
    from ..config import allowed_values
    from ..errors import ConfigError
    from ..selector import config_class
    from ..selector import methods as known

    try:
        configs = [(method, config_class(method)) for method in ([name] if name else known())]
    except ConfigError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    for method, config in configs:
        table = Table("setting", "default", "allowed", "what it does", title=method, title_justify="left")
        for field in config.settings():
            table.add_row(field.name, repr(field.default), allowed_values(field), field.metadata.get("doc", ""))
        console.print(table)


@app.command()
def info(
    model: Annotated[str | None, typer.Option(help="Show its cut too: emoji, a folder, or a checkpoint's id.")] = None,
) -> None:
    """Versions, the device and a model's cut: what a bug report needs."""
    import torch

    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    packages = ("torch", "diffusers", "cache-dit", "transformers", "accelerate", "safetensors")
    rows = {
        "holdover": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **{package: _installed(package) for package in packages},
        "device": device,
    }
    for label, value in rows.items():
        console.print(f"{label:<13}{value}", highlight=False, soft_wrap=True)
    if model is not None:
        with one_line_errors():
            _print_cut(load_pipeline(model))


def _print_cut(pipe: Any) -> None:
    """Where the cut through each transformer runs, found and replayed in a generation of two steps."""
    from ..api import enable

    pipe.set_progress_bar_config(disable=True)
    with enable(pipe, "mag_cache", mag_ratios=[1.0, 1.0]) as cache:
        pipe("red apple", num_inference_steps=2)
        for name, report in cache.reports().items():
            console.print(f"{name:<13}{report}", highlight=False, soft_wrap=True)


def _installed(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
