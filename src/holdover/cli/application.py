"""The application with what its commands share, and the commands that show what there is: methods, models, info.

Nothing in this package imports torch until a command needs it.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Column, Table

from .. import __version__
from ..errors import ConfigError, HoldoverError, did_you_mean
from ..zoo import MODELS

app = typer.Typer(
    name="holdover",
    help="Diffusion transformers, several times faster: what earlier denoising steps computed is held over.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
console = Console()
ModelOption = Annotated[str, typer.Option("--model", help="emoji, a folder, or the id of a checkpoint.")]


def print_line(text: object) -> None:
    """Print one line without wrapping and highlighting."""
    console.print(str(text), highlight=False, soft_wrap=True)


# Shared by the commands.


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Print errors about input in one line to the error output, and exit with code 2."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        fail(f"{where}{error.strerror or error}")
    except (HoldoverError, ValueError) as error:
        fail(str(error))


def fail(message: str, code: int = 2) -> NoReturn:
    """Print an error message in one line and exit."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    typer.echo(f"Error: {' '.join(lines)}", err=True)
    raise typer.Exit(code) from None


def check_positive(**values: int) -> None:
    """Refuse numbers below 1; the names are those of the flags."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}.")


def expand_prompt(model: str, prompt: str) -> str:
    """The prompt, if it is not empty; for the emoji model with the name of its style expanded to its phrase."""
    if not prompt.strip():
        raise ConfigError("The prompt is empty; say what to generate, for example 'red apple, glossy 3d style'.")
    if model not in MODELS:
        return prompt
    from ..zoo.emoji import STYLES, caption

    subject, comma, style = (part.strip() for part in prompt.rpartition(","))
    if comma and (style in STYLES or style.endswith("style")):
        return caption(subject, style)
    return prompt


def load_pipeline(model: str) -> Any:
    """Load a model of the package, a folder, or a checkpoint by its id; onto the GPU where there is one."""
    if model not in MODELS and not Path(model).is_dir() and "/" not in model:
        hint = did_you_mean(model, MODELS)
        raise ConfigError(f"There is no model {model!r}.{hint} Give 'emoji', a folder or an id like 'owner/name'.")
    with _quiet_loading():
        import torch
        from diffusers import DiffusionPipeline

        from ..zoo import load
        from ..zoo.emoji import EmojiPipeline

        gpu = torch.cuda.is_available()
        if model in MODELS:
            return load(model).to("cuda" if gpu else "cpu")
        dtype, folder = torch.bfloat16 if gpu else torch.float32, Path(model)
        try:
            index = folder / "model_index.json"
            emoji = index.exists() and json.loads(index.read_text("utf-8")).get("_class_name") == EmojiPipeline.__name__
            pipe = (EmojiPipeline if emoji else DiffusionPipeline).from_pretrained(
                model, dtype=dtype, local_files_only=folder.is_dir(), use_safetensors=True
            )
        except (OSError, ValueError, AttributeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"Cannot load {model!r}: {first}") from None
        return pipe.to("cuda" if gpu else "cpu")


@contextmanager
def _quiet_loading() -> Iterator[None]:
    """Hide the progress bars of loading and the log messages about errors, which are raised too."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)
    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(level)
        diffusers_logging.enable_progress_bar()
        transformers_logging.enable_progress_bar()


# Commands.


def _print_version(requested: bool) -> None:
    if requested:
        console.print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Options of the application itself."""


@app.command()
def methods(
    name: Annotated[str | None, typer.Argument(help="A method; default: all.")] = None,
) -> None:
    """List the caching methods and their settings, with defaults and allowed values."""
    from .. import selector
    from ..config import allowed_values

    with one_line_errors():
        configs = [(method, selector.config_class(method)) for method in ([name] if name else selector.methods())]
    for method, config in configs:
        table = Table("setting", "default", "allowed", "what it does", title=method, title_justify="left")
        for field in config.settings():
            table.add_row(field.name, repr(field.default), allowed_values(field), field.metadata.get("doc", ""))
        console.print(table)


@app.command()
def models(
    name: Annotated[str | None, typer.Argument(help="A transformer class; default: all.")] = None,
) -> None:
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
        table.add_row(
            row.name,
            str(len(row.streams)),
            str(row.segments),
            ", ".join(row.signals),
            str(len(row.coefficients) or "measure"),
            str(len(row.ratios) or "measure"),
            "yes" if row.cache_dit else "refused",
            row.verified,
        )
    console.print(table)
    replay, cached = sum(bool(row.verified) for row in rows), sum(bool(row.cache_dit) for row in rows)
    print_line(f"{replay} of {len(rows)} classes replay exactly; {cached} run under cache-dit.")


@app.command()
def info(
    model: Annotated[str | None, typer.Option(help="Show its cut too: emoji, a folder, or a checkpoint's id.")] = None,
) -> None:
    """Show versions, the device and the cut of a model: what a bug report needs."""
    import torch

    packages = {}
    for package in ("torch", "diffusers", "cache-dit", "transformers", "accelerate", "safetensors"):
        try:
            packages[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            packages[package] = "not installed"
    rows = {
        "holdover": __version__,
        "python": f"{sys.version.split()[0]} on {platform.platform()}",
        **packages,
        "device": (
            torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
        ),
    }
    for label, value in rows.items():
        print_line(f"{label:<13}{value}")
    if model is None:
        return
    with one_line_errors():
        from ..api import enable

        pipe = load_pipeline(model)
        pipe.set_progress_bar_config(disable=True)
        with enable(pipe, "mag_cache", mag_ratios=[1.0, 1.0]) as cache:  # the cut is verified in the first generation
            pipe("red apple", num_inference_steps=2)
            for name, report in cache.reports().items():
                print_line(f"{name:<13}{report}")
