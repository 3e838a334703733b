"""Measure TeaCache coefficients and MagCache ratios of the shipped model, and write them to the shipped profiles.

    python training/emoji/profiles.py

Prompts use concepts of the training set, at 50 steps and guidance 3; the images are discarded.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeVar

import torch

import holdover
from holdover.profiles import MagCacheProfile, Profile, TeaCacheProfile
from holdover.profiles.files import encode
from holdover.teacache import estimate_coefficients

PROFILES = Path(__file__).resolve().parents[2] / "src/holdover/profiles"
STEPS, GUIDANCE = 50, 3.0
P = TypeVar("P", bound=Profile)
PROMPTS = (
    "dog face, glossy 3d style",
    "pizza, twitter style",
    "rocket, microsoft flat style",
    "evergreen tree, google noto style",
)


def measure() -> tuple[TeaCacheProfile, MagCacheProfile]:
    """Both profiles, from the same prompts and seeds."""
    pipe = holdover.load("emoji")
    call: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "latent"}
    prompts = [{"prompt": p, "generator": torch.Generator().manual_seed(i)} for i, p in enumerate(PROMPTS)]
    tea = estimate_coefficients(pipe, prompts, **call)
    with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
        for i, prompt in enumerate(PROMPTS):
            pipe(prompt, generator=torch.Generator().manual_seed(i), **call)
        return tea, cache.calibration()


def identify(profile: P) -> P:
    """The profile under its shipped name, with the config values that distinguish this model from FLUX.1."""
    return dataclasses.replace(
        profile,
        name="emoji",
        model="emoji, the model in the box",
        match=(("in_channels", 48), ("num_single_layers", 8)),
        pipelines=("EmojiPipeline",),
        source=(*profile.source, ("recipe", "training/emoji/profiles.py"), ("guidance", str(GUIDANCE))),
    )


def ship(profile: Profile, file: str) -> None:
    """Replace the entry of that name in a shipped file, with one entry per line."""
    path = PROFILES / file
    body = json.loads(path.read_text(encoding="utf-8"))
    entries = [entry for entry in body["profiles"] if entry["name"] != profile.name] + [encode(profile)]
    head = json.dumps({key: value for key, value in body.items() if key != "profiles"})[:-1]
    lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in entries)
    path.write_text(f'{head}, "profiles": [\n{lines}\n]}}\n', encoding="utf-8")


def main() -> None:
    """Measure and ship."""
    torch.set_num_threads(1)
    tea, mag = measure()
    ship(identify(tea), "teacache.json")
    ship(identify(mag), "magcache.json")
    fit = tea.fit("")
    print(f"coefficients {fit.coefficients}, R^2 {fit.r_squared:.3f}, range {fit.low:.3f} to {fit.high:.3f}")
    for branch, ratios in mag.branches:
        print(f"{branch}: ratios {min(ratios.ratios):.3f} to {max(ratios.ratios):.3f}")


if __name__ == "__main__":
    main()
