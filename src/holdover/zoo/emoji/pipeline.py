"""EmojiPipeline: text to 64x64 emoji with a small Flux transformer that works on pixels, without a VAE.

The "latents" are normalized pixels, packed into tokens by `pack`.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.pipeline_utils import ImagePipelineOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from torch.nn.functional import pixel_shuffle, pixel_unshuffle
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ...errors import ConfigError
from ..pixels import Generators, PixelPipeline, Prompts, StepCallback, Tensors, count_prompts

Embeds = tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


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


class EmojiPipeline(PixelPipeline):
    """Text-to-emoji: `EmojiPipeline.from_pretrained(folder)("red apple, glossy 3d style").images[0]`.

    `tokenizer` and `text_encoder` turn captions into token states and one pooled vector; `transformer` predicts
    the flow-matching velocity; `pixel_mean` and `pixel_std` are the normalization of the training pixels in [-1, 1].
    """

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
        self._patch = patch_size

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
            prompt_embeds, pooled_prompt_embeds = self._encode_text(prompt, device)
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
        return self._noise(shape, device, generator, latents)

    def decode_latents(self, latents: torch.Tensor, height: int, width: int) -> torch.Tensor:
        """Packed latents -> images (B, 3, H, W) in [-1, 1]."""
        images = unpack(latents.float(), height, width, self._patch)
        moments = (self.config.pixel_mean, self.config.pixel_std)
        mean, std = (torch.tensor(values, device=latents.device).view(1, 3, 1, 1) for values in moments)
        return (images * std + mean).clamp(-1, 1)

    def _velocity(self, tensors: Tensors, timestep: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:

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

        return self._guided(branch)

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
        self._check_options({"height": height, "width": width}, self._patch, counts, guidance_scale, output_type)
        _check_pooled(embeds)
        count = count_prompts(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        on_step_end = self._wrap_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
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
        train_steps = self.scheduler.config.num_train_timesteps

        def velocity(tensors: Tensors, timestep: torch.Tensor) -> torch.Tensor:
            return self._velocity(tensors, timestep / train_steps, ids)

        images: Any = self._denoise(velocity, tensors, timesteps, steps, on_step_end)

        if output_type != "latent":
            images = self.decode_latents(images, height, width)
            images = self.image_processor.postprocess(images, output_type=output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)


def _check_pooled(embeds: Embeds) -> None:
    for prefix, states, pooled in (("", *embeds[:2]), ("negative_", *embeds[2:])):
        names = f"{prefix}prompt_embeds and {prefix}pooled_prompt_embeds"
        if (states is None) != (pooled is None):
            raise ConfigError(f"{names} belong together: pass both (encode_prompt returns them)")
        if states is not None and pooled is not None and len(states) != len(pooled):
            raise ConfigError(f"{names} have {len(states)} and {len(pooled)} rows; they need the same number")
