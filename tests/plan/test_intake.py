"""A scheduler that gets outputs with some of the latent in them is linear in the outputs all the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdover.plan.intake import Intake
from holdover.plan.response import euler
from holdover.runtime.clock import Stepped

from .trajectories import falling, multistep

STEPS = 9


def intake_of(seed: int) -> Intake:
    random = np.random.default_rng(seed)
    return Intake(random.uniform(0.1, 2.0, STEPS), random.uniform(-1.0, 1.0, STEPS))


@pytest.mark.parametrize("response", [euler(falling(STEPS)), multistep(STEPS)[1]], ids=["euler", "multistep"])
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 10**6))
def test_latents_are_those_of_a_generation_step_by_step(response, seed):
    intake, random = intake_of(seed), np.random.default_rng(seed)
    start, outputs, other = random.normal(size=5), *random.normal(size=(2, STEPS, 5))

    def latents(given):
        """Each latent is the start and what the scheduler got so far."""
        got, reached = np.zeros((STEPS, 5)), [start]
        for step in range(STEPS):
            got[step] = intake.scale[step] * given[step] + intake.carry[step] * reached[step]
            reached.append(start + response[step + 1] @ got)
        return np.stack(reached)

    apart = intake.response(response) @ (outputs - other)
    assert latents(outputs) - latents(other) == pytest.approx(apart, rel=1e-9, abs=1e-9)


def test_the_model_s_output_is_found_in_what_the_scheduler_got():
    intake, (sample, output) = intake_of(1), torch.randn(2, 3, 4, 8, 8, generator=torch.Generator().manual_seed(0))
    got = float(intake.scale[5]) * output + float(intake.carry[5]) * sample
    torch.testing.assert_close(intake.output(Stepped(5, sample, got, None)), output)


def test_another_grid_is_between_what_was_measured():
    noise = falling(STEPS)
    intake = intake_of(2)
    same = intake.on(noise, noise)
    assert np.array_equal(same.scale, intake.scale)
    assert np.array_equal(same.carry, intake.carry)
    between = intake.on(noise, (noise[2:4].sum() / 2)[None])
    assert between.scale == pytest.approx(intake.scale[2:4].mean())
    assert between.carry == pytest.approx(intake.carry[2:4].mean())
