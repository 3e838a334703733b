"""What a caching method gives the runtime: a policy for each branch, a signal, a predictor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from ..config import Config
from ..grid import Grid
from ..models.family import Signal
from ..policies.base import Policy
from ..policies.static import AlwaysCompute
from ..predictors import Hold, Predictor
from .calls import Crossing
from .clock import Stepped
from .extracted import seam_of
from .packing import AS_IS, Packing
from .passes import Passes

if TYPE_CHECKING:
    from .unit import Unit

STANDARD = Passes()
HOLD = Hold()


@dataclass(frozen=True, slots=True)
class Computed:
    """What a method may look at after a computed forward."""

    unit: Unit
    branch: str
    step: int
    grid: Grid
    change: torch.Tensor | float | None
    residual: tuple[torch.Tensor, ...]
    output: Any


class Method(ABC):
    """One caching method with its settings; puts policy, predictor and signal together."""

    name: str
    holds = True
    observes = False
    follows = False
    reads_late = False
    packing: Packing = AS_IS

    def __init__(self, config: Config) -> None:
        self.config = config

    def crossing(self, unit: Unit) -> Crossing:
        """The way across this transformer; methods of one class share it."""
        return seam_of(unit)

    def passes(self, unit: Unit) -> Passes:
        """How the blocks of this transformer are run and held."""
        return STANDARD

    @property
    def declared_steps(self) -> int | None:
        """The number of steps where neither a scheduler nor the caller says it."""
        return None

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        """Check, before anything is changed, that the method can work on this transformer; returns notes."""
        return ()

    @abstractmethod
    def policy(self, unit: Unit, branch: str, grid: Grid) -> Policy:
        """The policy of one branch for one generation."""

    def predictor(self, unit: Unit, branch: str, grid: Grid) -> Predictor:
        """What a held step of one branch is made of, for one generation."""
        return HOLD

    def signal(self, unit: Unit) -> Signal | None:
        """The signal the policy needs, if it needs one."""
        return None

    def started(self) -> None:
        """A generation begins."""

    def observe(self, computed: Computed) -> None:
        """Called after each computed forward when `observes` is true."""

    def stepped(self, stepped: Stepped) -> None:
        """Called after each step of the scheduler when `follows` is true."""

    def finished(self) -> None:
        """A generation has ended."""


@dataclass(frozen=True)
class NoneConfig(Config):
    """No settings: nothing is held."""

    method: ClassVar[str] = "none"

    @property
    def batchable(self) -> bool:
        return True


class NoneMethod(Method):
    """Every forward runs as it is; it is only counted and timed."""

    name = "none"
    holds = False

    def __init__(self, config: NoneConfig | None = None) -> None:
        super().__init__(config or NoneConfig())

    def policy(self, unit: Unit, branch: str, grid: Grid) -> Policy:
        return AlwaysCompute()
