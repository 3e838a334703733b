"""What one call of EmojiPipeline asks for, and every reason to refuse it. Knows no model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...errors import ConfigError, did_you_mean

OUTPUT_TYPES = ("pil", "np", "pt", "latent")


@dataclass(frozen=True, eq=False)
class Embeds:
    """Encoded captions handed in by the user: token states and pooled vectors, both or neither."""

    states: torch.Tensor | None
    pooled: torch.Tensor | None
    name: str = "prompt_embeds"

    def __post_init__(self) -> None:
        if (self.states is None) != (self.pooled is None):
            pooled = self.name.replace("prompt_embeds", "pooled_prompt_embeds")
            raise ConfigError(f"{self.name} and {pooled} belong together: pass both (encode_prompt returns them)")
        if self.states is not None and self.pooled is not None and len(self.states) != len(self.pooled):
            raise ConfigError(f"{self.name} has {len(self.states)} rows, its pooled vectors {len(self.pooled)}")


@dataclass(frozen=True, eq=False)
class Request:
    """The arguments of one call, checked when it is made."""

    prompt: str | list[str] | None
    embeds: Embeds
    negative_prompt: str | list[str] | None
    negative_embeds: Embeds
    size: tuple[int, int]
    steps: int
    guidance_scale: float
    images_per_prompt: int
    output_type: str

    def __post_init__(self) -> None:
        _whole("num_inference_steps", self.steps)
        _whole("num_images_per_prompt", self.images_per_prompt)
        if not math.isfinite(self.guidance_scale) or self.guidance_scale < 0:
            raise ConfigError(
                f"guidance_scale is {self.guidance_scale}; use a number from 0 up (1 or less: no guidance)"
            )
        if self.output_type not in OUTPUT_TYPES:
            raise ConfigError(f"output_type is {self.output_type!r}; use one of {', '.join(OUTPUT_TYPES)}")
        _one_of("prompt", self.prompt, self.embeds)
        if self.negative_prompt is not None and self.negative_embeds.states is not None:
            raise ConfigError("pass negative_prompt or negative_prompt_embeds, not both")
        rows = self._negative_rows
        if rows not in (None, self.batch_size):
            raise ConfigError(f"{rows} negative prompts for {self.batch_size} prompts; give one, or one for each")

    @property
    def batch_size(self) -> int:
        if self.embeds.states is not None:
            return len(self.embeds.states)
        return 1 if isinstance(self.prompt, str) else len(self.prompt or ())

    @property
    def total(self) -> int:
        return self.batch_size * self.images_per_prompt

    @property
    def negatives(self) -> list[str]:
        """One negative caption for each prompt; the empty one unless told."""
        if isinstance(self.negative_prompt, list):
            return self.negative_prompt
        return [self.negative_prompt or ""] * self.batch_size

    @property
    def _negative_rows(self) -> int | None:
        if self.negative_embeds.states is not None:
            return len(self.negative_embeds.states)
        if self.negative_prompt is None or isinstance(self.negative_prompt, str):
            return None
        _captions("negative_prompt", self.negative_prompt)
        return len(self.negative_prompt)


def check_size(height: int, width: int, patch: int) -> tuple[int, int]:
    """Height and width, if they are whole numbers of patches."""
    for name, value in (("height", height), ("width", width)):
        if value <= 0 or value % patch:
            raise ConfigError(f"{name} is {value}; use a positive multiple of {patch}")
    return height, width


def check_callback_tensors(names: Sequence[str], known: Sequence[str]) -> None:
    for name in names:
        if name not in known:
            argument, hint = "callback_on_step_end_tensor_inputs", did_you_mean(name, known)
            raise ConfigError(f"{argument}: unknown {name!r}; known: {', '.join(known)}.{hint}")


def check_generators(generator: object, total: int) -> None:
    if isinstance(generator, list) and len(generator) != total:
        raise ConfigError(f"{len(generator)} generators for {total} pictures; give one, or one for each picture")


def check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler whose noise is not a straight line between picture and noise."""
    config, name = scheduler.config, type(scheduler).__name__
    if config.get("use_flow_sigmas", False):
        if config.get("prediction_type", "flow_prediction") != "flow_prediction":
            raise ConfigError(f"{name} has use_flow_sigmas but prediction_type {config['prediction_type']!r}; {_HOW}")
    elif "beta_start" in config or not hasattr(scheduler, "set_begin_index"):
        raise ConfigError(f"{name} does not speak flow matching; use FlowMatchEulerDiscreteScheduler, or {_HOW}")


_HOW = "make it with from_config(config, use_flow_sigmas=True, prediction_type='flow_prediction')"


def _whole(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} is {value!r}; use a whole number from 1 up")


def _captions(name: str, captions: object) -> None:
    if isinstance(captions, str):
        return
    if not isinstance(captions, list) or not captions or not all(isinstance(entry, str) for entry in captions):
        raise ConfigError(f"{name} is {captions!r}; use a string or a list of at least one string")


def _one_of(name: str, captions: object, embeds: Embeds) -> None:
    if (captions is None) == (embeds.states is None):
        raise ConfigError(f"pass {name} or {embeds.name} (with its pooled vectors), one of the two")
    if captions is not None:
        _captions(name, captions)
