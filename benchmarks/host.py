"""Host time of computed and held steps of a FLUX with all 57 blocks and a width of 8: `python -m benchmarks.host`.

At this width only Python and the calls into torch are left, which is what a GPU waits for when the host is slower than
it. Microseconds are CPU time of one thread for a whole step: transformer and scheduler. `--profile tea_cache` shows
where the time of held steps goes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import diffusers
import torch
from torch import Tensor

import holdover

from .report import provenance, save, table
from .speed.loop import keep_first_blocks

STEPS = 28
EVERY = 4
BRANCH = "cond"
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "mag_cache": (
        "mag_cache",
        {"mag_ratios": [1.0], "mag_threshold": 1e9, "mag_max_skip_steps": EVERY - 1, "mag_retention_ratio": 0.0},
    ),
    # A constant polynomial adds 1 per step; the signal is still computed and read at every step.
    "tea_cache": ("tea_cache", {"coefficients": (0.0, 1.0), "rel_l1_thresh": EVERY - 0.5}),
    "tea_cache, read late": ("tea_cache", {"coefficients": (0.0, 1.0), "rel_l1_thresh": EVERY - 0.5, "read": "late"}),
    "plan": ("plan", {"schedule": tuple(range(0, STEPS, EVERY)), "predictor": "newton"}),
}


def flux() -> Any:
    """FLUX.1 with 19 + 38 blocks and a width of 8."""
    torch.manual_seed(0)
    sizes = {"num_layers": 19, "num_single_layers": 38, "attention_head_dim": 8, "num_attention_heads": 1}
    inputs = {"joint_attention_dim": 8, "pooled_projection_dim": 8, "in_channels": 4, "axes_dims_rope": (2, 2, 4)}
    return diffusers.FluxTransformer2DModel(**sizes, **inputs, guidance_embeds=True).eval()


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass
class Pipeline:
    """A minimal pipeline: a transformer, a scheduler, and the denoising loop."""

    transformer: Any
    scheduler: Any

    @property
    def components(self) -> dict[str, Any]:
        return {"transformer": self.transformer, "scheduler": self.scheduler}

    @torch.no_grad()
    def __call__(self, around: Callable[[int], Any] | None = None) -> list[float]:
        """Run one generation; returns the seconds of each step."""
        fixed = {
            "encoder_hidden_states": noise(1, 4, 8, seed=1),
            "pooled_projections": noise(1, 8, seed=2),
            "guidance": torch.tensor([3.5]),
            "img_ids": torch.zeros(16, 3),
            "txt_ids": torch.zeros(4, 3),
        }
        self.scheduler.set_timesteps(STEPS)
        self.scheduler.set_begin_index(0)
        latent, seconds = noise(1, 16, 4, seed=0), []
        for step, t in enumerate(self.scheduler.timesteps):
            if around is not None:
                around(step)
            begin = time.thread_time()
            with self.transformer.cache_context(BRANCH):
                out = self.transformer(hidden_states=latent, timestep=t.expand(1) / 1000, **fixed, return_dict=False)[0]
            latent = self.scheduler.step(out, t, latent, return_dict=False)[0]
            seconds.append(time.thread_time() - begin)
        return seconds


def pipeline() -> Pipeline:
    return Pipeline(flux(), diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0))


def time_steps(pipe: Pipeline, trace: str, repeats: int) -> dict[str, float]:
    """Microseconds of a computed and a held step: the median of a generation, the least of several generations."""
    turns = [pipe()[1:] for _ in range(repeats)]
    kinds = sorted(set(trace[1:]))
    return {kind: round(1e6 * min(_median(turn, trace[1:], kind) for turn in turns), 1) for kind in kinds}


def _median(seconds: Sequence[float], trace: str, kind: str) -> float:
    return median(s for s, k in zip(seconds, trace, strict=True) if k == kind)


def measure(repeats: int) -> dict[str, Any]:
    """Every method, the plain model, and the plain model without blocks, which is what a held step has to run."""
    pipe = pipeline()
    pipe()
    plain = time_steps(pipe, "C" * STEPS, repeats)["C"]
    with keep_first_blocks(pipe.transformer, 0):
        live = time_steps(pipe, "C" * STEPS, repeats)["C"]
    figures: dict[str, Any] = {"plain_us": plain, "live_us": live, "methods": {}}
    for label, (method, settings) in METHODS.items():
        with holdover.enable(pipe, method, **settings) as cache:
            pipe()
            found = time_steps(pipe, cache.stats().generations[-1].trace(BRANCH), repeats)
        figures["methods"][label] = {"computed_us": found["C"], "held_us": found["h"]}
    return figures


def profile(label: str, generations: int, lines: int) -> None:
    """Print where the host time of held steps goes, by own time per function."""
    pipe, (method, settings) = pipeline(), METHODS[label]
    profiler = cProfile.Profile(time.thread_time)
    with holdover.enable(pipe, method, **settings) as cache:
        pipe()
        trace = cache.stats().generations[-1].trace(BRANCH)

        def around(step: int) -> None:
            profiler.disable()
            if trace[step] == "h":
                profiler.enable()

        for _ in range(generations):
            pipe(around)
            profiler.disable()
    pstats.Stats(profiler).strip_dirs().sort_stats("tottime").print_stats(lines)


def main() -> None:
    """Measure, write the result file and print it."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host", description=__doc__)
    parser.add_argument("--repeats", type=int, default=12, help="generations per method")
    parser.add_argument("--profile", choices=sorted(METHODS), default=None, help="profile held steps instead")
    parser.add_argument("--lines", type=int, default=15, help="lines of the profile to print")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.profile is not None:
        profile(options.profile, options.repeats, options.lines)
        return
    figures = measure(options.repeats)
    save("host", provenance() | {"steps": STEPS, "repeats": options.repeats} | figures)
    rows = [[label, m["computed_us"], m["held_us"]] for label, m in figures["methods"].items()]
    base = [["plain", figures["plain_us"], ""], ["no blocks", "", figures["live_us"]]]
    print(table([["us per step", "computed", "held"], *base, *rows]))
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
