"""Weights fitted while the plan runs on the model itself: to the outputs it really gets, along the way it really goes.

At held step i the weights of the last computed outputs are fitted to the output that puts the next latent where the
uncached generation has it: v_i - sum_{k<i} R[i+1,k] (u_k - v_k) / R[i+1,i], with u the outputs of this run, v those of
the uncached one, and R the scheduler's response.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..calibration.calls import Caller
from ..calibration.passes import Outputs, Trajectory
from ..calibration.prompts import Prompt
from ..calibration.shelf import Shelf
from ..grid import Grid
from ..plan.config import PlanConfig
from ..plan.kernel import Array
from ..plan.method import OutputPlan
from ..plan.rollout import DEPTH, ridged
from ..predictors.linear import Predictor
from ..runtime.backend import transformers_of
from ..runtime.clock import Stepped
from ..runtime.engine import Engine
from ..runtime.method import Method
from ..runtime.unit import Unit


def refitted(
    caller: Caller, computed: tuple[int, ...], prompts: Sequence[Prompt], seeds: Sequence[int]
) -> tuple[float, ...]:
    """The weights of all held steps, in order, fitted on one batch of pictures."""
    with Shelf("device") as latents, Shelf("device") as outputs:
        reference = Trajectory(latents, outputs)
        _run(caller, Outputs(reference), prompts, seeds)
        fitting = _Refit(computed, reference.outputs)
        _run(caller, fitting, prompts, seeds)
    return tuple(weight for step in sorted(fitting.fitted) for weight in fitting.fitted[step])


def _run(caller: Caller, method: Method, prompts: Sequence[Prompt], seeds: Sequence[int]) -> None:
    engine = Engine(caller.pipe, transformers_of(caller.pipe), method)
    engine.install()
    try:
        caller(prompts, seeds)
    finally:
        engine.uninstall()


class _Refit(OutputPlan):
    """Runs a schedule and fits the weights of each held step when it comes."""

    follows = True

    def __init__(self, computed: tuple[int, ...], uncached: Shelf) -> None:
        super().__init__(PlanConfig(schedule=computed, guard=False))
        self._uncached = uncached
        self._outputs: list[torch.Tensor] = []
        self._response: Array | None = None
        self.fitted: dict[int, tuple[float, ...]] = {}

    def _measured(self, unit: Unit) -> None:
        """A fit stands on no profile."""

    def predictor(self, unit: Unit, branch: str, grid: Grid) -> Predictor:
        self._response = self._running(grid).kind.setting.response
        return _WhenItComes(self)

    def stepped(self, stepped: Stepped) -> None:
        self._outputs.append(stepped.output.detach().float().clone())

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        """The weights of a held step; every branch gets the same."""
        if step not in self.fitted:
            self.fitted[step] = self._fit(step, anchors)
        return self.fitted[step]

    def _fit(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        features = torch.stack([self._outputs[a].flatten() for a in anchors]).double()
        normal = (features @ features.T).cpu().numpy()
        known = (features @ self._wanted(step).flatten().double()).cpu().numpy()
        return tuple(map(float, ridged(normal, known)))

    def _wanted(self, step: int) -> torch.Tensor:
        assert self._response is not None
        wanted = self._uncached[step].clone()
        row = self._response[step + 1]
        for earlier in range(step if abs(row[step]) > 1e-12 else 0):
            off = self._outputs[earlier] - self._uncached[earlier]
            wanted.sub_(off, alpha=float(row[earlier] / row[step]))
        return wanted


class _WhenItComes:
    """A predictor that asks for its weights when they are needed."""

    depth = DEPTH

    def __init__(self, refit: _Refit) -> None:
        self._refit = refit

    def weights(self, step: int, anchors: Sequence[int]) -> tuple[float, ...]:
        return self._refit.weights(step, anchors)
