"""Bad input gets one clear line and exit code 2, never a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from ..errors import HoldoverError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Say what is wrong on the error output, in one line, and exit with 2."""
    try:
        yield
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        raise refused(f"{where}{error.strerror or error}") from None
    except (HoldoverError, ValueError) as error:
        raise refused(str(error)) from None


def refused(message: str) -> typer.Exit:
    """The exit for input that cannot be used."""
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()]
    typer.echo(f"Error: {' '.join(lines)}", err=True)
    return typer.Exit(2)
