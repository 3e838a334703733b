"""Smooth trajectories as explicit vectors, so that simulations can be compared with real tensors."""

from __future__ import annotations

import numpy as np
from diffusers import DPMSolverMultistepScheduler
from numpy.typing import NDArray

from holdover.grid import Grid
from holdover.plan.error_model import Measurements
from holdover.plan.generation import scheduler_response

Array = NDArray[np.float64]
WIDTH = 40  # values in a latent


def outputs(noise: Array, seed: int, modes: int = 6) -> Array:
    """The outputs of one generation, one row a step: a few waves in the noise level, the slow ones the largest."""
    random = np.random.default_rng(seed)
    waves = np.stack([np.cos(k * np.pi * (1.3 * noise + random.uniform())) for k in range(modes)], axis=1)
    return waves @ (random.normal(size=(modes, WIDTH)) * 0.5 ** np.arange(modes)[:, None])


def falling(steps: int) -> Array:
    """Noise levels from 1, evenly."""
    return np.linspace(1.0, 1.0 / steps, steps)


def measurements_of(noise: Array, generations: list[Array], growth: Array | None = None) -> Measurements:
    grams = np.stack([v @ v.T / WIDTH for v in generations])
    return Measurements(noise, grams, np.zeros((len(generations), len(noise) + 1)) if growth is None else growth)


def branched_measurements(noise: Array, generations: list[list[Array]], mix: tuple[float, ...]) -> Measurements:
    """Measurements of generations with several branches, each with outputs of its own."""
    stacked = [np.concatenate(branches) for branches in generations]
    return Measurements(noise, measurements_of(noise, stacked).grams, np.zeros((len(stacked), len(noise) + 1)), mix)


def smooth_measurements(steps: int, seed: int, count: int = 3) -> Measurements:
    noise = falling(steps)
    return measurements_of(noise, [outputs(noise, 100 * seed + i) for i in range(count)])


def mean_square(vector: Array) -> float:
    return float(vector @ vector / WIDTH)


def multistep(steps: int) -> tuple[Array, Array]:
    """Noise levels and response of DPM-Solver++ in its flow form."""
    scheduler = DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    scheduler.set_timesteps(steps)
    noise = scheduler.timesteps.double().numpy() / 1000
    response = scheduler_response(scheduler, Grid(steps, tuple(noise)))
    assert response is not None
    return noise, response
