"""Measure a built-in model for plans: calibrate, certify three targets, write the profile.

    python training/emoji/plan.py --model emoji --device cuda --out src/holdover/profiles/emoji.safetensors

Only prompts of the model's own list are used; benchmarks/quality has different ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import holdover
import holdover.zoo

STEPS = 50
CALIBRATED_ON = 16
TARGETS = ("psnr>=30", "psnr>=35", "psnr>=40")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji", choices=holdover.zoo.MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--effort", default="standard", help="of the calibration")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    pipe = holdover.load(arguments.model).to(arguments.device)
    prompts = pipe.calibration_prompts()
    profile = holdover.calibrate(
        pipe,
        prompts[:CALIBRATED_ON],
        STEPS,
        guidance_scale=3.0,
        batch_size=CALIBRATED_ON,
        name=arguments.model,
        effort=arguments.effort,
    )
    profile.save(arguments.out)
    for target in TARGETS:
        found = holdover.tune(pipe, profile, prompts[CALIBRATED_ON:], target, batch_size=arguments.batch)
        print(found, flush=True)
        profile = found.profile
        profile.save(arguments.out)


if __name__ == "__main__":
    main()
