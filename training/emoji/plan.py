"""Measure a built-in model for plans: calibrate, certify the four qualities, write the profile.

    python training/emoji/plan.py --model emoji --device cuda --out src/holdover/profiles/emoji.safetensors

Only prompts of the model's own list are used; benchmarks/quality has different ones.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

import holdover
import holdover.zoo
from holdover.profiles import Profile
from holdover.profiles.targets import QUALITY_TARGETS

STEPS = 50
CALIBRATED_ON = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="emoji", choices=holdover.zoo.MODELS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--effort", default="standard", help="of the calibration")
    parser.add_argument("--profile", help="an existing profile: certify its plans again")
    parser.add_argument("--held-back", type=int, default=None, help="prompts to certify on; default: all others")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False

    pipe = holdover.load(arguments.model).to(arguments.device)
    prompts = pipe.calibration_prompts()
    if arguments.profile is None:
        profile = holdover.calibrate(
            pipe,
            prompts[:CALIBRATED_ON],
            STEPS,
            guidance_scale=3.0,
            batch_size=CALIBRATED_ON,
            name=arguments.model,
            effort=arguments.effort,
        )
    else:
        profile = Profile.load(arguments.profile).with_facts(certificates=())
    profile.save(arguments.out)
    held_back = prompts[CALIBRATED_ON:][: arguments.held_back]
    for quality in QUALITY_TARGETS:
        found = holdover.tune(pipe, profile, held_back, quality=quality, batch_size=arguments.batch)
        print(found, flush=True)
        profile = found.profile
        profile.save(arguments.out)


if __name__ == "__main__":
    main()
