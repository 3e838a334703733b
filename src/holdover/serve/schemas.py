"""Requests and answers, as OpenAI's image API has them, with what holdover adds."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Count = Annotated[int, Field(ge=1)]
Scale = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]

EXAMPLES: list[Any] = [
    {"prompt": "red apple, glossy 3d style", "seed": 42},
    {"prompt": "rocket, twitter style", "size": "256x256", "n": 2, "steps": 20, "guidance": 3.0, "seed": 42},
    {"prompt": "ghost", "stream": True, "partial_images": 3, "cache": {"method": "tea_cache", "rel_l1_thresh": 0.1}},
    {"prompt": "cactus", "num_inference_steps": 50, "cfg_scale": 4.0, "cache": {"method": "none"}},
]


class ImageRequest(BaseModel):
    """What to draw. Fields of OpenAI's API first, then those of diffusion models, then the cache."""

    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra={"examples": EXAMPLES})

    prompt: str = Field(min_length=1, description="What to draw.")
    model: str | None = Field(None, description="A model of /v1/models; the one that is served unless told.")
    n: Count | None = Field(None, description="How many pictures. Picture i has seed + i.")
    size: str | None = Field(None, pattern=r"^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$", description="WIDTHxHEIGHT.")
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="b64_json unless told; url gives the same PNG as a data: URL."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one answer; draws one picture.")
    partial_images: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="While streaming: how often to show the unfinished picture."
    )
    user: str | None = Field(None, description="Accepted for OpenAI's clients; not used.")

    seed: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = Field(
        None, description="The picture's noise; the same seed gives the same picture. Random unless told."
    )
    steps: Count | None = Field(None, description="Denoising steps.")
    num_inference_steps: Count | None = Field(None, description="The same under its other name.")
    guidance: Scale | None = Field(None, description="How closely to follow the prompt.")
    guidance_scale: Scale | None = Field(None, description="The same under its other name.")
    cfg_scale: Scale | None = Field(
        None, description="Scale of classifier-free guidance, for models that have both; else the same as guidance."
    )
    negative_prompt: str | None = Field(None, description="What not to draw.")

    cache: dict[str, Any] | None = Field(
        None,
        description="The cache for this request alone: a method with its settings, no method for the server's own "
        'with other settings, {"method": "none"} for no cache, or a target like {"target": "psnr>=40"}.',
    )


class TokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    """Tokens of the prompt, and of the picture inside the model."""

    input_tokens: int
    input_tokens_details: TokenDetails
    output_tokens: int
    total_tokens: int


class Seconds(BaseModel):
    """Where the time went; `computed` and `held` are parts of `generation`."""

    queued: float
    generation: float
    computed: float
    held: float


class Made(BaseModel):
    """How a picture was made: `C` in a trace is a computed step, `h` a held one."""

    seed: int
    method: str
    settings: dict[str, Any]
    steps: int
    drawn_size: str
    computed: dict[str, int]
    held: dict[str, int]
    trace: dict[str, str]
    seconds: Seconds
    batch: int = Field(description="Pictures that were drawn together with this one, itself included.")
    held_bytes: int


class Picture(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    holdover: Made


class ImagesResponse(BaseModel):
    """The pictures, in the order of their seeds."""

    created: int
    data: list[Picture]
    size: str
    output_format: Literal["png"] = "png"
    usage: Usage


class StreamEvent(BaseModel):
    """What both events of a stream carry."""

    b64_json: str
    created_at: int
    size: str
    output_format: Literal["png"] = "png"
    quality: Literal["auto"] = "auto"
    background: Literal["opaque"] = "opaque"


class PartialImage(StreamEvent):
    """The picture as it is after `step` of `steps` steps."""

    type: Literal["image_generation.partial_image"] = "image_generation.partial_image"
    partial_image_index: int
    step: int
    steps: int
    trace: dict[str, str]


class Completed(StreamEvent):
    """The picture."""

    type: Literal["image_generation.completed"] = "image_generation.completed"
    usage: Usage
    holdover: Made


class CompareRequest(BaseModel):
    """Two pictures of one size, PNG in base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    a: str = Field(min_length=1, description="PNG in base64.")
    b: str = Field(min_length=1, description="PNG in base64.")


class Comparison(BaseModel):
    """How far two pictures are apart; `psnr` in decibels is null where they are equal."""

    psnr: float | None
    equal: bool


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """What every answer other than a 2xx is."""

    error: Error


class Status(BaseModel):
    status: Literal["ok", "ready"]


class Limits(BaseModel):
    """The most a request may ask for."""

    max_size: int
    max_steps: int
    max_images: int
    max_prompt: int


class Model(BaseModel):
    """A model, with what a client needs to ask well."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    pipeline: str
    transformer: str
    size: str
    steps: int
    styles: dict[str, str]
    partial_images: bool
    limits: Limits


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class SettingInfo(BaseModel):
    """One setting of a method, as a form would show it."""

    name: str
    kind: Literal["number", "integer", "boolean", "text", "other"]
    default: Any
    minimum: float | None
    maximum: float | None
    choices: list[Any] | None
    allowed: str
    doc: str


class MethodInfo(BaseModel):
    """A method that a request may ask for; `batched` says whether its pictures are drawn together."""

    method: str
    doc: str
    batched: bool
    settings: list[SettingInfo]


class MethodTotals(BaseModel):
    """What one method has done since the server started, in forwards of the transformer."""

    images: int
    generations: int
    computed: int
    held: int
    peak_bytes: int


class FrontierPoint(BaseModel):
    """A schedule that was tried: how many times fewer steps it computes, and its PSNR in decibels."""

    speed: float
    psnr: float
    origin: str


class CacheInfo(BaseModel):
    """The cache: how the server stands, what it has done, what it knows of the model."""

    method: str
    settings: dict[str, Any]
    notes: list[str]
    totals: dict[str, MethodTotals]
    last: Made | None
    profile: dict[str, Any] | None = Field(description="The constants the method stands on, with their source.")
    certificates: list[dict[str, Any]] = Field(description="Targets that were shown to be met, and how surely.")
    frontier: list[FrontierPoint] = Field(description="Schedules that were tried on this model.")
    targets: bool = Field(description="Whether a request may ask for a quality.")
    prompt_cache: dict[str, int] | None
    methods: list[MethodInfo]
