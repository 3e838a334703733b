"""Any scheduler as a linear map from outputs to latents, found by running it; with and without preconditioning."""

from __future__ import annotations

import copy

import diffusers as d
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.engine.clock import SchedulerStep
from holdover.grid import Grid
from holdover.plan.generation import Preconditioning, euler_response, model_output, scheduler_response

from .trajectories import falling, multistep

STEPS = 9
FLOW = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
LINEAR = {
    "flow euler": lambda: d.FlowMatchEulerDiscreteScheduler(shift=3.0),
    "flow heun": lambda: d.FlowMatchHeunDiscreteScheduler(shift=3.0),
    "dpm++ 2": lambda: d.DPMSolverMultistepScheduler(**FLOW),
    "dpm++ 3": lambda: d.DPMSolverMultistepScheduler(**FLOW, solver_order=3),
    "unipc": lambda: d.UniPCMultistepScheduler(**FLOW),
    "ddim": lambda: d.DDIMScheduler(clip_sample=False),
    "euler": lambda: d.EulerDiscreteScheduler(),
}


def started(name: str) -> d.SchedulerMixin:
    scheduler = LINEAR[name]()
    scheduler.set_timesteps(STEPS)
    return scheduler


def grid_of(scheduler: d.SchedulerMixin, first: int = 0) -> Grid:
    noise = tuple(float(t) / 1000 for t in scheduler.timesteps)
    return Grid(len(noise), noise, first=first)


def run_on(scheduler: d.SchedulerMixin, outputs: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Every latent of a generation from zero noise, as a pipeline computes them."""
    latent = torch.zeros_like(outputs[0])
    latents = [latent] * (first + 1)
    for step in range(first, len(outputs)):
        latent = scheduler.step(outputs[step], scheduler.timesteps[step], latent, return_dict=False)[0]
        latents.append(latent)
    return torch.stack(latents)


@pytest.mark.parametrize("name", LINEAR)
def test_the_response_is_what_the_scheduler_does_to_tensors(name):
    scheduler = started(name)
    grid = grid_of(scheduler)
    response = scheduler_response(scheduler, grid)
    assert response.shape == (grid.count + 1, grid.count)
    outputs = torch.randn(grid.count, 1, 4, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    latents = run_on(scheduler, outputs)
    expected = torch.einsum("ts,sbchw->tbchw", torch.from_numpy(response), outputs)
    assert torch.allclose(latents.double(), expected, rtol=1e-4, atol=1e-4 * float(latents.abs().max()))
    assert np.abs(np.triu(response)).max() == 0.0


def test_flow_euler_is_eulers_formula():
    scheduler = started("flow euler")
    grid = grid_of(scheduler)
    assert scheduler_response(scheduler, grid) == pytest.approx(euler_response(np.array(grid.noise)), abs=1e-6)


@pytest.mark.parametrize("name", LINEAR)
def test_the_users_scheduler_is_left_alone(name):
    scheduler = started(name)
    before = copy.deepcopy(vars(scheduler))
    scheduler_response(scheduler, grid_of(scheduler))
    after = vars(scheduler)
    assert before.keys() == after.keys()
    for key, value in before.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, after[key])
        elif isinstance(value, np.ndarray):
            assert np.array_equal(value, after[key])
        else:
            assert value == after[key]


@pytest.mark.parametrize("name", LINEAR)
def test_a_scheduler_that_has_stepped_gives_no_response(name):
    """In the middle of a generation it remembers outputs that are not part of the map."""
    scheduler = started(name)
    grid = grid_of(scheduler)
    latent = torch.zeros(1, 4, 3, 3)
    scheduler.step(latent + 1, scheduler.timesteps[0], latent, return_dict=False)
    if getattr(scheduler, "step_index", None) is None:
        pytest.skip("this scheduler keeps no index, and nothing of earlier steps")
    assert scheduler_response(scheduler, grid) is None


@pytest.mark.parametrize(
    "scheduler",
    [
        d.EulerAncestralDiscreteScheduler(),
        d.DDPMScheduler(),
        d.DDIMScheduler(clip_sample=True, clip_sample_range=0.1),
        d.DPMSolverMultistepScheduler(algorithm_type="sde-dpmsolver++"),
        d.LCMScheduler(),
    ],
    ids=lambda scheduler: type(scheduler).__name__,
)
def test_noise_and_clipping_are_not_linear(scheduler):
    scheduler.set_timesteps(STEPS)
    state = torch.get_rng_state()
    assert scheduler_response(scheduler, grid_of(scheduler)) is None
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", ["flow euler", "dpm++ 2", "unipc", "ddim"])
def test_image_to_image_starts_late(name):
    scheduler = started(name)
    if hasattr(scheduler, "set_begin_index"):
        scheduler.set_begin_index(3)
    grid = grid_of(scheduler, first=3)
    response = scheduler_response(scheduler, grid)
    assert not response[:, :3].any()
    assert not response[:4].any()
    outputs = torch.randn(grid.count, 1, 4, 3, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    expected = torch.einsum("ts,sbchw->tbchw", torch.from_numpy(response), outputs)
    latents = run_on(scheduler, outputs, first=3)
    assert torch.allclose(latents.double(), expected, rtol=1e-4, atol=1e-4 * float(latents.abs().max()))


def test_an_object_that_is_not_a_scheduler_gives_no_response():
    assert scheduler_response(object(), Grid(4, (1.0, 0.75, 0.5, 0.25))) is None


def test_euler_ends_where_the_noise_ends():
    response = euler_response(falling(5), first=2)
    assert response[5] == pytest.approx([0, 0, -0.2, -0.2, -0.2])
    assert not response[:3].any()


# Preconditioning: the scheduler gets scale F + carry x instead of the model's output F.


def preconditioning_of(seed: int) -> Preconditioning:
    random = np.random.default_rng(seed)
    return Preconditioning(random.uniform(0.1, 2.0, STEPS), random.uniform(-1.0, 1.0, STEPS))


@pytest.mark.parametrize("response", [euler_response(falling(STEPS)), multistep(STEPS)[1]], ids=["euler", "multistep"])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_the_preconditioned_response_gives_the_latents_of_a_generation_step_by_step(response, seed):
    preconditioning, random = preconditioning_of(seed), np.random.default_rng(seed)
    start, outputs, other = random.normal(size=5), *random.normal(size=(2, STEPS, 5))

    def latents(outputs):
        """Each latent is the initial one plus the response to the scheduler's inputs so far."""
        given, reached = np.zeros((STEPS, 5)), [start]
        for step in range(STEPS):
            given[step] = preconditioning.scale[step] * outputs[step] + preconditioning.carry[step] * reached[step]
            reached.append(start + response[step + 1] @ given)
        return np.stack(reached)

    difference = preconditioning.response(response) @ (outputs - other)
    assert latents(outputs) - latents(other) == pytest.approx(difference, rel=1e-9, abs=1e-9)


def test_the_model_output_is_recovered_from_the_scheduler_input():
    latent, output = torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    preconditioning = preconditioning_of(1)
    given = float(preconditioning.scale[5]) * output + float(preconditioning.carry[5]) * latent
    torch.testing.assert_close(model_output(SchedulerStep(5, latent, given, None), preconditioning), output)


def test_preconditioning_is_interpolated_to_another_grid():
    noise = falling(STEPS)
    preconditioning = preconditioning_of(2)
    same = preconditioning.at(noise, noise)
    assert np.array_equal(same.scale, preconditioning.scale)
    assert np.array_equal(same.carry, preconditioning.carry)
    between = preconditioning.at(noise, (noise[2:4].sum() / 2)[None])
    assert between.scale == pytest.approx(preconditioning.scale[2:4].mean())
    assert between.carry == pytest.approx(preconditioning.carry[2:4].mean())
