"""One picture over two processes: each runs one branch of guidance and remembers what it computed. No GPU is needed.

    torchrun --nproc-per-node 2 examples/parallel.py

Prints which steps each rank computed (C) and held (h), and whether the picture is that of one process.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import holdover
from holdover.zoo.emoji.pipeline import position_ids

BRANCHES = {"cond": "red apple, glossy 3d style", "uncond": ""}
STEPS, SIDE, SCALE = 20, 64, 3.0
METHODS: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 0.15},
    "cache_dit": {"residual_diff_threshold": 0.24},
    "plan": {"budget": "3x"},
}


class Drawing:
    """The model in the box with a denoising loop of one's own, over one process or one for each branch."""

    def __init__(self) -> None:
        self.pipe = holdover.load("emoji")
        self._words = {name: self.pipe.encode_prompt(text) for name, text in BRANCHES.items()}
        self._places = position_ids(SIDE, SIDE, patch=4)

    @torch.no_grad()
    def picture(self, over: dist.ProcessGroup | None) -> torch.Tensor:
        """One picture; with a group, each of its ranks runs one branch and they tell each other the outputs."""
        latents = self.pipe.prepare_latents(1, (SIDE, SIDE), "cpu", torch.Generator().manual_seed(0))
        for time in self.pipe.prepare_timesteps(STEPS, None, latents.shape[1], "cpu"):
            if over is None:
                cond, uncond = (self._forward(name, latents, time) for name in BRANCHES)
            else:
                own = self._forward(list(BRANCHES)[dist.get_rank(over)], latents, time)
                outputs = [torch.empty_like(own) for _ in BRANCHES]
                dist.all_gather(outputs, own, over)
                cond, uncond = outputs
            guided = uncond + SCALE * (cond - uncond)
            latents = self.pipe.scheduler.step(guided, time, latents, return_dict=False)[0]
        return latents

    def _forward(self, branch: str, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        states, pooled = self._words[branch]
        with self.pipe.transformer.cache_context(branch):
            output: torch.Tensor = self.pipe.transformer(
                hidden_states=latents,
                timestep=time.expand(1) / 1000,
                encoder_hidden_states=states,
                pooled_projections=pooled,
                txt_ids=torch.zeros(states.shape[1], 3),
                img_ids=self._places,
                return_dict=False,
            )[0]
        return output.contiguous()


def steps_of(cache: Any) -> str:
    """What was computed and held in the last generation."""
    last = cache.stats().last
    return "  ".join(f"{branch} {last.trace(branch)}" for branch in last.branches)


def told(text: str) -> None:
    """Print what every rank has to say, in order."""
    said: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(said, text)
    if dist.get_rank() == 0:
        print("\n".join(said), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != len(BRANCHES):
        sys.exit(f"Guidance has {len(BRANCHES)} branches: start it with torchrun --nproc-per-node {len(BRANCHES)}.")
    drawing = Drawing()
    for method, settings in METHODS.items():
        with holdover.enable(drawing.pipe, method, **settings):
            alone = drawing.picture(over=None)
        ranks = holdover.Ranks(cfg=dist.group.WORLD)
        with holdover.enable(drawing.pipe, method, ranks=ranks, **settings) as cache:
            together = drawing.picture(over=dist.group.WORLD)
        same = "bit for bit" if torch.equal(together, alone) else "NOT"
        told(f"{method:9}  rank {dist.get_rank()}  {steps_of(cache):27}  {same} the picture of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
