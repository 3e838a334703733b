"""Which family a transformer belongs to."""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from torch import nn

from . import families
from .family import Family, Signal

_registered: dict[str, Family] = {}


def first_input(block: nn.Module, arguments: dict[str, object]) -> object:
    """The default signal: the hidden states that enter the first block."""
    return arguments.get("hidden_states", next(iter(arguments.values())))


INPUT = Signal("input", of_block=first_input)  # type: ignore[arg-type]
ANY = Family("any", (), signals=(INPUT,))


@cache
def _shipped() -> dict[str, Family]:
    """Every `FAMILY` or `FAMILIES` declared in models/families, by class name."""
    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        for family in module.FAMILIES:
            found.update(dict.fromkeys(family.classes, family))
    return found


def register_family(family: Family) -> None:
    """Declare a family for classes that are not in diffusers, or override a shipped one."""
    _registered.update(dict.fromkeys(family.classes, family))


def unregister_family(family: Family) -> None:
    """Take a declaration back."""
    for name in family.classes:
        _registered.pop(name, None)


def family_of(module: nn.Module) -> Family:
    """The family declared for the module's class or the nearest of its bases; `ANY` where there is none."""
    for cls in type(module).__mro__:
        family = _registered.get(cls.__name__) or _shipped().get(cls.__name__)
        if family is not None:
            return family
    return ANY


def families_declared() -> dict[str, Family]:
    """All declarations by class name, registered ones over shipped ones."""
    return {**_shipped(), **_registered}
