"""A diffusers pipeline as the server uses it: what it supports, generating a batch, previews of unfinished images."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import PIL.ImageOps
import torch
from diffusers import AutoencoderKL, AutoPipelineForImage2Image, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from transformers import PreTrainedTokenizerBase

from ..errors import EnableError
from ..loading import image_size, load_pipeline, require_packages
from ..metrics import get_images
from ..models.pipelines import find_transformers
from ..plan.calls import keywords_of, video_limits, video_multiples
from ..plan.generation import resolve_profile
from ..video import RATE_KEYWORDS, default_rate, stream_frames
from ..zoo import MODELS
from ..zoo.emoji import STYLES, EmojiPipeline
from .queue import ImageSpec, Pixels, Size, VideoSpec
from .schemas import VideoDefaults
from .settings import Settings
from .validation import ModelInfo

OnStep = Callable[[int, torch.Tensor], None]
TakeFrame = Callable[[torch.Tensor], None]
Decoder = Callable[[torch.Tensor, Size], torch.Tensor]


class ServedModel:
    """One pipeline that generates batches of images, or videos one at a time.

    `editor` changes a given image: the pipeline itself if it takes one, else diffusers' image-to-image pipeline of the
    same parts, so that a cache on their transformer works in both; None if there is none. `profile` is the shipped one
    of this model: every rank looks for it here, because that gathers parts of weights that are split over ranks.
    """

    def __init__(self, name: str, pipeline: Any) -> None:
        self.pipeline, self.editor, self.decode = pipeline, None, None
        if "num_frames" in find_parameters(pipeline):
            require_packages("Serving videos", "video", "av")
            self.info = _video_model_info(name, pipeline)
        else:
            self.editor, self.decode = find_editor(pipeline), latents_decoder(pipeline)
            self.info = _model_info(name, pipeline, self.editor, self.decode is not None)
        self.profile = resolve_profile(None, next(iter(find_transformers(pipeline).values())))
        self.info = replace(self.info, has_profile=self.profile is not None)
        for one in (self.pipeline, self.editor):
            if one is not None:
                one.set_progress_bar_config(disable=True)

    def generate(self, batch: Sequence[ImageSpec], on_step: OnStep) -> Pixels:
        """Images of one batch, (B, H, W, 3) bytes; each has its own random generator, so the batch does not matter."""
        pipeline, call = self._call(batch, on_step)
        return to_pixels(pipeline(**call).images)

    def generate_video(self, spec: VideoSpec, on_step: OnStep, take: TakeFrame) -> None:
        """Pass the frames of a video, (3, H, W) in [0, 1], to `take`: as they are decoded, where the VAE allows it."""
        pipeline, call = self._call([spec], on_step)
        with stream_frames(pipeline, take) as streamed:
            output = pipeline(**call)
        if not streamed:
            for frame in get_images(output)[0]:
                take(frame)

    def _call(self, batch: Sequence[ImageSpec], on_step: OnStep) -> tuple[Any, dict[str, Any]]:
        """The pipeline that generates a batch, and the arguments of its call."""

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step, tensors["latents"])
            return {}

        first = batch[0]
        optional: dict[str, Any] = dict(first.guidance)
        pipeline, parameters = self.pipeline, self.info.parameters
        if isinstance(first, VideoSpec):
            optional["num_frames"] = first.frames
            optional |= {name: round(first.fps) for name in RATE_KEYWORDS if name in parameters}
            if first.image is not None:
                optional["image"] = PIL.ImageOps.fit(first.image, first.size)
        elif first.image is not None:  # alone in its batch
            pipeline, parameters = self.editor, self.info.edit_parameters
            optional["image"] = first.image
        if first.strength is not None:
            optional["strength"] = first.strength
        if "callback_on_step_end" in parameters:
            optional["callback_on_step_end"] = on_step_end
        if first.negative_prompt:
            optional["negative_prompt"] = [one.negative_prompt for one in batch]
        return pipeline, optional | {
            "prompt": [one.prompt for one in batch],
            "height": first.size[1],
            "width": first.size[0],
            "num_inference_steps": first.steps,
            "generator": [torch.Generator().manual_seed(one.seed) for one in batch],
            "output_type": "pt",
        }

    def close(self) -> None:
        """Release what the model uses outside this process: nothing."""

    def count_tokens(self, prompt: str) -> int:
        """Number of tokens of a prompt; 0 if the pipeline has no tokenizer."""
        tokenizer = self.pipeline.components.get("tokenizer")
        return len(tokenizer(prompt)["input_ids"]) if isinstance(tokenizer, PreTrainedTokenizerBase) else 0


def load_model(settings: Settings) -> ServedModel:
    """The model of a server's settings; its images have their size where a request names none."""
    if settings.tensor_parallel_size > 1:
        from .tensor_parallel import load_split_model  # which needs this module

        model = load_split_model(settings)
    else:
        model = ServedModel(settings.model, load_pipeline(settings))
    width, height = model.info.size
    model.info = replace(model.info, size=(settings.width or width, settings.height or height))
    return model


def find_editor(pipeline: Any) -> Any | None:
    """The pipeline that takes an image with the prompt: this one, or one that diffusers makes of its parts."""
    if "image" in inspect.signature(pipeline.__call__).parameters:
        return pipeline
    try:
        return AutoPipelineForImage2Image.from_pipe(pipeline)
    except ValueError:  # there is none for this class
        return None


def _model_info(name: str, pipeline: Any, editor: Any | None, decodes: bool) -> ModelInfo:
    if not isinstance(getattr(pipeline, "image_processor", None), VaeImageProcessor):
        raise EnableError(f"{type(pipeline).__name__} generates no images or videos that this server can send.")
    parameters = inspect.signature(pipeline.__call__).parameters
    steps = parameters["num_inference_steps"].default
    transformer: Any = next(iter(find_transformers(pipeline).values()))
    edits = {} if editor is None else dict(inspect.signature(editor.__call__).parameters)
    return ModelInfo(
        name=name,
        pipeline=type(pipeline).__name__,
        transformer=type(transformer).__name__,
        parameters=frozenset(parameters),
        steps=steps if isinstance(steps, int) else 50,
        size=image_size(pipeline),
        size_multiple=int(pipeline.image_processor.config.vae_scale_factor),
        fixed_size=name in MODELS,
        partial_images=decodes and "callback_on_step_end" in parameters,
        styles=dict(STYLES) if name in MODELS else {},
        guidance=_default_number(parameters, "guidance_scale"),
        cfg_scale=_default_number(parameters, "true_cfg_scale"),
        edit_parameters=frozenset(edits),
        strength=_default_number(edits, "strength"),
    )


def _video_model_info(name: str, pipeline: Any) -> ModelInfo:
    """What a pipeline says about its videos: patches and latent frames restrict their size and their frames."""
    parameters, transformer = find_parameters(pipeline), next(iter(find_transformers(pipeline).values()))
    config: Any = transformer.config
    patch = getattr(config, "patch_size", 1)
    side = patch[-1] if isinstance(patch, (tuple, list)) else patch
    multiple, temporal = video_multiples(pipeline)
    spatial = multiple // int(side or 1)
    frames = getattr(config, "sample_frames", None) or pipeline.config.get("sample_frames")
    size = list(image_size(pipeline))
    for index, axis in enumerate(("width", "height")):
        latents = getattr(config, f"sample_{axis}", None)
        known = (
            _default_number(parameters, axis),
            getattr(pipeline, f"default_{axis}", None),
            latents and latents * spatial,
        )
        size[index] = int(next((side for side in known if side), size[index]))
    takes_image = parameters.get("image")
    needs_image = takes_image is not None and (
        takes_image.default is inspect.Parameter.empty or "ImageToVideo" in type(pipeline).__name__
    )
    return ModelInfo(
        name=name,
        pipeline=type(pipeline).__name__,
        transformer=type(transformer).__name__,
        parameters=frozenset(parameters),
        steps=int(_default_number(parameters, "num_inference_steps") or 50),
        size=(size[0], size[1]),
        size_multiple=multiple,
        fixed_size=False,
        partial_images=False,
        limits=video_limits(pipeline),
        guidance=_default_number(parameters, "guidance_scale"),
        cfg_scale=_default_number(parameters, "true_cfg_scale"),
        video=VideoDefaults(
            num_frames=int(_default_number(parameters, "num_frames") or frames or 17),
            fps=default_rate(pipeline, {name: _default_number(parameters, name) for name in RATE_KEYWORDS}),
            multiple=temporal,
            image="none" if takes_image is None else "required" if needs_image else "optional",
        ),
    )


def find_parameters(pipeline: Any) -> dict[str, inspect.Parameter]:
    """The parameters of a pipeline's call, and those of bases that it passes `**options` to."""
    known, _ = keywords_of(pipeline)
    found: dict[str, inspect.Parameter] = {}
    for cls in reversed([cls for cls in type(pipeline).__mro__ if "__call__" in vars(cls)]):
        found |= inspect.signature(vars(cls)["__call__"]).parameters
    return {name: parameter for name, parameter in found.items() if name in known}


def _default_number(parameters: Mapping[str, inspect.Parameter], name: str) -> float | None:
    """The default of a parameter; None if there is no such parameter or its default is no number."""
    default = parameters[name].default if name in parameters else None
    return float(default) if isinstance(default, (int, float)) else None


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
            first = step + (self._scheduler.begin_index or 0)  # an image that is changed starts late
            before, now = (float(sigma) for sigma in self._scheduler.sigmas[first : first + 2])
            latents = latents - now / (now - before) * (latents - self._previous)
        return to_pixels(self._decode(latents, self._size))


def to_pixels(images: torch.Tensor) -> Pixels:
    """Images (B, 3, H, W) in [0, 1] as bytes (B, H, W, 3) on the host, rounded as diffusers rounds them."""
    rounded = (images.float().clamp(0, 1) * 255).round().to(torch.uint8)
    pixels: Pixels = rounded.permute(0, 2, 3, 1).contiguous().cpu().numpy()
    return pixels
