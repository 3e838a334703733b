"""The planned cache put together: a static schedule, weights from a plan, and a guard beside it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from ..errors import ConfigError, HoldoverWarning, ProfileError
from ..grid import Grid
from ..policies.static import Scheduled
from ..predictors import Newton, Predictor
from ..profiles import Profile
from ..runtime.calls import Crossing
from ..runtime.clock import Stepped
from ..runtime.identity import facts_of
from ..runtime.method import Method
from ..runtime.recent import Recent
from ..runtime.unit import Unit
from ..runtime.whole import WholeSeam
from .config import PlanConfig
from .guard import Guard
from .intake import output_of
from .making import Kind, PlanMaker, kind_of
from .plan import Plan, Planned, digest
from .profile import resolved
from .rollout import Weights
from .setting import Setting, key_of, setting_of

NEWTON_DEPTH = 2
_KINDS = 32  # kinds of generation that are remembered


class Memory:
    """What plans of one cache share: kinds of generation, and which transformers were compared with which profile."""

    def __init__(self) -> None:
        self._kinds: Recent[Any, Kind] = Recent(_KINDS)
        self.checked: set[tuple[Unit, str]] = set()

    def kind(self, pipeline: Any, units: list[Unit], grid: Grid, profile: Profile | None) -> Kind:
        """The kind of a generation that begins."""
        key = (None if profile is None else profile.digest, *key_of(pipeline, units, grid))
        found = self._kinds.get(key)
        if found is None:
            found = self._kinds[key] = kind_of(setting_of(pipeline, units, grid), profile)
        return found


@dataclass
class _Current:
    """The generation that runs: its plan, and what was added to it."""

    kind: Kind
    plan: Plan
    guard: Guard | None = None
    added: set[int] = field(default_factory=set)
    branches: set[str] = field(default_factory=set)
    settled: bool = False


class PlanMethod(Method):
    """Plans each kind of generation once, before its first step."""

    name = "plan"

    def __init__(self, config: PlanConfig, memory: Memory | None = None) -> None:
        super().__init__(config)
        self._settings, self._memory = config, memory or Memory()
        self._units: list[Unit] = []
        self._pipeline: Any = None
        self._profile: Profile | None = None
        self._maker = PlanMaker(config, None)
        self._plans: Recent[Kind, Plan] = Recent(_KINDS)
        self._weighed: Recent[tuple[Kind, tuple[int, ...]], dict[int, Weights]] = Recent(_KINDS)
        self._current: _Current | None = None
        self._warned = False

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return self._settings.guard and self._profile is not None

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        self._units.append(unit)
        self._pipeline = pipeline
        if len(self._units) == 1:
            self._profile = self._measured(unit)
            self._maker = PlanMaker(self._settings, self._profile)
        if self._profile is None:
            if self._settings.predictor == "least_squares" or self._settings.target is not None:
                raise ConfigError("This needs a profile: measure one with holdover.calibrate(pipe, ...).")
            return (f"{unit.name}: no profile, so Newton's extrapolation; its quality here was not measured",)
        if (unit, self._profile.digest) not in self._memory.checked:
            _check_measured_on(self._profile, unit)
            self._memory.checked.add((unit, self._profile.digest))
        return (f"{unit.name}: profile {self._profile.name}",)

    def _measured(self, unit: Unit) -> Profile | None:
        """The profile the plans stand on."""
        return resolved(self._settings.profile, unit.core)

    def started(self) -> None:
        self._current = None

    def policy(self, unit: Unit, branch: str, grid: Grid) -> Scheduled:
        current = self._running(grid)
        return Scheduled(frozenset(current.plan.computed), current.added)

    def predictor(self, unit: Unit, branch: str, grid: Grid) -> Predictor:
        current = self._running(grid)
        current.branches.add(branch)
        apart = current.kind.branches
        newton = Newton(NEWTON_DEPTH, places_of(current.kind.setting))
        return Planned(self._plan_of(unit, current), apart.index(branch) if branch in apart else 0, newton)

    def _plan_of(self, unit: Unit, current: _Current) -> Callable[[], Plan]:
        """The plan with the weights of this transformer, as it is when it is asked for."""
        return partial(self._settled, current)

    def _settled(self, current: _Current) -> Plan:
        """The plan once its branches are known, after the first step: weights of their own are for all or none."""
        if not current.settled:
            current.settled = True
            apart, count = set(current.kind.branches), len(current.branches) * self._units[0].groups.branch[1]
            if apart and (not current.branches <= apart or count != len(apart)):
                current.kind = current.kind.merged
                self._weigh(current, current.plan.computed)
        return current.plan

    def _weigh(self, current: _Current, computed: tuple[int, ...]) -> None:
        """Go on with these steps computed, and the weights they ask for."""
        found = self._weighed.get((current.kind, computed))
        if found is None:
            found = self._weighed[current.kind, computed] = self._maker.weights(current.kind, computed)
        current.plan = replace(current.plan, computed=computed, weights=found)

    def _running(self, grid: Grid) -> _Current:
        """The generation at hand; its plan is made, or found, at its first forward."""
        if self._current is None:
            if not grid.bounded:
                raise ConfigError(
                    "A plan needs the number of steps: call cache.refresh(transformer, num_inference_steps) before "
                    "the loop, or enable it on the pipeline."
                )
            kind = self._memory.kind(self._pipeline, self._units, grid, self._profile)
            self._current = _Current(kind, self._planned(kind))
        return self._current

    @property
    def digest(self) -> str:
        """Tells the plan that was made last from others."""
        return digest(next(reversed(self._plans.values())).weights) if self._plans else ""

    def _planned(self, kind: Kind) -> Plan:
        if kind not in self._plans:
            self._plans[kind] = self._maker.plan(kind)
            self._units[0].notes.update(self._plans[kind].notes)
        return self._plans[kind]

    def _guard(self, kind: Kind) -> Guard | None:
        """A guard for one generation, where there is something to compare it with: no finer grid than was measured."""
        profile = self._profile
        if not self.follows or profile is None or kind.kernel is None or not profile.facts.surprise:
            return None
        if kind.kernel.steps > len(profile.facts.noise):
            return None
        usual, largest = profile.facts.surprise
        return Guard(kind.kernel.merged, (usual, largest), self._units[0].groups)

    def stepped(self, stepped: Stepped) -> None:
        """Look at the output of a computed step; where the generation is hard, add a step to what is to come."""
        current = self._current
        if current is None or not isinstance(stepped.output, torch.Tensor):
            return
        self._settled(current)
        current.guard = current.guard or self._guard(current.kind)
        if current.guard is None:
            return
        if stepped.step in current.plan.computed:
            current.guard.saw(stepped.step, output_of(stepped, current.kind.intake))
        if current.guard.alarmed():
            self._add(current, stepped.step)

    def _add(self, current: _Current, step: int) -> None:
        """Compute one more step, the middle of the next gap; a plan grows by a quarter at most."""
        if len(current.added) >= max(1, (len(current.plan.computed) - len(current.added)) // 4):
            return
        held = _next_gap(step, set(current.plan.computed), current.kind.setting.last)
        if not held:
            return
        current.added.add(held[len(held) // 2])
        self._weigh(current, tuple(sorted({*current.plan.computed, *current.added})))

    def finished(self) -> None:
        current, self._current = self._current, None
        off = None if current is None or current.guard is None else current.guard.foreign()
        if off is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"The outputs of this model are {off:.0f} times less predictable than those its profile was measured "
                "on: are a LoRA or quantised weights in use that were not there then? Calibrate again with them.",
                HoldoverWarning,
                stacklevel=2,
            )


class OutputPlan(PlanMethod):
    """Holds the transformer's output: nothing inside it runs at a held step."""

    def crossing(self, unit: Unit) -> Crossing:
        return WholeSeam(unit)


class SeamPlan(PlanMethod):
    """Holds residuals at the seam: embedders and output layers run at every step."""

    def _plan_of(self, unit: Unit, current: _Current) -> Callable[[], Plan]:
        weights = self._maker.seam_weights(current.kind.setting, unit.name, current.plan.computed)
        plan = replace(current.plan, weights=weights)
        return lambda: plan

    @property
    def follows(self) -> bool:  # type: ignore[override]
        return False


def places_of(setting: Setting) -> tuple[float, ...]:
    """Where Newton's nodes lie: at the noise levels, or at their indices where two are alike (Heun's are)."""
    places = setting.noise.tolist()
    return tuple(places) if len(set(places)) == len(places) else tuple(map(float, range(len(places))))


def _next_gap(step: int, computed: set[int], last: int) -> list[int]:
    """The held steps after `step` up to the next computed one that has any before it."""
    gap: list[int] = []
    for later in range(step + 1, last + 1):
        if later not in computed:
            gap.append(later)
        elif gap:
            break
    return gap


def _check_measured_on(profile: Profile, unit: Unit) -> None:
    """The profile must be of this class; that it is of other weights is said."""
    measured = dict(profile.facts.models).get(unit.name)
    now = facts_of(unit.core)
    if measured is None or measured.transformer_class != now.transformer_class:
        known = ", ".join(f"{name} ({m.transformer_class})" for name, m in profile.facts.models)
        raise ProfileError(f"Profile {profile.name!r} was measured on {known}, not on this {now.transformer_class}.")
    if measured.fingerprint != now.fingerprint or measured.adapters != now.adapters:
        what = "with other adapters" if measured.fingerprint == now.fingerprint else "on other weights"
        warnings.warn(
            f"Profile {profile.name!r} was measured {what}: what it promises does not hold here. Calibrate again.",
            HoldoverWarning,
            stacklevel=2,
        )
