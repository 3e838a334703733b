"""Pipelines as in vLLM-Omni: modules whose forward runs the whole loop, built from tiny diffusers models."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.distributed
from torch import nn

from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import TOKENS, WIDTH, noise

IMAGE_TOKENS = 16


class DiffusersInside(nn.Module):
    """Its loop is that of a diffusers pipeline; its forward gets a batch of requests."""

    _dit_modules: ClassVar[list[str]] = ["transformer", "transformer_2"]

    def __init__(self, name: str) -> None:
        super().__init__()
        self.tiny = PIPELINES[name]
        self.pipe = self.tiny.build()
        self.transformer = self.pipe.transformer
        self.transformer_2 = getattr(self.pipe, "transformer_2", None)
        self.boundary_ratio = self.pipe.config.get("boundary_ratio")

    @property
    def scheduler(self) -> Any:
        return self.pipe.scheduler

    def forward(self, req: Any) -> torch.Tensor:
        return run(self.pipe, **self.tiny.call(**req.requests[0].sampling_params.call))


class Loop(nn.Module):
    """A loop without a scheduler, whose step count may differ from the announced one; guidance over ranks."""

    def __init__(self, guided: bool = False) -> None:
        super().__init__()
        self.transformer = PIPELINES["FluxPipeline"].build().transformer
        self.prompts = [noise(1, TOKENS, WIDTH, seed=1), noise(1, TOKENS, WIDTH, seed=2)][: 1 + guided]

    def forward(self, req: Any) -> torch.Tensor:
        asked = req.requests[0].sampling_params
        steps = asked.num_inference_steps or asked.call.get("steps", 8)
        latents = noise(1, IMAGE_TOKENS, 16, seed=asked.call.get("seed", 0))
        for step in range(steps):
            level = 1 - step / steps
            latents = latents - self.predicted(latents, level) / steps
        return latents

    def predicted(self, latents: torch.Tensor, level: float) -> torch.Tensor:
        from vllm_omni.diffusion.distributed import parallel_state

        if len(self.prompts) == 1:
            return self.branch(latents, level, 0)
        shared = parallel_state.model_parallel_is_initialized()
        if not shared or parallel_state.get_classifier_free_guidance_world_size() == 1:
            outputs = [self.branch(latents, level, i) for i in range(2)]
        else:
            own = self.branch(latents, level, parallel_state.get_classifier_free_guidance_rank())
            outputs = [torch.empty_like(own) for _ in range(2)]
            torch.distributed.all_gather(outputs, own, group=parallel_state.get_cfg_group().device_group)
        return outputs[1] + 3.0 * (outputs[0] - outputs[1])

    def branch(self, latents: torch.Tensor, level: float, index: int) -> torch.Tensor:
        return self.ran(
            hidden_states=latents,
            encoder_hidden_states=self.prompts[index],
            pooled_projections=noise(1, WIDTH, seed=3),
            timestep=torch.tensor([level]),
            img_ids=torch.zeros(IMAGE_TOKENS, 3),
            txt_ids=torch.zeros(TOKENS, 3),
            guidance=torch.tensor([3.5]),
            return_dict=False,
        )[0]

    def ran(self, **inputs: Any) -> Any:
        return self.transformer(**inputs)
