"""What a caching method gives the engine: a policy and a predictor for each branch, and the signal the policy needs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol

import torch

from ..config import Config, ConfigT
from ..grid import Grid
from ..models.registry import Signal
from ..policies.base import AlwaysCompute, Policy
from ..predictors import Predictor
from ..stats import GenerationStats
from .blocks import BlockPasses, BlockRunner
from .clock import SchedulerStep
from .output import ExtractorRunner
from .parallel import Groups
from .signals import SignalReading
from .state import HOLD, BranchState, ComputedForward, ForwardCall, Outcome
from .storage import ON_DEVICE, Storage

if TYPE_CHECKING:
    from .install import CachedTransformer

BLOCK_PASSES = BlockPasses()


class Runner(Protocol):
    """Runs the forwards of one transformer, block by block or as a whole."""

    def run(self, call: ForwardCall) -> Outcome:
        """Run one forward, computed or held as `call.decide` says."""
        ...


class Method(ABC, Generic[ConfigT]):
    """One caching method with its settings."""

    name: str
    holds = True  # False: every forward runs as it is
    observes = False  # whether `observe` is called
    follows = False  # whether `on_scheduler_step` is called
    reads_late = False  # whether a signal is read after the decision, at computed steps only
    compares_computed = False  # whether a signal is compared with that of the last computed step, not of the last step
    needs_steps = False  # whether every step is computed where the number of steps is not known
    least_steps = 8  # with fewer, enabling gains nothing, and the engine says so; 0: it was measured, or asked for
    storage: Storage = ON_DEVICE

    def __init__(self, config: ConfigT) -> None:
        self.config = config

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        """What runs this transformer; shared by methods of one class."""
        return BlockRunner(transformer) if transformer.extractor is None else ExtractorRunner(transformer)

    def block_passes(self, transformer: CachedTransformer) -> BlockPasses:
        """How the blocks of this transformer are run and held."""
        return BLOCK_PASSES

    @property
    def generation_notes(self) -> tuple[str, ...]:
        """What to say about the running generation, known when its first branch starts."""
        return ()

    @property
    def declared_steps(self) -> int | None:
        """The number of steps where neither a scheduler nor the caller says it."""
        return None

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        """Check, before anything is changed, that the method can work on this transformer; returns notes."""
        return ()

    @abstractmethod
    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Policy:
        """The policy of one branch for one generation."""

    def predictor(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Predictor:
        """The predictor of one branch for one generation."""
        return HOLD

    def timestep_factor(self, step: int) -> float | None:
        """What the timestep argument is multiplied by at a computed step; None leaves it as it is."""
        return None

    def signal(self, transformer: CachedTransformer) -> Signal | None:
        """The signal the policy needs, if it needs one."""
        return None

    def read_signal(self, value: torch.Tensor, state: BranchState, groups: Groups) -> SignalReading:
        """Keep a signal, and start to read its change since the last reading of this branch."""
        return SignalReading(value, state.signal, groups)

    def on_start(self, stats: GenerationStats) -> None:
        """A generation starts, of which these are the statistics."""

    def observe(self, computed: ComputedForward) -> None:
        """Called after each computed forward when `observes` is true."""

    def on_scheduler_step(self, step: SchedulerStep) -> None:
        """Called after each step of the scheduler when `follows` is true."""

    def on_end(self) -> None:
        """A generation has ended, complete or not."""


@dataclass(frozen=True)
class NoneConfig(Config):
    """No settings: nothing is held."""

    method: ClassVar[str] = "none"

    @property
    def batchable(self) -> bool:
        return True


class NoneMethod(Method[NoneConfig]):
    """Runs every forward as it is; forwards are only counted and timed."""

    name = "none"
    holds = False

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> Policy:
        return AlwaysCompute()
