"""The two runs of a calibration: uncached, with everything measured; and with held steps, to see how errors grow."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from ..grid import Grid
from ..magcache.calibration import Calibration
from ..models.registry import Signal
from ..plan.config import PlanConfig
from ..plan.guard import Guard
from ..plan.intake import Intake, output_of
from ..plan.kernel import Array, Kernel
from ..plan.method import NEWTON_DEPTH, OutputPlan, places_of
from ..plan.rollout import Course, Weights
from ..plan.schedules import growing
from ..plan.setting import Setting, setting_of
from ..policies.static import AlwaysCompute, Scheduled
from ..predictors import Newton
from ..runtime.calls import Crossing
from ..runtime.clock import Stepped
from ..runtime.extracted import seam_of
from ..runtime.method import Computed, Method, NoneConfig
from ..runtime.unit import Unit
from ..runtime.whole import WholeSeam
from ..teacache.estimate import SignalMeasure
from .branched import Branched
from .shelf import Shelf

PROBED = 6  # one step in so many is computed in the run that shows how errors grow


class Trajectory:
    """The latents of one run as the scheduler saw them, and where they are wanted the outputs, mixed and by branch.

    Mixed outputs are those the scheduler got, or where its intake is known the model's own.
    """

    def __init__(
        self,
        latents: Shelf,
        outputs: Shelf | None = None,
        branched: Branched | None = None,
        intake: Intake | None = None,
    ) -> None:
        self.latents, self._outputs, self.branched, self.intake = latents, outputs, branched, intake
        self._last: Stepped | None = None

    def add(self, stepped: Stepped) -> None:
        self.latents.put(stepped.sample)
        if self._outputs is not None:
            self._outputs.put(output_of(stepped, self.intake))
        self._last = stepped

    def close(self) -> None:
        """Keep the last latent of all."""
        if self._last is not None:
            result, self._last = self._last.result, None
            self.latents.put(result[0] if isinstance(result, tuple) else result.prev_sample)

    def clear(self) -> None:
        """Begin again."""
        self.latents.clear()
        self.outputs.clear()
        if self.branched is not None:
            self.branched.clear()

    @property
    def outputs(self) -> Shelf:
        assert self._outputs is not None
        return self._outputs

    @property
    def steps(self) -> int:
        return len(self.latents) - 1

    def error(self, other: Trajectory, step: int) -> Array:
        """The mean squared distance to another run before `step`, for each entry of the batch."""
        apart = self.latents[step] - other.latents[step]
        return apart.flatten(1).double().square().mean(1).cpu().numpy()


class Constants:
    """What TeaCache, MagCache and plans at the seam need, of every transformer.

    Residuals are kept for `seams` alone: of one branch, by transformer, one flat tensor a step.
    """

    def __init__(self, seams: dict[str, Shelf] | None = None) -> None:
        self.signals = SignalMeasure(None)
        self.ratios: dict[str, Calibration] = {}
        self.seams = seams
        self.handled: dict[str, list[int]] = {}
        self._branch: dict[str, str] = {}

    def add(self, computed: Computed) -> None:
        name = computed.unit.name
        self.signals.observe(computed)
        self.ratios.setdefault(name, Calibration()).add(computed)
        if self.seams is not None and self._branch.setdefault(name, computed.branch) == computed.branch:
            self.handled.setdefault(name, []).append(computed.step)
            self.seams[name].put(torch.cat([r.flatten(1) for r in computed.residual], dim=1))

    def finish(self) -> None:
        self.signals.finished()
        for ratios in self.ratios.values():
            ratios.finish()


class Outputs(Method):
    """Computes every step, and keeps the outputs and the latents."""

    name = "calibrate"
    observes = True
    follows = True

    def __init__(self, trajectory: Trajectory) -> None:
        super().__init__(NoneConfig())
        self._trajectory = trajectory
        self._units: list[Unit] = []
        self._pipeline: Any = None
        self.setting: Setting | None = None

    def prepare(self, unit: Unit, pipeline: Any) -> tuple[str, ...]:
        self._units.append(unit)
        self._pipeline = pipeline
        return ()

    def _begin(self, grid: Grid) -> None:
        """Ask what kind of generation it is, while its scheduler has not stepped yet."""
        if self.setting is None:
            self.setting = setting_of(self._pipeline, self._units, grid)

    def crossing(self, unit: Unit) -> Crossing:
        return WholeSeam(unit)

    def policy(self, unit: Unit, branch: str, grid: Grid) -> AlwaysCompute:
        self._begin(grid)
        return AlwaysCompute()

    def observe(self, computed: Computed) -> None:
        if self._trajectory.branched is not None:
            self._trajectory.branched.add(computed)

    def stepped(self, stepped: Stepped) -> None:
        self._trajectory.add(stepped)

    def finished(self) -> None:
        self._trajectory.close()


class Everything(Outputs):
    """The same, and looks at signals and residuals at the seam."""

    def __init__(self, trajectory: Trajectory, constants: Constants) -> None:
        super().__init__(trajectory)
        self._constants = constants

    def crossing(self, unit: Unit) -> Crossing:
        return seam_of(unit)

    def policy(self, unit: Unit, branch: str, grid: Grid) -> AlwaysCompute:
        self._begin(grid)
        return AlwaysCompute(needs_signal=True)

    def signal(self, unit: Unit) -> Signal:
        return self._constants.signals.signal(unit)

    def observe(self, computed: Computed) -> None:
        super().observe(computed)
        self._constants.add(computed)

    def finished(self) -> None:
        super().finished()
        self._constants.finish()


class Probe(OutputPlan):
    """Computes one step in six and extrapolates the others, to see how their errors grow."""

    follows = True

    def __init__(self, trajectory: Trajectory, kernel: Kernel) -> None:
        count = min(kernel.steps, max(3, kernel.steps // PROBED))
        super().__init__(PlanConfig(schedule=growing(kernel.steps, count), predictor="newton", guard=False))
        self.guard = Guard(kernel)
        self.computed: tuple[int, ...] = ()
        self._trajectory = trajectory

    def _measured(self, unit: Unit) -> None:
        """A probe stands on no profile."""

    def policy(self, unit: Unit, branch: str, grid: Grid) -> Scheduled:
        scheduled = super().policy(unit, branch, grid)
        self.computed = tuple(sorted(scheduled.computed))
        return scheduled

    def stepped(self, stepped: Stepped) -> None:
        self._trajectory.add(stepped)
        if stepped.step in self.computed:
            self.guard.saw(stepped.step, output_of(stepped, self._trajectory.intake))

    def finished(self) -> None:
        super().finished()
        self._trajectory.close()
        self.guard.alarmed()


def growth(reference: Trajectory, probe: Trajectory, computed: tuple[int, ...], course: Course, at: Setting) -> Array:
    """By how much the probe's real error exceeds the one on paper, as a logarithm, before each step and at the end.

    Measured where a computed step follows held ones, and at the end; between these it is interpolated.
    """
    paper = course.errors(newton_table(computed, at))
    knots = [step for step in range(1, course.steps) if step in computed and step - 1 not in computed] + [course.steps]
    real = np.stack([probe.error(reference, step) for step in knots], axis=1)
    ratio = np.log(np.maximum(real, 1e-20) / np.maximum(paper[:, knots], 1e-20))
    everywhere = range(course.steps + 1)
    return np.stack([np.interp(everywhere, [0, *knots], [0.0, *row]) for row in ratio])


def newton_table(computed: tuple[int, ...], at: Setting) -> dict[int, Weights]:
    """The weights the probe held by."""
    newton, table = Newton(NEWTON_DEPTH, places_of(at)), {}
    for first, last in at.ranges:
        for step in (s for s in range(first, last + 1) if s not in computed):
            anchors = tuple(s for s in computed if first <= s < step)[-NEWTON_DEPTH:]
            table[step] = Weights(anchors, newton.weights(step, anchors))
    return table
