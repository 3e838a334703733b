"""Tiny, real, randomly initialized diffusers pipelines, to run on a CPU without tokenizers or checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import DiffusionPipeline

from .pipelines_image import IMAGE, TinyPipeline, quiet
from .pipelines_video import VIDEO

__all__ = ["PIPELINES", "UNAVAILABLE", "TinyPipeline", "run"]

PIPELINES: dict[str, TinyPipeline] = {entry.name: entry for entry in (*IMAGE, *VIDEO)}
UNAVAILABLE: dict[str, str] = {
    "StableAudioPipeline[cosine]": "needs torchsde; the entry has EDMDPMSolverMultistepScheduler instead",
    "CosmosTextToWorldPipeline[padding_mask]": "needs torchvision; the entry is without the mask",
    "Cosmos2TextToImagePipeline[padding_mask]": "needs torchvision; the entry is without the mask",
}


def run(pipe: DiffusionPipeline, **call: Any) -> torch.Tensor:
    """The first output of the pipeline, as a tensor, without a progress bar."""
    pipe.set_progress_bar_config(disable=True)
    with quiet():
        output = pipe(**call, return_dict=False)[0]
    return output if isinstance(output, torch.Tensor) else torch.stack(list(output))
