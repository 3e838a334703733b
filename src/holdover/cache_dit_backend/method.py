"""cache-dit put together: the library's contexts as the state of a branch, its blocks as the way across."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError
from ..grid import Grid
from ..policies.base import Decision
from ..runtime.method import Method
from ..runtime.ranks import ALONE, Groups
from ..runtime.unit import Unit
from .config import CacheDiTConfig
from .contexts import BranchContexts, Restart, StepContextManager
from .crossing import CacheDiTCrossing
from .fitting import Fitter
from .library import steps_mask


@dataclasses.dataclass(frozen=True)
class CacheDiTPolicy:
    """Makes the contexts of a branch; the library decides while the blocks run and is asked afterwards."""

    manager: type[StepContextManager]
    contexts: Sequence[dict[str, Any]]
    restart: Restart
    first: int
    groups: Groups = ALONE
    needs_signal: bool = False

    def start(self) -> BranchContexts:
        return BranchContexts(self.manager, self.contexts, self.restart, self.first, self.groups)

    def decide(self, step: int, signal: float | None, state: BranchContexts) -> Decision:
        decision = state.decided()
        if decision.compute:
            state.anchor = step
        return decision


class CacheDiTMethod(Method):
    """cache-dit with one set of settings."""

    name = "cache_dit"

    def __init__(self, config: CacheDiTConfig, fitter: Fitter) -> None:
        super().__init__(config)
        self._settings, self._fitter = config, fitter
        self._contexts: dict[Unit, list[dict[str, Any]]] = {}
        self._pipeline: Any = None

    @property
    def declared_steps(self) -> int | None:
        return self._settings.num_inference_steps

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        self._pipeline = pipeline
        if self.declared_steps is not None:
            self.check_steps(self.declared_steps)
        fitting = self._fitter.fit(unit, pipeline)
        self._contexts[unit] = fitting.contexts(self._settings)
        return (f"{unit.name}: {fitting}",)

    def check_steps(self, steps: int) -> None:
        """An error where the mask asked for does not exist for that many steps."""
        if self._settings.scm_steps_mask_policy is not None:
            steps_mask(self._settings.scm_steps_mask_policy, steps)

    def crossing(self, unit: Unit) -> CacheDiTCrossing:
        return CacheDiTCrossing(unit, self._fitter.fit(unit, self._pipeline))

    def policy(self, unit: Unit, branch: str, grid: Grid) -> CacheDiTPolicy:
        settings = self._settings
        restart = Restart(settings.force_refresh_step_hint, settings.force_refresh_step_policy == "repeat")
        manager = self._fitter.fit(unit, self._pipeline).manager_class
        return CacheDiTPolicy(manager, self._masked(unit, grid), restart, grid.first, unit.groups)

    def _masked(self, unit: Unit, grid: Grid) -> list[dict[str, Any]]:
        """The contexts' settings with the mask for exactly the steps this transformer runs."""
        policy = self._settings.scm_steps_mask_policy
        if policy is None:
            return self._contexts[unit]
        if not grid.bounded:
            raise ConfigError(
                "An SCM mask is made for a number of steps, and nobody has said it: call refresh(transformer, steps) "
                "before the loop, or give num_inference_steps."
            )
        mask = steps_mask(policy, grid.length, unit.name if grid.length < grid.count else "")
        return [
            {**context, "cache_config": dataclasses.replace(context["cache_config"], steps_computation_mask=mask)}
            for context in self._contexts[unit]
        ]
