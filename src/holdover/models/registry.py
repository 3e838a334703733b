"""What is declared about a transformer class: its family, and for untraceable models its extractor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..context import CacheContext
from ..errors import ConfigError, did_you_mean
from ..grid import Grid

Arguments = Mapping[str, Any]
BlockSignal = Callable[[nn.Module, Arguments], torch.Tensor]
TimeSignal = Callable[[nn.Module, torch.Tensor], torch.Tensor]
InputSignal = Callable[[Arguments, float], torch.Tensor]
ResidualSignal = Callable[[torch.Tensor], torch.Tensor]
Extractor = Callable[..., CacheContext]


@dataclass(frozen=True)
class Signal:
    """The tensor a policy compares between steps. Give exactly one of the functions.

    - `of_block(block, arguments)` computes it from the first block of the stack and that call's arguments by name.
    - `of_time(transformer, timesteps)` computes it from the timesteps alone, one row per timestep; the whole schedule
      is then known before step 0.
    - `of_input(arguments, noise)` computes it from the arguments of the forward by name and the noise level of the
      step, before anything runs.
    - `of_residual(residual)` computes it from what the first block of the stack adds to the main stream; that block
      then runs at every step.
    """

    name: str
    of_block: BlockSignal | None = None
    of_time: TimeSignal | None = None
    of_input: InputSignal | None = None
    of_residual: ResidualSignal | None = None

    def __post_init__(self) -> None:
        if [self.of_block, self.of_time, self.of_input, self.of_residual].count(None) != 3:
            raise ValueError(f"Signal {self.name!r} needs exactly one of of_block, of_time, of_input and of_residual.")


def handle_all_steps(pipeline: Any, transformer: nn.Module, grid: Grid) -> Grid:
    """Default of `Family.range_of`: the transformer handles every step."""
    return grid


@dataclass(frozen=True)
class Family:
    """One model family: its transformer classes and what must be declared about them.

    - `signals`: TeaCache signals; the first one is the default.
    - `head`: the list at whose first block the signal is read, if refiner stacks come before it.
    - `conditioning`: the forward arguments that distinguish branches, if their names do not show it.
    - `must_compute(arguments)`: the reason why this pass must not be held (it writes a KV cache, for example), or None.
    - `range_of(pipeline, transformer, grid)`: the steps this transformer handles, if a pipeline has two experts.
    - `time_runs_up`: the model receives 1 - t instead of t.
    - `one_forward_per_step`: no argument tells the step; each forward is the next step of what refresh() declares.
    - `notes`: other facts for the model tables of the documentation.
    """

    name: str
    classes: tuple[str, ...]
    signals: tuple[Signal, ...] = ()
    head: str | None = None
    conditioning: tuple[str, ...] = ()
    must_compute: Callable[[Arguments], str | None] | None = None
    range_of: Callable[[Any, nn.Module, Grid], Grid] = handle_all_steps
    time_runs_up: bool = False
    one_forward_per_step: bool = False
    notes: str = field(default="", compare=False)

    def signal(self, name: str | None = None) -> Signal | None:
        """Return the signal of that name, or the default signal; None if the family declares none."""
        if name is None:
            return self.signals[0] if self.signals else None
        return next((s for s in self.signals if s.name == name), None)


def read_block_input(block: nn.Module, arguments: Arguments) -> torch.Tensor:
    """Return the hidden states that enter a block."""
    hidden_states: torch.Tensor = arguments.get("hidden_states", next(iter(arguments.values())))
    return hidden_states


INPUT_SIGNAL = Signal("input", of_block=read_block_input)
DEFAULT_FAMILY = Family("any", (), signals=(INPUT_SIGNAL,))

FAMILY_REGISTRY: dict[str, Family] = {}
EXTRACTOR_REGISTRY: dict[str, Extractor] = {}


def register_family(family: Family) -> None:
    """Declare a family for classes that are not in diffusers, or override a shipped one."""
    FAMILY_REGISTRY.update(dict.fromkeys(family.classes, family))


def unregister_family(family: Family) -> None:
    """Remove a registered family; its classes get the shipped or the default family again."""
    for name in family.classes:
        FAMILY_REGISTRY.pop(name, None)


def get_family(module: nn.Module) -> Family:
    """Return the family of the module's class or its nearest base class; `DEFAULT_FAMILY` if none is declared."""
    known = list_families()
    return next((known[cls.__name__] for cls in type(module).__mro__ if cls.__name__ in known), DEFAULT_FAMILY)


def list_families() -> dict[str, Family]:
    """Return all declared families by class name; a registered family overrides a shipped one."""
    from .families import FAMILIES  # imported here because the table is written in terms of this module

    return {name: family for family in FAMILIES for name in family.classes} | FAMILY_REGISTRY


def register_extractor(transformer_cls_name: str, extractor_fn: Extractor) -> None:
    """Use `extractor_fn(module, *args, **kwargs) -> CacheContext` for transformers of that class."""
    if not callable(extractor_fn):
        raise TypeError(f"An extractor must be a function, not {type(extractor_fn).__name__}.")
    EXTRACTOR_REGISTRY[transformer_cls_name] = extractor_fn


def unregister_extractor(transformer_cls_name: str) -> None:
    """Remove the extractor of that class, so that it is traced again."""
    EXTRACTOR_REGISTRY.pop(transformer_cls_name, None)


def get_extractor(transformer_cls_name: str) -> Extractor:
    """Return the extractor registered for a class name."""
    if transformer_cls_name not in EXTRACTOR_REGISTRY:
        hint = did_you_mean(transformer_cls_name, EXTRACTOR_REGISTRY)
        raise ConfigError(
            f"No extractor is registered for {transformer_cls_name!r}; a model that can be traced needs none.{hint}"
        )
    return EXTRACTOR_REGISTRY[transformer_cls_name]


def find_extractor(transformer: nn.Module) -> Extractor | None:
    """Return the extractor registered for the transformer's class or its nearest base class, or None."""
    names = (cls.__name__ for cls in type(transformer).__mro__)
    return next((EXTRACTOR_REGISTRY[name] for name in names if name in EXTRACTOR_REGISTRY), None)
