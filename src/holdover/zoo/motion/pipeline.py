"""EmojiMotionPipeline: text to short clips of moving emoji with a small Wan transformer on pixels, without a VAE.

The "latents" are normalized pixels, (B, 3, frames, height, width).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from typing import Any

import torch
from diffusers import WanTransformer3DModel
from diffusers.callbacks import MultiPipelineCallbacks, PipelineCallback
from diffusers.pipelines.wan.pipeline_output import WanPipelineOutput
from diffusers.schedulers.scheduling_utils import SchedulerMixin
from diffusers.video_processor import VideoProcessor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from ..pixels import Generators, PixelPipeline, Prompts, StepCallback, Tensors, count_prompts


class EmojiMotionPipeline(PixelPipeline):
    """Text to video: `EmojiMotionPipeline.from_pretrained(folder)("spinning red apple, glossy 3d style").frames[0]`.

    `tokenizer` and `text_encoder` turn captions into token states; `transformer` predicts the flow-matching velocity;
    `pixel_mean` and `pixel_std` are the normalization of the training pixels in [-1, 1].
    """

    _callback_tensor_inputs = ["latents", "prompt_embeds", "negative_prompt_embeds"]
    _outputs = "videos"

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        text_encoder: PreTrainedModel,
        transformer: WanTransformer3DModel,
        scheduler: SchedulerMixin,
        pixel_mean: list[float] | None = None,
        pixel_std: list[float] | None = None,
        sample_size: int = 48,
        sample_frames: int = 9,
    ) -> None:
        super().__init__()
        self.register_modules(
            tokenizer=tokenizer, text_encoder=text_encoder, transformer=transformer, scheduler=scheduler
        )
        self.register_to_config(
            pixel_mean=pixel_mean or [0.0] * 3,
            pixel_std=pixel_std or [1.0] * 3,
            sample_size=sample_size,
            sample_frames=sample_frames,
        )
        self.video_processor = VideoProcessor(vae_scale_factor=1)

    @staticmethod
    def calibration_prompts() -> list[str]:
        """Captions like those the model was trained on, for calibration and tuning."""
        return resources.files(__package__).joinpath("prompts.txt").read_text(encoding="utf-8").splitlines()

    def encode_prompt(
        self,
        prompt: Prompts,
        num_videos_per_prompt: int = 1,
        device: torch.device | None = None,
        prompt_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Token states (B*n, tokens, width), each prompt repeated n times in a row."""
        device = device or self._execution_device
        if prompt_embeds is None:
            prompt_embeds = self._encode_text(prompt, device)[0]
        return prompt_embeds.to(device, self.transformer.dtype).repeat_interleave(num_videos_per_prompt, dim=0)

    def decode_latents(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents -> clips (B, 3, frames, height, width) in [-1, 1]."""
        moments = (self.config.pixel_mean, self.config.pixel_std)
        mean, std = (torch.tensor(values, device=latents.device).view(1, 3, 1, 1, 1) for values in moments)
        return (latents.float() * std + mean).clamp(-1, 1)

    def _velocity(self, tensors: Tensors, timestep: torch.Tensor) -> torch.Tensor:
        def branch(name: str, prefix: str) -> torch.Tensor:
            with self.transformer.cache_context(name):
                output: torch.Tensor = self.transformer(
                    hidden_states=tensors["latents"],
                    timestep=timestep,
                    encoder_hidden_states=tensors[f"{prefix}prompt_embeds"],
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
        num_frames: int | None = None,
        num_inference_steps: int = 30,
        sigmas: Sequence[float] | None = None,
        guidance_scale: float = 3.0,
        num_videos_per_prompt: int = 1,
        generator: Generators | None = None,
        latents: torch.Tensor | None = None,
        prompt_embeds: torch.Tensor | None = None,
        negative_prompt_embeds: torch.Tensor | None = None,
        output_type: str = "np",
        return_dict: bool = True,
        callback_on_step_end: StepCallback | PipelineCallback | MultiPipelineCallbacks | None = None,
        callback_on_step_end_tensor_inputs: Sequence[str] = ("latents",),
    ) -> WanPipelineOutput | tuple[Any]:
        """Generate videos for the prompts.

        `guidance_scale` above 1 adds an unconditional branch with `negative_prompt` (default: the empty caption, as in
        training). `latents` are noise, (B, 3, frames, height, width). `output_type` is "pil", "np", "pt" or "latent".
        All other arguments are those of WanPipeline.
        """
        height, width = (self.config.sample_size if size is None else size for size in (height, width))
        frames = self.config.sample_frames if num_frames is None else num_frames
        steps = num_inference_steps if sigmas is None else len(sigmas)
        counts = {"num_inference_steps": steps, "num_videos_per_prompt": num_videos_per_prompt, "num_frames": frames}
        patch = self.transformer.config.patch_size
        self._check_options({"height": height, "width": width}, patch[1], counts, guidance_scale, output_type)
        count = count_prompts(prompt, negative_prompt, prompt_embeds, negative_prompt_embeds)
        on_step_end = self._wrap_callback(callback_on_step_end, callback_on_step_end_tensor_inputs)
        self._guidance_scale, self._interrupt = float(guidance_scale), False
        device = self._execution_device
        tensors = {"prompt_embeds": self.encode_prompt(prompt, num_videos_per_prompt, device, prompt_embeds)}
        if self.do_classifier_free_guidance:
            negatives = negative_prompt if isinstance(negative_prompt, list) else [negative_prompt or ""] * count
            states = self.encode_prompt(negatives, num_videos_per_prompt, device, negative_prompt_embeds)
            tensors["negative_prompt_embeds"] = states
        shape = (count * num_videos_per_prompt, self.transformer.config.in_channels, frames, height, width)
        tensors["latents"] = self._noise(shape, device, generator, latents)
        tokens = frames * height * width // (patch[1] * patch[2])
        timesteps = self.prepare_timesteps(steps, sigmas, tokens, device)
        self._num_timesteps = len(timesteps)
        video: Any = self._denoise(self._velocity, tensors, timesteps, steps, on_step_end)
        if output_type != "latent":
            video = self.video_processor.postprocess_video(self.decode_latents(video), output_type=output_type)
        self.maybe_free_model_hooks()
        return WanPipelineOutput(frames=video) if return_dict else (video,)
