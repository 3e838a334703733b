"""The second-order baseline: its error is of second order, on the timesteps of the pipeline's own scheduler."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

from holdover.compare import SecondOrderScheduler
from holdover.compare.baselines import to_second_order
from holdover.errors import ConfigError
from tiny.prompted import prompted_flux


def solve(scheduler: Any, steps: int) -> torch.Tensor:
    """The end of a curved path: noise and image are sampled from Gaussians, so the velocity is known in closed form."""
    spread = torch.linspace(0.2, 2, 16, dtype=torch.float64)
    sample = torch.linspace(-2, 2, 16, dtype=torch.float64)
    scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
    scheduler.set_begin_index(0)
    for timestep, sigma in zip(scheduler.timesteps, scheduler.sigmas.double(), strict=False):
        variance = sigma**2 + ((1 - sigma) * spread) ** 2
        velocity = (sigma - (1 - sigma) * spread**2) / variance * sample
        sample = scheduler.step(velocity, timestep, sample, return_dict=False)[0].double()
    return sample - spread * torch.linspace(-2, 2, 16, dtype=torch.float64)


def error(scheduler: Any, steps: int) -> float:
    return float(solve(scheduler, steps).abs().max())


def test_the_error_falls_with_the_square_of_the_steps() -> None:
    euler, solver = FlowMatchEulerDiscreteScheduler(), SecondOrderScheduler()
    assert 1.6 < error(euler, 32) / error(euler, 64) < 2.5
    assert error(solver, 32) / error(solver, 64) > 3
    assert error(solver, 32) < error(euler, 32) / 4


@pytest.mark.parametrize(
    ("config", "call"),
    [
        ({}, {"num_inference_steps": 9}),
        ({"shift": 3.0}, {"num_inference_steps": 9}),
        ({"shift": 3.0, "shift_terminal": 0.02}, {"sigmas": [1.0, 0.7, 0.2]}),
        ({"use_dynamic_shifting": True}, {"num_inference_steps": 9, "mu": 0.8}),
        ({"use_karras_sigmas": True}, {"num_inference_steps": 9}),
    ],
)
def test_the_timesteps_are_those_of_the_scheduler_it_replaces(config: dict[str, Any], call: dict[str, Any]) -> None:
    own = FlowMatchEulerDiscreteScheduler(**config)
    replacement = to_second_order(own)
    own.set_timesteps(**call)
    replacement.set_timesteps(**call)
    assert torch.equal(replacement.sigmas, own.sigmas)
    assert torch.equal(replacement.timesteps, own.timesteps)


def test_at_the_full_count_it_lands_where_the_fine_grid_lands() -> None:
    """Euler in 8 steps is away from Euler in 200; the second order in 8 steps is nearer."""
    pipe = prompted_flux()

    def generate(steps: int) -> torch.Tensor:
        noise = torch.Generator().manual_seed(0)
        return pipe("apple", num_inference_steps=steps, generator=noise, output_type="latent").images.double()

    fine, coarse = generate(200), generate(8)
    pipe.scheduler = to_second_order(pipe.scheduler)
    assert (generate(8) - fine).norm() < (coarse - fine).norm() / 2
    assert (generate(200) - fine).norm() < (coarse - fine).norm() / 10


def test_a_result_object_is_returned_by_default() -> None:
    scheduler = SecondOrderScheduler()
    scheduler.set_timesteps(2)
    sample = torch.ones(1, 4)
    assert scheduler.step(sample, scheduler.timesteps[0], sample).prev_sample.shape == (1, 4)
    assert scheduler.step_index == 1


@pytest.mark.parametrize(
    "scheduler",
    [
        UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        FlowMatchEulerDiscreteScheduler(invert_sigmas=True),
        FlowMatchEulerDiscreteScheduler(stochastic_sampling=True),
    ],
    ids=["other", "inverted", "stochastic"],
)
def test_what_it_cannot_replace_is_refused(scheduler: Any) -> None:
    with pytest.raises(ConfigError, match=type(scheduler).__name__):
        to_second_order(scheduler)
