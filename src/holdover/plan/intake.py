"""What a scheduler takes in where a pipeline does not hand it the model's output as it is.

Some models are preconditioned by their pipeline: at step i the scheduler gets `scale_i` of the output and `carry_i` of
the latent (Cosmos: (F + x) / (1 + sigma)). Outputs are what is held, so plans are made of outputs; latents are linear
in them all the same, and only the response is another one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from ..profiles import ProfileFacts
from ..runtime.clock import Stepped
from .kernel import Array


@dataclass(frozen=True, eq=False)
class Intake:
    """How much of the output and how much of the latent the scheduler gets at each step."""

    scale: Array
    carry: Array

    def on(self, known: Array, wanted: Array) -> Intake:
        """The same on another grid of noise levels."""
        if np.array_equal(wanted, known):
            return self
        return Intake(*(np.interp(-wanted, -known, values) for values in (self.scale, self.carry)))

    def response(self, response: Array) -> Array:
        """How much of each output is in each latent: x = R (scale F + carry x), solved for x."""
        before = np.linalg.solve(np.eye(len(self.scale)) - response[:-1] * self.carry, response[:-1] * self.scale)
        return np.vstack([before, response[-1:] * self.scale + (response[-1:] * self.carry) @ before])

    def output(self, stepped: Stepped) -> torch.Tensor:
        """The model's output, from what the scheduler got."""
        got: torch.Tensor = stepped.output
        carry, scale = float(self.carry[stepped.step]), float(self.scale[stepped.step])
        return got.float().sub(stepped.sample, alpha=carry).div(scale)


def intake_of(facts: ProfileFacts, noise: Array) -> Intake | None:
    """The intake that was measured, on a grid of noise levels; None where the scheduler got outputs as they are."""
    measured = Intake(np.array(facts.scale), np.array(facts.carry))
    return measured.on(np.array(facts.noise), noise) if facts.scale else None


def output_of(stepped: Stepped, intake: Intake | None) -> torch.Tensor:
    """The model's output at a step of the scheduler, mixed of its branches."""
    got: torch.Tensor = stepped.output
    return got if intake is None else intake.output(stepped)
