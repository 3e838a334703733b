"""A diffusers pipeline as the server sees it: what it can draw, and drawing it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers import DiffusionPipeline
from diffusers.image_processor import VaeImageProcessor
from transformers import PreTrainedTokenizerBase

from ..errors import EnableError
from ..runtime.backend import transformers_of
from ..zoo import MODELS
from ..zoo.emoji import STYLES, WEIGHTS, EmojiPipeline
from .forming import Decoder, decoder_of, to_bytes
from .settings import Settings
from .work import Job, Order

OnStep = Callable[[int, torch.Tensor], None]


@dataclass(frozen=True)
class Facts:
    """What a request must know of the model.

    `fixed` says that it draws at one size: pictures of another size are drawn so and resized. `multiple` is what
    width and height of the others are multiples of.
    """

    name: str
    pipeline: str
    transformer: str
    parameters: frozenset[str]
    steps: int
    size: tuple[int, int]
    multiple: int
    fixed: bool
    partial_images: bool
    styles: dict[str, str] = field(default_factory=dict)


class Painter:
    """Draws batches of pictures with one pipeline."""

    def __init__(self, name: str, pipeline: Any) -> None:
        self.pipeline = pipeline
        self.decode: Decoder | None = decoder_of(pipeline)
        self.facts = _facts(name, pipeline, self.decode is not None)
        pipeline.set_progress_bar_config(disable=True)

    def draw(self, job: Job, orders: Sequence[Order], on_step: OnStep) -> torch.Tensor:
        """Pictures (B, 3, H, W) in bytes on the host; each has a generator of its own, so that company is no matter."""

        def step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            on_step(step, tensors["latents"])
            return {}

        width, height = job.size
        negatives = [order.negative_prompt or "" for order in orders]
        watched = {"callback_on_step_end": step_end} if "callback_on_step_end" in self.facts.parameters else {}
        output = self.pipeline(
            [order.prompt for order in orders],
            height=height,
            width=width,
            num_inference_steps=job.steps,
            generator=[torch.Generator().manual_seed(order.seed) for order in orders],
            output_type="pt",
            **watched,
            **dict(job.guidance),
            **({"negative_prompt": negatives} if job.negative else {}),
        )
        return to_bytes(output.images)

    def text_tokens(self, prompt: str) -> int:
        """How many tokens the prompt has; 0 where the pipeline has no tokenizer to ask."""
        tokenizer = self.pipeline.components.get("tokenizer")
        return len(tokenizer(prompt)["input_ids"]) if isinstance(tokenizer, PreTrainedTokenizerBase) else 0


def load(settings: Settings) -> Painter:
    """The model a server was told to serve, from safetensors alone."""
    device, dtype = _place(settings)
    kind, source = (EmojiPipeline, WEIGHTS) if settings.model in MODELS else (DiffusionPipeline, settings.model)
    pipeline = kind.from_pretrained(str(source), use_safetensors=True, dtype=dtype)
    return Painter(settings.model, pipeline.to(device))


def _place(settings: Settings) -> tuple[torch.device, torch.dtype]:
    found = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(found if settings.device == "auto" else settings.device)
    usual = torch.float32 if device.type == "cpu" else torch.bfloat16
    named = {"auto": usual, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    return device, named[settings.dtype]


def _facts(name: str, pipeline: Any, partial_images: bool) -> Facts:
    if not isinstance(getattr(pipeline, "image_processor", None), VaeImageProcessor):
        raise EnableError(f"{type(pipeline).__name__} draws no pictures that this server could send.")
    parameters = inspect.signature(pipeline.__call__).parameters
    steps = parameters["num_inference_steps"].default
    transformer = next(iter(transformers_of(pipeline).values()))
    in_the_box = name in MODELS
    return Facts(
        name=name,
        pipeline=type(pipeline).__name__,
        transformer=type(transformer).__name__,
        parameters=frozenset(parameters),
        steps=steps if isinstance(steps, int) else 50,
        size=_usual_size(pipeline, transformer, in_the_box),
        multiple=int(pipeline.image_processor.config.vae_scale_factor),
        fixed=in_the_box,
        partial_images=partial_images and "callback_on_step_end" in parameters,
        styles=dict(STYLES) if in_the_box else {},
    )


def _usual_size(pipeline: Any, transformer: Any, in_the_box: bool) -> tuple[int, int]:
    """The size a pipeline draws when it is told none."""
    if in_the_box:
        side = int(pipeline.config.sample_size)
    else:
        latents = getattr(pipeline, "default_sample_size", None) or transformer.config.get("sample_size", 128)
        side = int(latents) * int(getattr(pipeline, "vae_scale_factor", 8))
    return side, side
