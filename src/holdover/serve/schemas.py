"""Requests and responses, in the shape of OpenAI's image and video APIs with holdover's additions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

MAX_INTEGER = 2**53 - 1  # the largest that every JSON parser reads exactly; larger ones do not fit in a float either
Count = Annotated[int, Field(ge=1, le=MAX_INTEGER)]
Scale = Annotated[float, Field(ge=0, le=100, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1, le=240, allow_inf_nan=False)]
Format = Literal["png", "jpeg", "webp"]
Quality = Literal["lossless", "high", "balanced", "draft"]

MAX_FIELDS = 64  # of a request

EXAMPLES: list[Any] = [
    {"prompt": "red apple, glossy 3d style", "seed": 42},
    {"prompt": "rocket, twitter style", "size": "256x256", "n": 2, "steps": 20, "guidance": 3.0, "seed": 42},
    {"prompt": "ghost", "stream": True, "partial_images": 3, "cache": {"method": "tea_cache", "rel_l1_thresh": 0.1}},
    {"prompt": "cactus", "num_inference_steps": 50, "cfg_scale": 4.0, "cache": {"method": "none"}},
]

VIDEO_EXAMPLES: list[Any] = [
    {"prompt": "a cat runs through grass", "seed": 42},
    {"prompt": "waves at dusk", "size": "832x480", "seconds": "4", "fps": 16, "cache": {"method": "mag_cache"}},
    {"prompt": "a paper boat", "num_frames": 33, "steps": 30, "compare": True, "cache": {"method": "easy_cache"}},
]


class GenerationRequest(BaseModel):
    """What every request to generate may have: fields of OpenAI's API, those of diffusion models, and the cache."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1, description="What the image or video shows.")
    model: str | None = Field(None, description="A model of /v1/models; by default the one that is served.")
    size: str | None = Field(None, pattern=r"^([1-9][0-9]{0,4}x[1-9][0-9]{0,4}|auto)$", description="WIDTHxHEIGHT.")
    user: str | None = Field(None, description="Ignored: requests are counted by their key.")
    safety_identifier: str | None = Field(None, description="Ignored: requests are counted by their key.")

    seed: Annotated[int, Field(ge=0, le=MAX_INTEGER)] | None = Field(
        None, description="Seed of the noise; the same seed gives the same result. Random by default."
    )
    steps: Count | None = Field(None, description="Denoising steps.")
    num_inference_steps: Count | None = Field(None, description="Another name for steps.")
    guidance: Scale | None = Field(None, description="Guidance scale: how closely to follow the prompt.")
    guidance_scale: Scale | None = Field(None, description="Another name for guidance.")
    cfg_scale: Scale | None = Field(
        None,
        description="Scale of classifier-free guidance for models that have both scales; otherwise another name for "
        "guidance.",
    )
    negative_prompt: str | None = Field(None, description="What the image or video must not show.")

    cache: dict[str, Any] | None = Field(
        None,
        description="The cache for this request: a method with its settings, settings alone to change the server's "
        'default, {"method": "none"} for no cache, a target like {"target": "psnr>=40"}, or {"quality": "high"}.',
    )
    quality: Literal[Quality, "auto", "low", "medium", "xhigh", "max", "standard", "hd"] | None = Field(
        None,
        description="lossless, high, balanced or draft: the fastest plan for that quality; needs a profile of the "
        "model, without which high is ignored. OpenAI's other values are ignored.",
    )

    @model_validator(mode="before")
    @classmethod
    def _check_number_of_fields(cls, values: Any) -> Any:
        """One error instead of one for each of a million fields, which takes seconds to collect."""
        if isinstance(values, dict) and len(values) > MAX_FIELDS:
            message = f"The request has {len(values)} fields; at most {MAX_FIELDS} are allowed."
            raise PydanticCustomError("too_many_fields", message)
        return values


class ImageRequest(GenerationRequest):
    """Which images to generate."""

    model_config = ConfigDict(json_schema_extra={"examples": EXAMPLES})

    n: Count | None = Field(None, description="Number of images. Image i has seed + i.")
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="b64_json by default; url gives the same file as a data: URL."
    )
    output_format: Format | None = Field(None, description="Format of the image file; png by default.")
    output_compression: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="Quality of a jpeg or webp file, 95 by default."
    )
    stream: bool | None = Field(None, description="Server-sent events instead of one response; generates one image.")
    partial_images: Annotated[int, Field(ge=0, le=100)] | None = Field(
        None, description="While streaming: number of previews of the unfinished image."
    )
    style: Literal["vivid", "natural"] | None = Field(None, description="Ignored: describe the style in the prompt.")
    background: Literal["auto", "opaque", "transparent"] | None = Field(
        None, description="Images are opaque; transparent is ignored."
    )
    moderation: Literal["auto", "low"] | None = Field(None, description="Ignored: prompts are not moderated.")
    complexity: Literal["low", "medium", "high"] | None = Field(None, description="Ignored: set steps.")


class EditRequest(ImageRequest):
    """What to make of an image, sent as multipart/form-data: its file, and the fields of a generation."""

    model_config = ConfigDict(json_schema_extra={"examples": []})

    strength: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = Field(
        None, description="How much of the image to change: 1 all of it. For image-to-image pipelines."
    )
    input_fidelity: Literal["low", "high"] | None = Field(None, description="Ignored: set strength.")


class ImageReference(BaseModel):
    """An image in a JSON request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    image_url: str = Field(description="A data: URL of a PNG, JPEG or WebP file; the server fetches nothing.")


class VideoRequest(GenerationRequest):
    """Which video to generate."""

    model_config = ConfigDict(json_schema_extra={"examples": VIDEO_EXAMPLES})

    seconds: str | float | None = Field(
        None, description="Length; the number of frames is the nearest one that the model can generate."
    )
    num_frames: Count | None = Field(None, description="Number of frames, instead of seconds.")
    fps: Rate | None = Field(None, description="Frames per second; by default those of the model.")
    input_reference: ImageReference | None = Field(
        None, description="The image to start from, for image-to-video models; in a form it is a file."
    )
    guidance_scale_2: Scale | None = Field(
        None, description="Guidance scale of the second transformer, for models that have two, such as Wan 2.2."
    )
    compare: bool | None = Field(
        None, description="Also generate the video without a cache from the same noise, and measure the difference."
    )

    @field_validator("seconds", mode="wrap")
    @classmethod
    def _check_seconds(cls, value: Any, check: ValidatorFunctionWrapHandler) -> Any:
        """One error under the name of the field; pydantic has one for each type, named `seconds.str`."""
        try:
            return check(value)
        except ValidationError:
            raise PydanticCustomError("number_or_string", "Input should be a number, or a string with one") from None


class TokenDetails(BaseModel):
    text_tokens: int
    image_tokens: int


class Usage(BaseModel):
    """Tokens of the prompt, and of the image inside the model."""

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


class GenerationInfo(BaseModel):
    """How an image was generated: `C` in a trace is a computed step, `h` a held one."""

    seed: int
    method: str
    settings: dict[str, Any]
    steps: int
    drawn_size: str = Field(description="Size at which the model generated the image, before resizing.")
    computed: dict[str, int]
    held: dict[str, int]
    trace: dict[str, str]
    seconds: Seconds
    batch: int = Field(description="Number of images in its batch, itself included.")
    held_bytes: int
    expected_psnr: float | None = Field(
        default=None, description="PSNR in dB to the uncached image, estimated while a plan ran; null if unknown."
    )
    notes: list[str] = Field(default=[], description="Where its plan comes from, and what quality to expect.")


class Image(BaseModel):
    b64_json: str | None = None
    url: str | None = None
    holdover: GenerationInfo


class ImagesResponse(BaseModel):
    """The images, in the order of their seeds."""

    created: int
    data: list[Image]
    size: str
    output_format: Format = "png"
    quality: Literal["auto"] = "auto"
    background: Literal["opaque"] = "opaque"
    usage: Usage
    notes: list[str] = Field(
        default=[], description="Fields of the request that were ignored, and what to use instead."
    )


class StreamEvent(BaseModel):
    """The fields that both events of a stream have."""

    b64_json: str
    created_at: int
    size: str
    output_format: Format = "png"
    quality: Literal["auto"] = "auto"
    background: Literal["opaque"] = "opaque"


class PartialImage(StreamEvent):
    """A preview of the image after `step` of `steps` steps."""

    type: Literal["image_generation.partial_image", "image_edit.partial_image"]
    partial_image_index: int
    step: int
    steps: int
    trace: dict[str, str]


class CompletedImage(StreamEvent):
    """The finished image."""

    type: Literal["image_generation.completed", "image_edit.completed"]
    usage: Usage
    notes: list[str] = []
    holdover: GenerationInfo


class VideoError(BaseModel):
    """Why a video failed."""

    code: str
    message: str


class VideoComparison(BaseModel):
    """The difference from the video without a cache, over the frames as they were generated, before encoding.

    `psnr` is that of all pixels of all frames, in decibels; it is null if the videos are equal. `psnr_frames` has one
    value for each frame.
    """

    psnr: float | None
    psnr_frames: list[float | None]
    equal: bool
    speedup: float
    plain: GenerationInfo = Field(description="How the video without a cache was generated.")


class Video(BaseModel):
    """A video and the job that generates it."""

    id: str
    object: Literal["video"] = "video"
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = Field(default=None, description="When the server deletes the video.")
    status: Literal["queued", "in_progress", "completed", "failed"] = "queued"
    progress: int = Field(default=0, description="Percent of the denoising steps that are done.")
    error: VideoError | None = None
    model: str
    prompt: str
    seconds: str
    size: str
    remixed_from_video_id: None = None
    num_frames: int
    fps: float
    steps: int
    holdover: GenerationInfo | None = Field(
        default=None, description="How the video was generated, when it is completed."
    )
    comparison: VideoComparison | None = None
    notes: list[str] = Field(
        default=[], description="Fields of the request that were ignored, and what to use instead."
    )


class VideoList(BaseModel):
    """A page of videos; `last_id` is `after` of the next one."""

    object: Literal["list"] = "list"
    data: list[Video]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedVideo(BaseModel):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: Literal[True] = True


class CompareRequest(BaseModel):
    """Two images of the same size."""

    model_config = ConfigDict(extra="forbid", strict=True)

    a: str = Field(min_length=1, description="PNG in base64.")
    b: str = Field(min_length=1, description="PNG in base64.")


class Comparison(BaseModel):
    """The difference between two images; `psnr`, in decibels, is null if they are equal.

    `ssim` is null for images smaller than 11 x 11 pixels, `lpips` (AlexNet) for images smaller than 31 x 31.
    """

    psnr: float | None
    ssim: float | None
    lpips: float | None
    equal: bool


class Error(BaseModel):
    message: str
    type: str
    param: str | None
    code: str


class ErrorResponse(BaseModel):
    """The body of every response that is not a 2xx."""

    error: Error


class Status(BaseModel):
    status: Literal["ok", "ready"]


class Limits(BaseModel):
    """The largest values that a request may have."""

    max_size: int
    max_steps: int
    max_images: int
    max_prompt: int
    max_previews: int
    max_frames: int


class VideoDefaults(BaseModel):
    """What a model generates if a request says nothing: a number of frames is a multiple of `multiple` plus 1.

    `image`: whether it takes an image to start from, or needs one.
    """

    num_frames: int
    fps: float
    multiple: int
    image: Literal["none", "optional", "required"]


class Model(BaseModel):
    """A model, with the defaults and limits of requests for it.

    `guidance` and `cfg_scale` are null if the model has no such scale. `square` and `size_multiple` describe the sizes
    it generates. `edits`: whether /v1/images/edits takes an image for it. `video`: for a model that generates videos.
    """

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str
    pipeline: str
    transformer: str
    size: str
    square: bool
    size_multiple: int
    steps: int
    guidance: float | None
    cfg_scale: float | None
    negative_prompt: bool
    styles: dict[str, str]
    partial_images: bool
    edits: bool
    video: VideoDefaults | None
    limits: Limits


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class SettingInfo(BaseModel):
    """One setting of a method, as a form shows it; `kind` is `other` for lists and optional values."""

    name: str
    kind: Literal["number", "integer", "boolean", "text", "other"]
    default: Any
    minimum: float | None
    maximum: float | None
    choices: list[Any] | None
    allowed: str
    doc: str


class MethodInfo(BaseModel):
    """A method that a request may name; `batched` says whether its images are generated in batches by default."""

    method: str
    doc: str
    batched: bool
    settings: list[SettingInfo]


class MethodTotals(BaseModel):
    """What one method has done since the server started; steps are forwards of the transformer."""

    images: int = 0
    generations: int = 0
    computed: int = 0
    held: int = 0
    peak_bytes: int = 0

    def add(self, other: MethodTotals) -> None:
        for name in ("images", "generations", "computed", "held"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.peak_bytes = max(self.peak_bytes, other.peak_bytes)


class FrontierPoint(BaseModel):
    """A schedule that was measured: how many times fewer steps it computes, and its PSNR in decibels."""

    speed: float
    psnr: float
    origin: str


class ProfileReport(BaseModel):
    """What the profiles say about the model that is served."""

    profile: dict[str, Any] | None = Field(default=None, description="The method's constants, with their source.")
    certificates: list[dict[str, Any]] = Field(
        default=[], description="Targets that were tested, with their confidence."
    )
    frontier: list[FrontierPoint] = Field(default=[], description="Schedules that were measured on this model.")
    targets: bool = Field(default=False, description="Whether a request may have a quality target.")


class CacheReport(ProfileReport):
    """The server's default cache, and what every method has done."""

    method: str
    settings: dict[str, Any]
    notes: list[str]
    totals: dict[str, MethodTotals]
    last: GenerationInfo | None
    prompt_cache: dict[str, int] | None


class CacheInfo(CacheReport):
    """The default cache, what every method has done, and the methods and settings that a request may have."""

    methods: list[MethodInfo]
