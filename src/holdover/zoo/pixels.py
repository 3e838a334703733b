"""PixelPipeline: what the pipelines of the models in this package share.

They follow diffusers' conventions and work on normalized pixels without a VAE, so that anything that works on a
FluxPipeline or a WanPipeline (caches, offload, callbacks, other flow-matching schedulers) works here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.utils import logging
from diffusers.utils.torch_utils import randn_tensor

from ..errors import ConfigError, did_you_mean

logger = logging.get_logger(__name__)

Tensors = dict[str, torch.Tensor]
OnStepEnd = Callable[[int, Any, Tensors], None]
StepCallback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]
Generators = torch.Generator | list[torch.Generator]
Prompts = str | list[str] | None
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


class PixelPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Prompts to text states, noise, timesteps, the denoising loop with its callbacks, checks of the arguments."""

    model_cpu_offload_seq = "text_encoder->transformer"
    _outputs = "images"
    _guidance_scale = 1.0
    _num_timesteps = 0
    _interrupt = False

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    def _encode_text(self, prompt: Prompts, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Last states of the text encoder, zero for padding, and the pooled state."""
        if prompt is None:
            raise ConfigError("pass a prompt, or the embeds that encode_prompt returns")
        prompts, limit = [prompt] if isinstance(prompt, str) else prompt, self.tokenizer.model_max_length
        for text, ids in zip(prompts, self.tokenizer(prompts)["input_ids"], strict=True):
            if len(ids) > limit:
                logger.warning(f"the prompt has {len(ids)} tokens and is truncated to {limit}: {text!r}")
        padding: Any = {"padding": "max_length", "max_length": limit, "truncation": True}
        batch = self.tokenizer(prompts, return_tensors="pt", **padding).to(device)
        output = self.text_encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
        states = output.last_hidden_state
        states = states * batch["attention_mask"][..., None].to(states.dtype)
        return states, output.pooler_output

    def _noise(
        self,
        shape: tuple[int, ...],
        device: torch.device,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Noise of that shape, or the given latents on the device."""
        if latents is None:
            if isinstance(generator, list) and len(generator) != shape[0]:
                raise ConfigError(f"{len(generator)} generators for {shape[0]} {self._outputs}; pass one, or one each")
            noise: torch.Tensor = randn_tensor(shape, generator, device, self.transformer.dtype)
            return noise
        if tuple(latents.shape) != shape:
            raise ConfigError(f"latents have shape {tuple(latents.shape)}, this call needs {shape}")
        return latents.to(device, self.transformer.dtype)

    def prepare_timesteps(
        self, steps: int, sigmas: Sequence[float] | None, image_tokens: int, device: torch.device
    ) -> torch.Tensor:
        """Set the scheduler's timesteps: from the given sigmas, else evenly spaced where it takes sigmas."""
        config = self.scheduler.config
        arguments: dict[str, Any] = {"num_inference_steps": steps}
        takes_sigmas = "sigmas" in inspect.signature(self.scheduler.set_timesteps).parameters
        if sigmas is not None and not takes_sigmas:
            raise ConfigError(f"{type(self.scheduler).__name__} takes no sigmas; pass num_inference_steps")
        if sigmas is not None:
            arguments["sigmas"] = list(sigmas)
        elif takes_sigmas and not config.get("use_flow_sigmas", False):
            arguments["sigmas"] = np.linspace(1.0, 1 / steps, steps)
        if config.get("use_dynamic_shifting", False):  # by resolution: linear in the number of image tokens
            low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
            start, end = config.get("base_shift", 0.5), config.get("max_shift", 1.15)
            arguments["mu"] = float(start + (end - start) * (image_tokens - low) / (high - low))
        self.scheduler.set_timesteps(device=device, **arguments)
        self.scheduler.set_begin_index(0)
        return torch.as_tensor(self.scheduler.timesteps)

    def _guided(self, branch: Callable[[str, str], torch.Tensor]) -> torch.Tensor:
        """One model evaluation: the conditional branch, then the unconditional one if guidance is on."""
        cond = branch("cond", "")
        if not self.do_classifier_free_guidance:
            return cond
        uncond = branch("uncond", "negative_")
        return uncond + self._guidance_scale * (cond - uncond)

    def _denoise(
        self,
        velocity_of: Callable[[Tensors, torch.Tensor], torch.Tensor],
        tensors: Tensors,
        timesteps: torch.Tensor,
        steps: int,
        on_step_end: OnStepEnd,
    ) -> torch.Tensor:
        """The denoising loop; `tensors` holds latents and embeds, and callbacks may replace any of them."""
        order = self.scheduler.order
        warmup = max(len(timesteps) - steps * order, 0)
        with self.progress_bar(total=steps) as bar:
            for index, timestep in enumerate(timesteps):
                if self._interrupt:
                    continue
                latents = tensors["latents"]
                velocity = velocity_of(tensors, timestep.expand(latents.shape[0]))
                stepped = self.scheduler.step(velocity, timestep, latents, return_dict=False)[0]
                tensors["latents"] = stepped.to(latents.dtype)
                on_step_end(index, timestep, tensors)
                if index == len(timesteps) - 1 or (index + 1 > warmup and (index + 1) % order == 0):
                    bar.update()
        return tensors["latents"]

    def _wrap_callback(self, callback: Any, names: Sequence[str]) -> OnStepEnd:
        """A function that passes the requested tensors to the user's callback and stores those it returns."""
        if isinstance(callback, (PipelineCallback, MultiPipelineCallbacks)):
            names = callback.tensor_inputs

        def check(names: Sequence[str]) -> None:
            known = self._callback_tensor_inputs
            for name in (name for name in names if name not in known):
                argument, hint = "callback_on_step_end_tensor_inputs", did_you_mean(name, known)
                raise ConfigError(f"{argument}: unknown {name!r}; known: {', '.join(known)}.{hint}")

        def on_step_end(index: int, timestep: Any, tensors: Tensors) -> None:
            if callback is not None:
                changed = callback(self, index, timestep, {name: tensors.get(name) for name in names}) or {}
                check(list(changed))
                tensors.update({name: tensor for name, tensor in changed.items() if tensor is not None})

        check(names)
        return on_step_end

    def _check_options(
        self, sizes: dict[str, int], patch: int, counts: dict[str, int], guidance_scale: float, output_type: str
    ) -> None:
        for name, size in sizes.items():
            if size <= 0 or size % patch:
                raise ConfigError(f"{name} is {size}; use a positive multiple of {patch}")
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name} is {number!r}; use a whole number of at least 1")
        if not math.isfinite(guidance_scale) or guidance_scale < 0:
            raise ConfigError(f"guidance_scale is {guidance_scale}; use a number of at least 0 (up to 1: no guidance)")
        if output_type not in OUTPUT_TYPES:
            raise ConfigError(f"output_type is {output_type!r}; use one of {', '.join(OUTPUT_TYPES)}")
        _check_scheduler(self.scheduler)


def count_prompts(
    prompt: Prompts,
    negative_prompt: Prompts,
    prompt_embeds: torch.Tensor | None,
    negative_prompt_embeds: torch.Tensor | None,
) -> int:
    """The number of prompts; raises a ConfigError for prompts and embeds that do not fit together."""
    pairs = (("", prompt, prompt_embeds), ("negative_", negative_prompt, negative_prompt_embeds))
    for prefix, texts, states in pairs:
        if texts is None and states is None and not prefix:
            raise ConfigError("pass prompt or prompt_embeds, one of the two")
        if texts is not None and states is not None:
            raise ConfigError(f"pass {prefix}prompt or {prefix}prompt_embeds, not both")
        is_list = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
        if not (texts is None or isinstance(texts, str) or is_list):
            raise ConfigError(f"{prefix}prompt is {texts!r}; use a string or a list of at least one string")
    given, negatives = (states if texts is None else texts for _, texts, states in pairs)
    count = 1 if given is None or isinstance(given, str) else len(given)
    if negatives is not None and not isinstance(negatives, str) and len(negatives) != count:
        raise ConfigError(f"{len(negatives)} negative prompts for {count} prompts; pass one, or one per prompt")
    return count


def _check_scheduler(scheduler: Any) -> None:
    """Refuse a scheduler that does not interpolate linearly between image and noise (flow matching)."""
    config, name = scheduler.config, type(scheduler).__name__
    remedy = "create it with from_config(config, use_flow_sigmas=True, prediction_type='flow_prediction')"
    if config.get("use_flow_sigmas", False):
        if config.get("prediction_type", "flow_prediction") != "flow_prediction":
            raise ConfigError(f"{name} has use_flow_sigmas but prediction_type {config['prediction_type']!r}; {remedy}")
    elif "beta_start" in config or not hasattr(scheduler, "set_begin_index"):
        raise ConfigError(f"{name} is no flow-matching scheduler; use FlowMatchEulerDiscreteScheduler, or {remedy}")
