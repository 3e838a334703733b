"""A pipeline that takes prompts and makes images, with its profile, measured and tuned once for all tests."""

from __future__ import annotations

from functools import cache

import torch

import holdover
from holdover.profiles import Profile
from tiny.prompted import prompted_flux

STEPS = 8
CALIBRATION = ["red apple", "a blue dog"]
HELD_BACK = ["yellow car", "a green tree", "a house", "a pink flower"]
SURE = {"share": 0.5, "confidence": 0.9, "progress": False}


@cache
def pipeline():
    return prompted_flux()


@cache
def measured() -> Profile:
    return holdover.calibrate(pipeline(), CALIBRATION, STEPS, batch_size=2, effort="quick", progress=False)


@cache
def tuned(target: str):
    return holdover.tune(pipeline(), measured(), HELD_BACK, target, batch_size=2, **SURE)


def generate(prompt="yellow car", seed=7, steps=STEPS):
    return pipeline()(
        prompt, num_inference_steps=steps, generator=torch.Generator().manual_seed(seed), output_type="pt"
    ).images
