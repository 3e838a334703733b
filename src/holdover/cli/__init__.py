"""The command line. Nothing here imports torch until a command needs it."""

from . import calibration, generation, serving  # noqa: F401  their commands register themselves with the application
from .application import app

main = app
__all__ = ["app", "main"]
