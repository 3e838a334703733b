"""cache-dit's contexts of one branch in one generation: told the step, never left to count it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from cache_dit.caching import CachedContext, CachedContextManager

from ..errors import UnsupportedModelError
from ..policies.base import NOTHING_HELD, OFF, Decision
from ..runtime.exchange import change_over
from ..runtime.ranks import ALONE, Groups
from ..runtime.residuals import Held

WARM_UP = Decision(True, "warm-up")
MASK_COMPUTES = Decision(True, "the mask computes this step")
MASK_HOLDS = Decision(False, "the mask holds this step")
CHANGED = Decision(True, "the first blocks changed too much")
UNCHANGED = Decision(False, "the first blocks changed little")
ENOUGH = Decision(True, "as many steps as allowed are held")
NEVER = Decision(True, "a pass of this kind is never held")


class StepContextManager(CachedContextManager):  # type: ignore[misc]
    """The contexts of one branch, one for each list of blocks, at a step that is known."""

    def __init__(self, name: str = "holdover") -> None:
        super().__init__(name=name)
        self.replaying = False
        self.groups = ALONE
        self.decisions: dict[str, Decision] = {}
        self._step = -1
        self._missed = 0

    @property
    def contexts(self) -> tuple[CachedContext, ...]:
        """The context of each list."""
        return tuple(self._cached_context_manager.values())

    def begin(self, step: int) -> None:
        """The forward that comes is at this step, counted from where the contexts began."""
        self._missed, self._step = max(step - self._step - 1, 0), step
        self.decisions.clear()
        for context in self.contexts:
            context.executed_steps = context.transformer_executed_steps = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mark_step_begin(self) -> None:
        """Move to the step, with the calibrators over the steps this branch was not run at."""
        if self.replaying:
            return
        super().mark_step_begin()
        for calibrator in self.current_context.get_calibrators():
            for _ in range(self._missed if calibrator is not None else 0):
                calibrator.mark_step_begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_cached_step(self) -> None:
        """Count a held step; a replayed one is none."""
        if not self.replaying:
            super().add_cached_step()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def can_cache(
        self,
        states_tensor: torch.Tensor,
        parallelized: bool = False,
        threshold: float | None = None,
        prefix: str = "Fn",
    ) -> bool:
        """Ask the library, and note what it decided and why."""
        if self.replaying:
            return True
        context = self.current_context
        if context.name in self.decisions:
            raise UnsupportedModelError(f"The model runs {prefix.removesuffix('_Fn_residual')} twice in one forward.")
        held = bool(context.buffers) and super().can_cache(states_tensor, False, threshold, prefix)
        self.decisions[context.name] = _reason(context, held)
        return held

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def similarity(
        self,
        before: torch.Tensor,
        now: torch.Tensor,
        *,
        threshold: float,
        parallelized: bool = False,
        prefix: str = "Fn",
    ) -> bool:
        """Compare over the ranks that must decide alike; the library would average over every rank there is."""
        if not self.groups.in_step or not 0.0 < threshold < 1.0:
            return bool(super().similarity(before, now, threshold=threshold, parallelized=parallelized, prefix=prefix))
        change = float(change_over(self.groups, now, before))
        self.add_residual_diff(change)
        return change < threshold

    def decided(self) -> Decision:
        """What was decided for the step: held where any list was, with the lists named where they differ."""
        made = list(self.decisions.values())
        held = [name for name, decision in self.decisions.items() if not decision.compute]
        if not held or len(held) == len(made):
            return made[0] if made else NEVER
        lists = ", ".join(name.rpartition("_")[0] for name in held)
        return Decision(False, f"{self.decisions[held[0]].reason}, in {lists} only")


def _reason(context: CachedContext, held: bool) -> Decision:
    masked = context.cache_config.steps_computation_mask is not None
    if held:
        return MASK_HOLDS if masked and context.cache_config.steps_computation_policy == "static" else UNCHANGED
    if context.is_in_warmup():
        return WARM_UP
    if not context.buffers:
        return NOTHING_HELD
    if context.is_in_full_compute_steps():
        return MASK_COMPUTES
    if str(context.get_current_step()) in context.residual_diffs:
        return CHANGED
    return OFF if context.get_residual_diff_threshold() <= 0 else ENOUGH


@dataclasses.dataclass(frozen=True)
class Restart:
    """Where in a generation everything begins anew: at one step, at each multiple of it, or nowhere."""

    step: int | None
    repeat: bool

    def origin(self, step: int) -> int:
        """The step from which this one is counted."""
        if not self.step or step < self.step:
            return 0
        return step - step % self.step if self.repeat else self.step


class BranchContexts:
    """What cache-dit remembers of one branch: made anew when a generation begins, or when it no longer fits."""

    def __init__(
        self,
        manager: type[StepContextManager],
        contexts: Sequence[dict[str, Any]],
        restart: Restart,
        first: int,
        groups: Groups = ALONE,
    ) -> None:
        self._manager_class, self._kwargs, self._restart, self._first = manager, contexts, restart, first
        self._groups = groups
        self._manager: StepContextManager | None = None
        self._origin = 0
        self._anchor: int | None = None

    @property
    def anchor(self) -> int | None:
        """The step whose result may be held; without one, nothing is remembered."""
        return self._anchor

    @anchor.setter
    def anchor(self, step: int | None) -> None:
        self._anchor = step
        if step is None:
            self._manager = None

    def at(self, step: int) -> StepContextManager:
        """The contexts for a step of the generation; they count from the first this transformer runs."""
        step -= self._first
        origin = self._restart.origin(step)
        if self._manager is None or origin != self._origin:
            self._manager, self._origin = self._made(), origin
        self._manager.begin(step - origin)
        return self._manager

    def _made(self) -> StepContextManager:
        manager = self._manager_class()
        manager.groups = self._groups
        for kwargs in self._kwargs:
            manager.new_context(**kwargs)
        return manager

    def decided(self) -> Decision:
        """What the library decided for the step that has just run."""
        return NEVER if self._manager is None else self._manager.decided()

    def held(self) -> HeldContexts:
        """What is remembered now."""
        return HeldContexts(() if self._manager is None else self._manager.contexts)


class HeldContexts(Held):
    """The buffers of some contexts, to be counted: the library itself adds and extrapolates them."""

    def __init__(self, contexts: Sequence[CachedContext]) -> None:
        self._contexts = contexts

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._tensors())

    @property
    def nbytes(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._tensors()}.values())

    def mapped(self, change: Callable[[Any], Any]) -> HeldContexts:
        return self

    def mixed(self, terms: Sequence[tuple[float, HeldContexts]]) -> HeldContexts:
        raise TypeError("cache-dit extrapolates what it holds by itself.")

    def _tensors(self) -> list[torch.Tensor]:
        found = [value for context in self._contexts for value in context.buffers.values()]
        for context in self._contexts:
            for calibrator in context.get_calibrators():
                states = [] if calibrator is None else calibrator.states.values()
                found += [t for state in states for derivatives in state.state.values() for t in derivatives]
        return [value for value in found if isinstance(value, torch.Tensor)]
