"""`python -m holdover.cli`."""

from . import main

main()
