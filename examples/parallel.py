"""One image over two processes: each rank runs one branch of guidance and caches it. Needs no GPU.

    torchrun --nproc-per-node 2 examples/parallel.py

Prints which steps each rank computed (C) and held (h), and whether the image is that of a single process. A number at
the end of the command is the side of the image in pixels instead of 64.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist

import holdover

PROMPTS = {"cond": "red apple, glossy 3d style", "uncond": ""}
STEPS, SIDE, PATCH, GUIDANCE = 20, 64, 4, 3.0
METHODS: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 0.15},
    "cache_dit": {"residual_diff_threshold": 0.24},
    "plan": {"budget": "3x"},
}


class GuidedPipeline:
    """The built-in model with a denoising loop that runs both branches here, or one on each rank of a group."""

    def __init__(self, side: int) -> None:
        self.pipe = holdover.load("emoji")
        self._embeds = {name: self.pipe.encode_prompt(prompt) for name, prompt in PROMPTS.items()}
        self._side = side
        patches = torch.arange(side // PATCH)
        self._image_ids = torch.cartesian_prod(torch.zeros(1, dtype=torch.long), patches, patches).float()

    @torch.no_grad()
    def generate(self, group: dist.ProcessGroup | None) -> torch.Tensor:
        """The latents of one image; with a group, each rank runs one branch and the outputs are gathered."""
        latents = self.pipe.prepare_latents(1, (self._side, self._side), "cpu", torch.Generator().manual_seed(0))
        for time in self.pipe.prepare_timesteps(STEPS, None, latents.shape[1], "cpu"):
            if group is None:
                cond, uncond = (self._forward(name, latents, time) for name in PROMPTS)
            else:
                own = self._forward(list(PROMPTS)[dist.get_rank(group)], latents, time)
                outputs = [torch.empty_like(own) for _ in PROMPTS]
                dist.all_gather(outputs, own, group)
                cond, uncond = outputs
            guided = uncond + GUIDANCE * (cond - uncond)
            latents = self.pipe.scheduler.step(guided, time, latents, return_dict=False)[0]
        return latents

    def _forward(self, branch: str, latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        embeds, pooled = self._embeds[branch]
        with self.pipe.transformer.cache_context(branch):
            output: torch.Tensor = self.pipe.transformer(
                hidden_states=latents,
                timestep=time.expand(1) / 1000,
                encoder_hidden_states=embeds,
                pooled_projections=pooled,
                txt_ids=torch.zeros(embeds.shape[1], 3),
                img_ids=self._image_ids,
                return_dict=False,
            )[0]
        return output.contiguous()


def print_in_order(text: str) -> None:
    """Print the text of every rank, in the order of ranks."""
    texts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(texts, text)
    if dist.get_rank() == 0:
        print("\n".join(texts), flush=True)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    if dist.get_world_size() != len(PROMPTS):
        sys.exit(f"Guidance has {len(PROMPTS)} branches: start it with torchrun --nproc-per-node {len(PROMPTS)}.")
    pipeline = GuidedPipeline(side=int(sys.argv[1]) if len(sys.argv) > 1 else SIDE)
    for method, settings in METHODS.items():
        with holdover.enable(pipeline.pipe, method, **settings):
            alone = pipeline.generate(group=None)
        ranks = holdover.Ranks(cfg=dist.group.WORLD)
        with holdover.enable(pipeline.pipe, method, ranks=ranks, **settings) as cache:
            together = pipeline.generate(group=dist.group.WORLD)
            last = cache.stats().last
        steps = "  ".join(f"{branch} {last.trace(branch)}" for branch in last.branches)
        same = "bit for bit" if torch.equal(together, alone) else "NOT"
        print_in_order(f"{method:9}  rank {dist.get_rank()}  {steps:27}  {same} the image of one process")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
