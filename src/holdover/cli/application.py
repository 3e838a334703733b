"""The application with what its commands share, and the commands that show what there is: methods, models, info."""

from __future__ import annotations

import importlib.metadata
import platform
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table

from .. import __version__
from ..errors import HoldoverError, HoldoverWarning

app = typer.Typer(
    name="holdover",
    help="Diffusion transformers, several times faster: what earlier denoising steps computed is held over.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()


def print_line(text: object) -> None:
    """Print one line without wrapping and highlighting."""
    console.print(str(text), highlight=False, soft_wrap=True)


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print errors about input, and warnings of holdover, in one line each to the error output; exit with code 2."""
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning
            yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    except (HoldoverError, ValueError) as error:
        fail(str(error))


def _print_warning(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
    from tqdm import tqdm

    text = f"Warning: {' '.join(str(message).split())}"
    if not issubclass(category, HoldoverWarning):
        text = warnings.formatwarning(message, category, *where[:2]).rstrip()
    tqdm.write(text, file=sys.stderr)  # on a line of its own, above a progress bar


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message in one line and exit."""
    typer.echo(f"Error: {' '.join(message.split())}", err=True)
    raise typer.Exit(code) from None


def _print_version(requested: bool) -> None:
    if requested:
        console.print(__version__)
        raise typer.Exit


_VERSION = typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")


@app.callback()
def root(version: Annotated[bool, _VERSION] = False) -> None:
    """Options of the application itself."""


@app.command()
def methods(name: Annotated[str | None, typer.Argument(help="A method; default: all.")] = None) -> None:
    """List the caching methods and their settings, with defaults and allowed values."""
    from .. import selector

    with one_line_errors():
        found = {method: selector.describe_settings(method) for method in ([name] if name else selector.methods())}
    for method, settings in found.items():
        table = Table("setting", "default", "allowed", "what it does", title=method, title_justify="left")
        for setting, words in settings.items():
            table.add_row(setting, *words)
        console.print(table)


@app.command()
def models(name: Annotated[str | None, typer.Argument(help="A transformer class; default: all.")] = None) -> None:
    """List the transformer classes that were tested: streams, segments, signals and shipped constants."""
    from ..support import support_of, supported

    if name is not None:
        with one_line_errors():
            print_line(support_of(name).explain())
        return
    rows = supported()
    headers = ("streams", "segments", "TeaCache signal", "coefficients", "MagCache ratios", "cache-dit", "diffusers")
    table = Table(Column("class", overflow="fold", min_width=20), *headers)
    for row in rows:
        constants = [str(len(found) or "measure") for found in (row.coefficients, row.ratios)]
        blocks = (str(len(row.streams)), str(row.segments), ", ".join(row.signals))
        table.add_row(row.name, *blocks, *constants, "yes" if row.cache_dit else "refused", row.verified)
    console.print(table)
    replay, cached = sum(bool(row.verified) for row in rows), sum(bool(row.cache_dit) for row in rows)
    print_line(f"{replay} of {len(rows)} classes replay exactly; {cached} run under cache-dit.")


@app.command()
def info(
    model: Annotated[
        str | None, typer.Option(help="Show its blocks too: emoji, emoji-motion, a folder, or a checkpoint's id.")
    ] = None,
) -> None:
    """Show versions, the device and the blocks of a model: what a bug report needs."""
    import torch

    rows = {"holdover": __version__, "python": f"{sys.version.split()[0]} on {platform.platform()}"}
    for package in ("torch", "diffusers", "cache-dit", "transformers", "accelerate", "safetensors"):
        try:
            rows[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            rows[package] = "not installed"
    gpu = torch.cuda.is_available()
    rows["device"] = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"
    for label, value in rows.items():
        print_line(f"{label:<13}{value}")
    if model is None:
        return
    with one_line_errors():
        from ..api import enable
        from ..loading import ModelSettings, load_pipeline

        pipe = load_pipeline(ModelSettings(model=model))
        pipe.set_progress_bar_config(disable=True)
        warnings.filterwarnings("ignore", "With 2 steps there is little to hold")  # they are only to check the model
        with enable(pipe, "taylor_seer", quantity="residuals") as cache:
            pipe("red apple", num_inference_steps=2)
            for name, report in cache.reports().items():
                print_line(f"{name:<13}{report}")
