"""Measure TeaCache coefficients and MagCache ratios of the shipped models, and write them to the shipped profiles.

    python training/emoji/profiles.py [emoji-motion]

Prompts use concepts of the training set, at 50 steps and guidance 3; the images are discarded.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
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
PROMPTS = {
    "emoji": (
        "dog face, glossy 3d style",
        "pizza, twitter style",
        "rocket, microsoft flat style",
        "evergreen tree, google noto style",
    ),
    "emoji-motion": (
        "spinning dog face, glossy 3d style",
        "bouncing pizza, twitter style",
        "rocket, glossy 3d style",
        "sliding left evergreen tree, google noto style",
    ),
}


def measure(pipe: Any, texts: Sequence[str]) -> tuple[TeaCacheProfile, MagCacheProfile]:
    """Both profiles, from the same prompts and seeds."""
    call: dict[str, Any] = {"num_inference_steps": STEPS, "guidance_scale": GUIDANCE, "output_type": "latent"}
    prompts = [{"prompt": p, "generator": torch.Generator().manual_seed(i)} for i, p in enumerate(texts)]
    tea = estimate_coefficients(pipe, prompts, **call)
    with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
        for i, prompt in enumerate(texts):
            pipe(prompt, generator=torch.Generator().manual_seed(i), **call)
        return tea, cache.calibration()


def identify(profile: P, name: str, pipe: Any) -> P:
    """The profile under its shipped name, with the config values that distinguish this model from its family."""
    keys = {"emoji": ("in_channels", "num_single_layers"), "emoji-motion": ("in_channels", "num_layers")}[name]
    return dataclasses.replace(
        profile,
        name=name,
        model=f"{name}, a model in the box",
        match=tuple((key, pipe.transformer.config[key]) for key in keys),
        pipelines=(type(pipe).__name__,),
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
    name = sys.argv[1] if len(sys.argv) > 1 else "emoji"
    pipe = holdover.load(name).to("cuda" if torch.cuda.is_available() else "cpu")
    tea, mag = measure(pipe, PROMPTS[name])
    ship(identify(tea, name, pipe), "teacache.json")
    ship(identify(mag, name, pipe), "magcache.json")
    fit = tea.fit("")
    print(f"coefficients {fit.coefficients}, R^2 {fit.r_squared:.3f}, range {fit.low:.3f} to {fit.high:.3f}")
    for branch, ratios in mag.branches:
        print(f"{branch}: ratios {min(ratios.ratios):.3f} to {max(ratios.ratios):.3f}")


if __name__ == "__main__":
    main()
