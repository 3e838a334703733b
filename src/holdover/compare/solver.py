"""Fewer steps at their best: a second-order multistep solver on the very grid the pipeline's scheduler would have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import DPMSolverMultistepScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteSchedulerOutput

from ..errors import ConfigError


class SecondOrderScheduler(FlowMatchEulerDiscreteScheduler):  # type: ignore[misc]
    """DPM-Solver++(2M) of diffusers on the sigmas of FlowMatchEulerDiscreteScheduler.

    The pipeline passes the same arguments as to its own scheduler, so shift, resolution and own sigmas are the same;
    only how a step is made of two velocities differs.
    """

    def set_timesteps(
        self,
        num_inference_steps: int | None = None,
        device: str | torch.device | None = None,
        sigmas: Sequence[float] | None = None,
        mu: float | None = None,
        timesteps: Sequence[float] | None = None,
    ) -> None:
        """The grid of the first-order scheduler, handed to the solver."""
        super().set_timesteps(num_inference_steps, device, sigmas, mu, timesteps)
        solver = DPMSolverMultistepScheduler(
            solver_order=2,
            use_flow_sigmas=True,
            prediction_type="flow_prediction",
            num_train_timesteps=self.config.num_train_timesteps,
        )
        solver.set_timesteps(len(self.timesteps), device=device)
        solver.sigmas, solver.timesteps = self.sigmas, self.timesteps
        solver.set_begin_index(0)
        self._solver = solver

    def step(
        self,
        model_output: torch.Tensor,
        timestep: Any,
        sample: torch.Tensor,
        generator: torch.Generator | None = None,
        return_dict: bool = True,
    ) -> FlowMatchEulerDiscreteSchedulerOutput | tuple[torch.Tensor]:
        """One step of the solver, in single precision."""
        result = self._solver.step(model_output.float(), timestep, sample.float(), return_dict=False)[0]
        self._step_index = self._solver.step_index
        stepped = result.to(model_output.dtype)
        return FlowMatchEulerDiscreteSchedulerOutput(prev_sample=stepped) if return_dict else (stepped,)


def second_order(scheduler: Any) -> SecondOrderScheduler:
    """The second-order scheduler that stands in for a pipeline's own."""
    name = type(scheduler).__name__
    if not isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
        raise ConfigError(f"The second-order baseline stands in for FlowMatchEulerDiscreteScheduler, not for {name}.")
    if scheduler.config.invert_sigmas or scheduler.config.stochastic_sampling:
        raise ConfigError(f"The second-order baseline follows no inverted or stochastic grid, as this {name} has.")
    made: SecondOrderScheduler = SecondOrderScheduler.from_config(scheduler.config)
    return made
