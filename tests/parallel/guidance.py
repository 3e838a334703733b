"""Guidance whose branches run on different ranks: a denoising loop of one's own, as every such loop is."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
import torch.distributed as dist

import holdover
from tiny.pipelines import PIPELINES, run

from .setting import GUIDED, STEPS, decided, settings

BRANCHES = ("cond", "uncond")


class Loop:
    """A transformer, a scheduler, and what the transformer is given in each branch."""

    def __init__(self, model: str, named: bool = True, drifting: bool = False) -> None:
        self.model, self._named, self._drifting = model, named, drifting
        tiny = PIPELINES[GUIDED[model]]
        pipe = tiny.build()
        self.transformer = pipe.transformer
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.inputs = self._recorded(pipe, tiny.call(steps=2))
        self._scale = 1000.0 if float(self.inputs[0]["timestep"].max()) > 1.0 else 1.0

    def _recorded(self, pipe: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
        """What the pipeline gives the transformer in the branches of its first step."""
        seen: list[dict[str, Any]] = []
        hook = pipe.transformer.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
        run(pipe, **call)
        hook.remove()
        return seen[:2]

    def draw(self, method: str, cfg: Any = None, **more: Any) -> tuple[torch.Tensor, dict[str, str]]:
        """A generation, with both branches here or one on each rank of a group; and what was decided."""
        ranks = None if cfg is None else holdover.Ranks(cfg=cfg)
        host = SimpleNamespace(transformer=self.transformer, scheduler=self.scheduler)
        with holdover.enable(host, method, ranks=ranks, **settings(method, self.model) | more) as cache:
            return self._denoised(ranks), decided(cache)

    @torch.no_grad()
    def _denoised(self, ranks: holdover.Ranks | None) -> torch.Tensor:
        latents = self.inputs[0]["hidden_states"]
        self.scheduler.set_timesteps(STEPS)
        for step, time in enumerate(self.scheduler.timesteps):
            if ranks is None:
                cond, uncond = (self._forward(branch, step, time, latents) for branch in (0, 1))
            else:
                cond, uncond = self._gathered(ranks.groups().cfg, step, time, latents)
            latents = self.scheduler.step(uncond + 4.0 * (cond - uncond), time, latents, return_dict=False)[0]
        return latents

    def _gathered(self, group: Any, *where: Any) -> list[torch.Tensor]:
        own = self._forward(dist.get_rank(group), *where)
        outputs = [torch.empty_like(own) for _ in BRANCHES]
        dist.all_gather(outputs, own.contiguous(), group)
        return outputs

    def _forward(self, branch: int, step: int, time: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        given = self.inputs[branch] | {"hidden_states": latents, "timestep": (time / 1000 * self._scale).expand(1)}
        if self._drifting:
            given["encoder_hidden_states"] = given["encoder_hidden_states"] * (1 + 0.001 * step)
        context = self.transformer.cache_context(BRANCHES[branch]) if self._named else nullcontext()
        with context:
            output: torch.Tensor = self.transformer(**given | {"return_dict": False})[0]
        return output
