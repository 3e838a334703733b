"""EmojiPipeline: text to 64x64 emoji with a small Flux transformer that works on pixels, without a VAE.

The "latents" are normalized pixels, packed into tokens by `pack`. The pipeline follows diffusers' conventions, so that
anything that works on a FluxPipeline (caches, offload, callbacks, other flow-matching schedulers) works here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np
import torch
from diffusers import DiffusionPipeline, FluxTransformer2DModel
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.utils import logging
from diffusers.utils.torch_utils import randn_tensor
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ConfigError, did_you_mean

logger = logging.get_logger(__name__)

Tensors = dict[str, torch.Tensor]
OnStepEnd = Callable[[int, Any, Tensors], None]
StepCallback = Callable[[Any, int, Any, dict[str, Any]], dict[str, Any]]
Generators = torch.Generator | list[torch.Generator]
Prompts = str | list[str] | None
Embeds = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]
OUTPUT_TYPES = ("pil", "np", "pt", "latent")


def pack(images: torch.Tensor, patch: int) -> torch.Tensor:
    """(B, C, H, W) -> (B, H/p * W/p, C*p*p): one token per patch, in reading order."""
    return pixel_unshuffle(images, patch).flatten(2).transpose(1, 2)


def unpack(tokens: torch.Tensor, height: int, width: int, patch: int) -> torch.Tensor:
    """The inverse of `pack`."""
    grid = tokens.transpose(1, 2).reshape(len(tokens), -1, height // patch, width // patch)
    return pixel_shuffle(grid, patch)


def position_ids(height: int, width: int, patch: int, device: torch.device | None = None) -> torch.Tensor:
    """(0, row, column) of every patch, the `img_ids` of FluxTransformer2DModel."""
    axes = [torch.arange(size, device=device) for size in (1, height // patch, width // patch)]
    return torch.cartesian_prod(*axes).float()


class EmojiPipeline(DiffusionPipeline):  # type: ignore[misc]
    """Text-to-emoji: `EmojiPipeline.from_pretrained(folder)("red apple, glossy 3d style").images[0]`.

    `tokenizer` and `text_encoder` turn captions into token states and one pooled vector; `transformer` predicts
    the flow-matching velocity; `pixel_mean` and `pixel_std` are the normalization of the training pixels in [-1, 1].
    """

    model_cpu_offload_seq = "text_encoder->transformer"
    _callback_tensor_inputs = [
        "latents",
        "prompt_embeds",
        "pooled_prompt_embeds",
        "negative_prompt_embeds",
        "negative_pooled_prompt_embeds",
    ]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: PreTrainedModel,
        transformer: FluxTransformer2DModel,
        scheduler: SchedulerMixin,
        pixel_mean: list[float] | None = None,
        pixel_std: list[float] | None = None,
        patch_size: int = 4,
        sample_size: int = 64,
    ) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, scheduler=scheduler
        )
        self.register_to_config(
            pixel_mean=pixel_mean or [0.0] * 3,
            pixel_std=pixel_std or [1.0] * 3,
            patch_size=patch_size,
            sample_size=sample_size,
        )
        self.image_processor = VaeImageProcessor(vae_scale_factor=patch_size)
        self._guidance_scale = 1.0
        self._num_timesteps = 0
        self._interrupt = False
        self._patch = patch_size

    @property
    def guidance_scale(self) -> float:
        return self._guidance_scale

    @property
    def do_classifier_free_guidance(self) -> bool:
        return self._guidance_scale > 1

    @property
    def num_timesteps(self) -> int:
        return self._num_timesteps

    @staticmethod
    def calibration_prompts() -> list[str]:
        """Captions like those the model was trained on, for calibration and tuning."""
        return resources.files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()

    def encode_prompt(
        self,
        prompt: Prompts,
        num_images_per_prompt: int = 1,
        device: torch.device | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Token states (B*n, tokens, width) and pooled vectors (B*n, width), each prompt repeated n times in a row."""
        device = device or self._execution_device
        if prompt_embeds is None or pooled_prompt_embeds is None:
            if prompt is None:
                raise ConfigError("pass a prompt, or prompt_embeds with pooled_prompt_embeds")
            prompts, limit = [prompt] if isinstance(prompt, str) else prompt, self.tokenizer.model_max_length
            for text, ids in zip(prompts, self.tokenizer(prompts)["input_ids"], strict=True):
                if len(ids) > limit:
                    logger.warning(f"the prompt has {len(ids)} tokens and is truncated to {limit}: {text!r}")
            padding: Any = {"padding": "max_length", "max_length": limit, "truncation": True}
            batch = self.tokenizer(prompts, return_tensors="pt", **padding).to(device)
            output = self.text_encoder(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            prompt_embeds, pooled_prompt_embeds = output.last_hidden_state, output.pooler_output
            prompt_embeds = prompt_embeds * batch["attention_mask"][..., None].to(prompt_embeds.dtype)
        states, pooled = (
            embeds.to(device, self.transformer.dtype).repeat_interleave(num_images_per_prompt, dim=0)
            for embeds in (prompt_embeds, pooled_prompt_embeds)
        )
        return states, pooled

    def prepare_latents(
        self,
        batch_size: int,
        size: tuple[int, int],
        device: torch.device,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Noise for `batch_size` images as (B, tokens, channels), or the given latents on the device."""
        rows, columns = (pixels // self._patch for pixels in size)
        shape = (batch_size, rows * columns, self.transformer.config.in_channels)
        if latents is None:
            if isinstance(generator, list) and len(generator) != batch_size:
                raise ConfigError(f"{len(generator)} generators for {batch_size} images; pass one, or one per image")
            noise: torch.Tensor = randn_tensor(shape, generator, device, self.transformer.dtype)
            return noise
        if tuple(latents.shape) != shape:
            raise ConfigError(f"latents have shape {tuple(latents.shape)}, this call needs {shape}")
        return latents.to(device, self.transformer.dtype)

    def decode_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Packed latents -> images (B, 3, H, W) in [-1, 1]."""
        images = unpack(latents.float(), height, width, self._patch)
        moments = (self.config.pixel_mean, self.config.pixel_std)
        mean, std = (torch.tensor(values, device=latents.device).view(1, 3, 1, 1) for values in moments)
        return (images * std + mean).clamp(-1, 1)

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

    def _velocity(self, tensors: Tensors, timestep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """One model evaluation: the conditional branch, then the unconditional one if guidance is on."""

        def branch(name: str, prefix: str) -> torch.Tensor:
            states = tensors[f"{prefix}prompt_embeds"]
            with self.transformer.cache_context(name):
                output: torch.Tensor = self.transformer(
                    hidden_states=tensors["latents"],
                    timestep=timestep,
                    encoder_hidden_states=states,
                    pooled_projections=tensors[f"{prefix}pooled_prompt_embeds"],
                    txt_ids=torch.zeros(states.shape[1], 3, device=ids.device),
                    img_ids=ids,
                    return_dict=False,
                )[0]
            return output

        cond = branch("cond", "")
        if not self.do_classifier_free_guidance:
            return cond
        uncond = branch("uncond", "negative_")
        return uncond + self._guidance_scale * (cond - uncond)

    def _denoise(
        self, tensors: Tensors, timesteps: torch.Tensor, ids: torch.Tensor, steps: int, on_step_end: OnStepEnd
    ) -> torch.Tensor:
        """The denoising loop; `tensors` holds latents and embeds, and callbacks may replace any of them."""
        order = self.scheduler.order
        warmup = max(len(timesteps) - steps * order, 0)
        train_steps = self.scheduler.config.num_train_timesteps
        with self.progress_bar(total=steps) as bar:
            for index, timestep in enumerate(timesteps):
                if self._interrupt:
                    continue
                latents = tensors["latents"]
                velocity = self._velocity(tensors, timestep.expand(latents.shape[0]) / train_steps, ids)
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
        self, sizes: dict[str, int], counts: dict[str, int], guidance_scale: float, output_type: str
    ) -> None:
        for name, size in sizes.items():
            if size <= 0 or size % self._patch:
                raise ConfigError(f"{name} is {size}; use a positive multiple of {self._patch}")
        for name, number in counts.items():
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise ConfigError(f"{name} is {number!r}; use a whole number of at least 1")
        if not math.isfinite(guidance_scale) or guidance_scale < 0:
            raise ConfigError(f"guidance_scale is {guidance_scale}; use a number of at least 0 (up to 1: no guidance)")
        if output_type not in OUTPUT_TYPES:
            raise ConfigError(f"output_type is {output_type!r}; use one of {', '.join(OUTPUT_TYPES)}")

    @torch.no_grad()
    def __call__(
        self,
        prompt: Prompts = None,
        negative_prompt: Prompts = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 30,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 3.0,
        num_images_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        pooled_prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        negative_pooled_prompt_embeds: torch.Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> ImagePipelineOutput | tuple[Any]:
        """Generate images for the prompts.

        `guidance_scale` above 1 adds an unconditional branch with `negative_prompt` (default: the empty caption, as in
        training). `latents` are packed noise, (B, tokens, channels). `output_type` is "pil", "np", "pt" or "latent".
        All other arguments are those of FluxPipeline.
        """
        height, width = (self.config.sample_size if size is None else size for size in (height, width))
        steps = num_inference_steps if sigmas is None else len(sigmas)
        embeds: Embeds = (prompt_embeds, pooled_prompt_embeds, negative_prompt_embeds, negative_pooled_prompt_embeds)
        counts = {"num_inference_steps": steps, "num_images_per_prompt": num_images_per_prompt}
        self._check_options({"height": height, "width": width}, counts, guidance_scale, output_type)
        count = _count_prompts(prompt, negative_prompt, embeds)
        on_step_end = self._wrap_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        _check_scheduler(self.scheduler)
        self._guidance_scale, self._interrupt = float(guidance_scale), False
        device = self._execution_device
        states, pooled = self.encode_prompt(prompt, num_images_per_prompt, device, *embeds[:2])
        tensors = {"prompt_embeds": states, "pooled_prompt_embeds": pooled}
        if self.do_classifier_free_guidance:
            negatives = negative_prompt if isinstance(negative_prompt, list) else [negative_prompt or ""] * count
            states, pooled = self.encode_prompt(negatives, num_images_per_prompt, device, *embeds[2:])
            tensors |= {"negative_prompt_embeds": states, "negative_pooled_prompt_embeds": pooled}
        total = count * num_images_per_prompt
        tensors["latents"] = self.prepare_latents(total, (height, width), device, generator, latents)
        timesteps = self.prepare_timesteps(steps, sigmas, tensors["latents"].shape[1], device)
        self._num_timesteps = len(timesteps)
        ids = position_ids(height, width, self._patch, device)
        images: Any = self._denoise(tensors, timesteps, ids, steps, on_step_end)

        if output_type != "latent":
            images = self.decode_latents(images, height, width)
            images = self.image_processor.postprocess(images, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)


def _count_prompts(prompt: Prompts, negative_prompt: Prompts, embeds: Embeds) -> int:
    """The number of prompts; raises a ConfigError for prompts and embeds that do not fit together."""
    for prefix, texts, states, pooled in (("", prompt, *embeds[:2]), ("negative_", negative_prompt, *embeds[2:])):
        names = f"{prefix}prompt_embeds and {prefix}pooled_prompt_embeds"
        if (states is None) != (pooled is None):
            raise ConfigError(f"{names} belong together: pass both (encode_prompt returns them)")
        if states is not None and pooled is not None and len(states) != len(pooled):
            raise ConfigError(f"{names} have {len(states)} and {len(pooled)} rows; they need the same number")
        if texts is None and states is None and not prefix:
            raise ConfigError("pass prompt or prompt_embeds (with pooled_prompt_embeds), one of the two")
        if texts is not None and states is not None:
            raise ConfigError(f"pass {prefix}prompt or {prefix}prompt_embeds, not both")
        is_list = isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts)
        if not (texts is None or isinstance(texts, str) or is_list):
            raise ConfigError(f"{prefix}prompt is {texts!r}; use a string or a list of at least one string")
    given, negatives = prompt if embeds[0] is None else embeds[0], negative_prompt if embeds[2] is None else embeds[2]
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
