"""cache-dit's contexts of one branch in one generation, and the policy that reports what they decide.

The library counts forwards to find the step and the branch. Here both are known: each branch has contexts of its own,
and they are set to the step before the forward runs.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from cache_dit.caching import CachedContext, CachedContextManager

from ..errors import UnsupportedModelError
from ..models.inputs import iter_tensors
from ..policies.base import NOTHING_HELD, OFF, Decision

NEVER_HELD = Decision(True, "a pass of this kind is never held")

Distance = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class StepContextManager(CachedContextManager):  # type: ignore[misc]
    """The library's contexts of one branch, one for each list of blocks, set to a known step."""

    def __init__(self, name: str = "holdover") -> None:
        super().__init__(name=name)
        self.replaying = False  # while true, the step just computed is held and nothing is counted
        self.distance: Distance | None = None  # compares residuals where several ranks must decide alike
        self.decisions: dict[str, Decision] = {}
        self.diffs: list[float] = []  # the residual differences of all steps
        self._step, self._skipped = -1, 0

    def set_step(self, step: int) -> None:
        """Set the step of the next forward, counted from the first step of these contexts."""
        self._skipped, self._step = max(step - self._step - 1, 0), step
        self.decisions.clear()
        for context in self._cached_context_manager.values():
            context.executed_steps = context.transformer_executed_steps = step

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def mark_step_begin(self) -> None:
        """Begin the step; calibrators also advance over steps at which this branch did not run."""
        if self.replaying:
            return
        super().mark_step_begin()
        for calibrator in filter(None, self.current_context.get_calibrators()):
            for _ in range(self._skipped):
                calibrator.mark_step_begin()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def add_cached_step(self) -> None:
        if not self.replaying:
            super().add_cached_step()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def can_cache(self, states_tensor: torch.Tensor, parallelized: bool = False, *, prefix: str = "Fn") -> bool:
        """Let the library decide, and record its decision and the reason."""
        if self.replaying:
            return True
        context = self.current_context
        if context.name in self.decisions:
            raise UnsupportedModelError(f"The model runs {prefix.removesuffix('_Fn_residual')} twice in one forward.")
        held = bool(context.buffers) and super().can_cache(states_tensor, prefix=prefix)
        self.decisions[context.name] = _decision(context, held)
        return held

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def similarity(self, before: torch.Tensor, now: torch.Tensor, *, threshold: float, **options: Any) -> bool:
        """Compare over the ranks that must decide alike; the library would average over all ranks."""
        measured = 0.0 < threshold < 1.0
        if self.distance is None or not measured:
            similar = bool(super().similarity(before, now, threshold=threshold, **options))
        else:
            change = float(self.distance(now, before))
            self.add_residual_diff(change)
            similar = change < threshold
        if measured:
            context = self.current_context
            self.diffs.append(float(context.residual_diffs[str(context.get_current_step())]))
        return similar

    @contextlib.contextmanager
    def replay(self) -> Iterator[None]:
        """Hold the step just computed; calibrators that change when they extrapolate are set back afterwards."""
        states = self._calibrator_states()
        before = [dict(vars(state)) for state in states]
        self.replaying = True
        try:
            yield
        finally:
            self.replaying = False
            for state, values in zip(states, before, strict=True):
                vars(state).update(values)

    def decision(self) -> Decision:
        """The decision of the last step: held if any list was held; the reason names the lists if they differ."""
        held = [name for name, decision in self.decisions.items() if not decision.compute]
        if not held or len(held) == len(self.decisions):
            return next(iter(self.decisions.values()), NEVER_HELD)
        lists = ", ".join(name.rpartition("_")[0] for name in held)
        return Decision(False, f"{self.decisions[held[0]].reason}, in {lists} only")

    def tensors(self) -> list[torch.Tensor]:
        """Every tensor the contexts keep: residuals, and what the calibrators extrapolate from."""
        contexts = self._cached_context_manager.values()
        kept = [context.buffers for context in contexts] + [vars(state) for state in self._calibrator_states()]
        return list(iter_tensors(kept))

    def _calibrator_states(self) -> list[Any]:
        """The state of each stream of each calibrator."""
        contexts = self._cached_context_manager.values()
        calibrators = [c for context in contexts for c in context.get_calibrators() if c is not None]
        return [state for calibrator in calibrators for state in calibrator.states.values()]


@functools.cache
def step_manager_class(base: Any) -> type[StepContextManager]:
    """A StepContextManager that does everything else as `base`, the manager class of an adapter, does."""
    made: type[StepContextManager] = StepContextManager
    if not issubclass(base, CachedContextManager):
        raise UnsupportedModelError(
            f"{base.__name__} is not a CachedContextManager: of the cache-dit library's methods only DBCache is "
            "supported."
        )
    if issubclass(base, StepContextManager):
        made = base
    elif base is not CachedContextManager:
        made = type(base.__name__, (StepContextManager, base), {"__module__": base.__module__})
    return made


def _decision(context: CachedContext, held: bool) -> Decision:
    """The library's decision with its reason, read from the context it has just updated."""
    config = context.cache_config
    if held:
        static = config.steps_computation_mask is not None and config.steps_computation_policy == "static"
        return Decision(False, "the mask holds this step" if static else "the first blocks changed little")
    if context.is_in_warmup():
        return Decision(True, "warm-up")
    if not context.buffers:
        return NOTHING_HELD
    if context.is_in_full_compute_steps():
        return Decision(True, "the mask computes this step")
    if str(context.get_current_step()) in context.residual_diffs:
        return Decision(True, "the first blocks changed too much")
    if context.get_residual_diff_threshold() <= 0:
        return OFF
    limit = config.max_accumulated_residual_diff_threshold
    if limit is not None and context.get_accumulated_residual_diff() >= limit:
        return Decision(True, "the first blocks have changed too much in all")
    return Decision(True, "as many steps as allowed are held")


@dataclass(frozen=True)
class CacheDiTPolicy:
    """Reports what the library decided in the forward that has just run."""

    manager_class: type[StepContextManager]
    contexts: Sequence[dict[str, Any]]  # the settings of each list's context
    first: int  # the first step this transformer runs
    refresh_step: int | None  # where everything starts over; with `repeat`, at each multiple of it
    repeat: bool
    distance: Distance | None
    diffs: list[float] = field(default_factory=list)  # the residual differences of this branch
    needs_signal: bool = False

    def start(self) -> BranchContexts:
        return BranchContexts(self)

    def decide(self, step: int, signal: float | None, state: BranchContexts) -> Decision:
        decision = NEVER_HELD if state.manager is None else state.manager.decision()
        if decision.compute:
            state.anchor = step
        return decision


class BranchContexts:
    """The policy state of one branch: its context manager, created again whenever the contexts start over."""

    def __init__(self, policy: CacheDiTPolicy) -> None:
        self._policy = policy
        self.manager: StepContextManager | None = None
        self._origin = 0
        self._anchor: int | None = None

    @property
    def anchor(self) -> int | None:
        """The step whose result may be held; setting it to None drops the contexts."""
        return self._anchor

    @anchor.setter
    def anchor(self, step: int | None) -> None:
        self._anchor = step
        if step is None:
            self.manager = None

    def at(self, step: int) -> StepContextManager:
        """The context manager, set to a step of the generation."""
        policy, step = self._policy, step - self._policy.first
        origin = last_refresh(step, policy.refresh_step, policy.repeat)
        if self.manager is None or origin != self._origin:
            self.manager, self._origin = policy.manager_class(), origin
            self.manager.distance, self.manager.diffs = policy.distance, policy.diffs
            for settings in policy.contexts:
                self.manager.new_context(**settings)
        self.manager.set_step(step - origin)
        return self.manager


def last_refresh(step: int, refresh_step: int | None, repeat: bool) -> int:
    """The step at which the contexts last started over: 0, `refresh_step`, or with `repeat` a multiple of it."""
    if not refresh_step or step < refresh_step:
        return 0
    return step - step % refresh_step if repeat else refresh_step
