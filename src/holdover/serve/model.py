"""A diffusers pipeline as the server uses it: what it supports, generating a batch, previews of unfinished images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKL, DiffusionPipeline, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from transformers import PreTrainedTokenizerBase

from ..engine.backend import find_transformers
from ..errors import EnableError
from ..zoo import MODELS
from ..zoo.emoji import STYLES, WEIGHTS, EmojiPipeline
from .queue import ImageSpec, Pixels, Size
from .settings import Settings
from .validation import ModelInfo

OnStep = Callable[[int, torch.Tensor], None]
Decoder = Callable[[torch.Tensor, Size], torch.Tensor]


class ServedModel:
    """One pipeline that generates batches of images."""

    def __init__(self, name: str, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.decode = latents_decoder(pipeline)
        self.info = _model_info(name, pipeline, self.decode is not None)
        pipeline.set_progress_bar_config(disable=True)

    def generate(self, batch: Sequence[ImageSpec], on_step: OnStep) -> Pixels:
        """Images of one batch, (B, H, W, 3) bytes; each has its own random generator, so the batch does not matter."""

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step, tensors["latents"])
            return {}

        first = batch[0]
        optional: dict[str, Any] = dict(first.guidance)
        if "callback_on_step_end" in self.info.parameters:
            optional["callback_on_step_end"] = on_step_end
        if first.negative_prompt:
            optional["negative_prompt"] = [one.negative_prompt for one in batch]
        output = self.pipeline(
            [one.prompt for one in batch],
            height=first.size[1],
            width=first.size[0],
            num_inference_steps=first.steps,
            generator=[torch.Generator().manual_seed(one.seed) for one in batch],
            output_type="pt",
            **optional,
        )
        return to_pixels(output.images)

    def close(self) -> None:
        """Release what the model uses outside this process: nothing."""

    def count_tokens(self, prompt: str) -> int:
        """Number of tokens of a prompt; 0 if the pipeline has no tokenizer."""
        tokenizer = self.pipeline.components.get("tokenizer")
        return len(tokenizer(prompt)["input_ids"]) if isinstance(tokenizer, PreTrainedTokenizerBase) else 0


def load_model(settings: Settings) -> ServedModel:
    """The model of a server's settings, from safetensors only."""
    device = select_device(settings)
    if settings.enable_cpu_offload and device.type == "cpu":
        raise EnableError("enable_cpu_offload needs an accelerator to load weights onto, and the device is the CPU.")
    if settings.tensor_parallel_size > 1:
        from .tensor_parallel import load_split_model  # which needs this module

        return load_split_model(settings, device)
    return ServedModel(settings.model, place_pipeline(load_pipeline(settings, device), settings, device))


def select_device(settings: Settings) -> torch.device:
    """The device of a server: the one it was told, else the GPU if there is one."""
    found = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(found if settings.device == "auto" else settings.device)


def load_pipeline(settings: Settings, device: torch.device) -> Any:
    """The pipeline in host memory, in the dtype for that device."""
    default = "float32" if device.type == "cpu" else "bfloat16"
    dtype = getattr(torch, default if settings.dtype == "auto" else settings.dtype)
    cls, source = (EmojiPipeline, WEIGHTS) if settings.model in MODELS else (DiffusionPipeline, settings.model)
    return cls.from_pretrained(str(source), use_safetensors=True, dtype=dtype)


def place_pipeline(pipeline: Any, settings: Settings, device: torch.device) -> Any:
    """The pipeline on its device, or with hooks that load each of its models when it runs."""
    if not settings.enable_cpu_offload:
        return pipeline.to(device)
    pipeline.enable_model_cpu_offload(device=device)
    return pipeline


def _model_info(name: str, pipeline: Any, decodes: bool) -> ModelInfo:
    if not isinstance(getattr(pipeline, "image_processor", None), VaeImageProcessor):
        raise EnableError(f"{type(pipeline).__name__} generates no images that this server can send.")
    parameters = inspect.signature(pipeline.__call__).parameters
    steps = parameters["num_inference_steps"].default
    transformer: Any = next(iter(find_transformers(pipeline).values()))
    if name in MODELS:
        side = int(pipeline.config.sample_size)
    else:
        latents = getattr(pipeline, "default_sample_size", None) or transformer.config.get("sample_size", 128)
        side = int(latents) * int(getattr(pipeline, "vae_scale_factor", 8))
    return ModelInfo(
        name=name,
        pipeline=type(pipeline).__name__,
        transformer=type(transformer).__name__,
        parameters=frozenset(parameters),
        steps=steps if isinstance(steps, int) else 50,
        size=(side, side),
        size_multiple=int(pipeline.image_processor.config.vae_scale_factor),
        fixed_size=name in MODELS,
        partial_images=decodes and "callback_on_step_end" in parameters,
        styles=dict(STYLES) if name in MODELS else {},
    )


# Previews


def latents_decoder(pipeline: Any) -> Decoder | None:
    """A function from this pipeline's latents to images in [0, 1]; None if only the pipeline can decode them."""
    if isinstance(pipeline, EmojiPipeline):
        return lambda latents, size: pipeline.decode_latents(latents, size[1], size[0]) / 2 + 0.5
    vae = pipeline.components.get("vae")
    if not isinstance(vae, AutoencoderKL):
        return None
    unpack = getattr(type(pipeline), "_unpack_latents", None)

    def decode(latents: torch.Tensor, size: Size) -> torch.Tensor:
        if latents.ndim == 3 and unpack is not None:
            latents = unpack(latents, size[1], size[0], pipeline.vae_scale_factor)
        latents = latents / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        images: torch.Tensor = vae.decode(latents.to(vae.dtype), return_dict=False)[0]
        return images / 2 + 0.5

    return decode


class PreviewDecoder:
    """Decodes the latents of a running generation into previews."""

    def __init__(self, decode: Decoder, scheduler: Any, size: Size) -> None:
        self._decode, self._scheduler, self._size = decode, scheduler, size
        self._previous: torch.Tensor | None = None
        self._latents: torch.Tensor | None = None

    def update(self, latents: torch.Tensor) -> None:
        """Store the latents after a step."""
        self._previous, self._latents = self._latents, latents

    @torch.no_grad()
    def preview(self, step: int) -> Pixels:
        """The images expected at the end, seen from the latents after the step of that index."""
        latents = self._latents
        assert latents is not None
        if self._previous is not None and isinstance(self._scheduler, FlowMatchEulerDiscreteScheduler):
            # A flow is a straight line: follow it to sigma 0. Other schedulers show the noisy latents themselves.
            before, now = (float(sigma) for sigma in self._scheduler.sigmas[step : step + 2])
            latents = latents - now / (now - before) * (latents - self._previous)
        return to_pixels(self._decode(latents, self._size))


def to_pixels(images: torch.Tensor) -> Pixels:
    """Images (B, 3, H, W) in [0, 1] as bytes (B, H, W, 3) on the host, rounded as diffusers rounds them."""
    rounded = (images.float().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels: Pixels = rounded.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return pixels
