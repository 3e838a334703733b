"""The command line. Nothing here imports torch until a command needs it."""

from __future__ import annotations

from . import generation, serving  # noqa: F401  their commands register themselves with the application
from .application import app


def main() -> None:
    """Run the command line."""
    app()


__all__ = ["app", "main"]
