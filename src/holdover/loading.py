"""Loading a pipeline as every command and the server do: one set of settings, checked before anything is loaded.

Importing this module imports neither torch nor diffusers.
"""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import Config, setting
from .errors import ConfigError, did_you_mean
from .zoo import MODELS, find

if TYPE_CHECKING:
    import torch

_UNKNOWN_SIDE = 1024  # of an image, where the pipeline does not say how large its images are


@dataclass(frozen=True)
class ModelSettings(Config):
    """Which pipeline to load, where to put it and in what form, and the arguments that all its calls share."""

    model: str = setting(
        "emoji", doc="emoji, emoji-motion, the folder of a diffusers pipeline, or the id of a checkpoint"
    )
    device: str = setting("auto", doc="cpu, cuda, cuda:1, mps; auto uses the GPU if there is one")
    dtype: str = setting(
        "auto",
        choices=("auto", "float32", "bfloat16", "float16"),
        doc="data type of the weights; auto is float32 on a CPU and for emoji, bfloat16 elsewhere",
    )
    offload: str = setting(
        "none",
        choices=("none", "model", "group", "sequential"),
        doc="keep weights in host memory and load them when they are needed, by model, by group of layers or by layer",
    )
    height: int | None = setting(None, ge=1, doc="height of the images in pixels; default: the model's own")
    width: int | None = setting(None, ge=1, doc="width of the images in pixels; default: the model's own")
    negative_prompt: str | None = setting(None, doc="what the images must not show")
    lora: tuple[str, ...] = setting((), doc="LoRA weights, a file or an id, or FILE=0.8 for a weight; repeatable")
    compile: bool = setting(False, doc="compile the blocks of the transformer with torch.compile")
    quantize: str = setting(
        "none", choices=("none", "int8"), doc="quantize the weights of the transformer with torchao"
    )

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every call of the pipeline that were given."""
        values = {name: getattr(self, name) for name in ("height", "width", "negative_prompt")}
        return {name: value for name, value in values.items() if value is not None}

    @property
    def changed(self) -> dict[str, Any]:
        """The settings that are not the defaults, as plain JSON values."""
        defaults = {field.name: field.default for field in self.settings()}
        return {name: value for name, value in self.as_dict().items() if getattr(self, name) != defaults[name]}

    def check_model(self) -> None:
        """Raise a ConfigError for a model, LoRA or package that is not there; imports nothing large."""
        path = Path(self.model).expanduser()
        if path.is_file():
            raise ConfigError(f"{self.model} is a file. Give the folder of a diffusers pipeline.")
        if self.model not in MODELS and not path.is_dir():
            if _is_path(self.model):
                raise ConfigError(f"The folder {self.model!r} does not exist.")
            if "/" not in self.model:
                hint = did_you_mean(self.model, MODELS)
                names = ", ".join(map(repr, MODELS))
                raise ConfigError(
                    f"There is no model {self.model!r}.{hint} Give {names}, a folder or an id like 'owner/name'."
                )
        if self.device == "cpu":
            self.check_offload()
        for name, _ in map(_parse_lora, self.lora):
            if _is_path(name) and not Path(name).expanduser().exists():
                raise ConfigError(f"The LoRA {name!r} does not exist.")
        if self.lora:
            require_packages("A LoRA", "lora", "peft")
        if self.quantize != "none":
            require_packages("Quantizing", "quantize", "torchao")

    def check_offload(self) -> None:
        """Raise a ConfigError if weights are to be offloaded; the device is the CPU."""
        if self.offload != "none":
            raise ConfigError(
                f"offload {self.offload!r} moves weights between the host and an accelerator, and the device is the "
                "CPU: leave it out."
            )


@dataclass(frozen=True)
class CallSettings(ModelSettings):
    """The settings of the commands: which pipeline, and what each of its calls gets."""

    frames: int | None = setting(None, ge=1, doc="number of frames of a video; default: the model's own")
    fps: float | None = setting(None, ge=1, le=240, doc="frames per second of a video; default: the model's own")
    image: str | None = setting(None, doc="an image file that every image or video starts from")

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of every call of the pipeline that were given, except the image and the rate."""
        return super().arguments | ({} if self.frames is None else {"num_frames": self.frames})

    def check_model(self) -> None:
        super().check_model()
        if self.image is not None and not Path(self.image).expanduser().is_file():
            raise ConfigError(f"There is no image {self.image!r}.")

    def call_arguments(self, pipe: Any) -> dict[str, Any]:
        """The arguments of every call of this pipeline, with the opened image and the rate, checked."""
        from .plan.calls import check_video, image_arguments, keywords_of
        from .video import RATE_KEYWORDS

        check_video(pipe, self.arguments | {"image": self.image, "fps": self.fps})
        rates = [] if self.fps is None else [name for name in RATE_KEYWORDS if name in keywords_of(pipe)[0]]
        image = {} if self.image is None else image_arguments(pipe, self.image)
        return image | self.arguments | dict.fromkeys(rates, self.fps)


def require_packages(what: str, extra: str, *packages: str) -> None:
    """Raise a ConfigError that names the extra to install if a package is missing; imports none of them."""
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"{what} needs {', '.join(missing)}: pip install 'holdover[{extra}]'.")


def _is_path(name: str) -> bool:
    """Whether a name can only be a path: ids of checkpoints have one slash and do not start with a dot."""
    return name.startswith((".", "/", "~")) or "\\" in name or name.count("/") > 1 or name.endswith(".safetensors")


def _parse_lora(text: str) -> tuple[str, float]:
    """`style.safetensors=0.8` as name and weight; the weight is 1 where none is given."""
    name, equals, weight = text.rpartition("=")
    if not equals:
        return text, 1.0
    try:
        value = float(weight)
    except ValueError:
        value = math.nan
    if not name or not math.isfinite(value):
        raise ConfigError(f"A LoRA is written FILE or FILE=WEIGHT with a finite number, not {text!r}.")
    return name, value


def load_pipeline(settings: ModelSettings) -> Any:
    """Load a pipeline, from safetensors only; add LoRAs, quantize, place and compile it as the settings say."""
    settings.check_model()
    device = choose_device(settings.device)
    return place_pipeline(prepare_pipeline(settings, device), settings, device)


def prepare_pipeline(settings: ModelSettings, device: torch.device) -> Any:
    """A pipeline in host memory, with its LoRAs and quantized weights, for this device."""
    import torch

    from .models.pipelines import find_transformers
    from .plan.calls import keywords_of

    if device.type == "cpu":
        settings.check_offload()
    default = "float32" if device.type == "cpu" or settings.model in MODELS else "bfloat16"
    pipe = _read_pipeline(settings.model, getattr(torch, default if settings.dtype == "auto" else settings.dtype))
    known, takes_others = keywords_of(pipe)
    for name in settings.arguments:
        if name not in known and not takes_others and name != "num_frames":  # which `check_video` knows more about
            raise ConfigError(f"{type(pipe).__name__} takes no {name!r}.")
    _add_loras(pipe, settings.lora)
    if settings.quantize == "int8":
        for transformer in find_transformers(pipe).values():
            _quantize(transformer)
    return pipe


def place_pipeline(pipe: Any, settings: ModelSettings, device: torch.device) -> Any:
    """Move a pipeline to its device, or add hooks that load its weights when they are needed; compile its blocks."""
    from .models.pipelines import find_transformers

    if settings.offload == "model":
        pipe.enable_model_cpu_offload(device=device)
    elif settings.offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif settings.offload == "group":
        pipe.enable_group_offload(device, offload_type="leaf_level", use_stream=device.type == "cuda")
    else:
        pipe.to(device)
    if settings.compile:
        for transformer in find_transformers(pipe).values():
            blocks = getattr(transformer, "_repeated_blocks", None)  # where diffusers knows them, they compile once
            getattr(transformer, "compile_repeated_blocks" if blocks else "compile")()
    return pipe


def choose_device(name: str) -> torch.device:
    """The device of a name, `auto` for the accelerator of this machine if it has one; an error if it is not there."""
    import torch

    here = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if name == "auto":
        return here or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device must be auto, cpu, cuda, cuda:1, mps or another of torch, not {name!r}.") from None
    if device.type != "cpu" and (here is None or here.type != device.type):
        raise ConfigError(f"There is no {device.type} device here: use {here.type if here else 'cpu'}, or auto.")
    if here is not None and device.index is not None and device.index >= torch.accelerator.device_count():
        raise ConfigError(f"device must be at most {here.type}:{torch.accelerator.device_count() - 1}, not {name!r}.")
    return device


def _read_pipeline(model: str, dtype: torch.dtype) -> Any:
    """A pipeline on the CPU: a model of the package, a folder, or a checkpoint by its id."""
    from diffusers import DiffusionPipeline

    source = find(model)[1] if model in MODELS else Path(model).expanduser()
    index = source / "model_index.json"
    try:
        name = json.loads(index.read_text("utf-8")).get("_class_name") if index.exists() else ""
        options = {"dtype": dtype, "local_files_only": source.is_dir(), "use_safetensors": True}
        with _quiet_libraries():
            cls: Any = {own.__name__: own for own, _ in map(find, MODELS)}.get(name, DiffusionPipeline)
            return cls.from_pretrained(str(source) if source.is_dir() else model, **options)
    except (OSError, ValueError, AttributeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Cannot load {model!r}: {first}") from None


@contextmanager
def _quiet_libraries() -> Iterator[None]:
    """Without the messages of diffusers, whose errors are raised too, and without progress bars of loading."""
    import diffusers.utils.logging as diffusers_logging
    import transformers.utils.logging as transformers_logging

    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity(diffusers_logging.CRITICAL)
    diffusers_logging.disable_progress_bar()  # that of the steps is the pipeline's own
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        diffusers_logging.set_verbosity(level)


def _add_loras(pipe: Any, loras: tuple[str, ...]) -> None:
    """Load LoRA weights as adapters and activate all of them, each with its weight."""
    if not loras:
        return
    if not hasattr(pipe, "load_lora_weights"):
        raise ConfigError(f"{type(pipe).__name__} takes no LoRA weights.")
    weights = {}
    for number, (name, weight) in enumerate(map(_parse_lora, loras)):
        path = Path(name).expanduser()
        adapter = f"{path.stem.replace('.', '_')}_{number}"
        try:
            pipe.load_lora_weights(str(path) if path.exists() else name, adapter_name=adapter)
        except (OSError, ValueError, KeyError, RuntimeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(f"Cannot load the LoRA {name!r}: {first}") from None
        weights[adapter] = weight
    pipe.set_adapters(list(weights), list(weights.values()))


def _quantize(transformer: torch.nn.Module) -> None:
    """Store the weights of all linear layers in 8 bits, except those of LoRAs; the arithmetic stays as it is."""
    from torch import nn
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    def is_linear(module: nn.Module, name: str) -> bool:
        return isinstance(module, nn.Linear) and "lora_" not in name

    quantize_(transformer, Int8WeightOnlyConfig(), is_linear)


def image_size(pipe: Any) -> tuple[int, int]:
    """Width and height of the images that a pipeline generates by default."""
    from .models.pipelines import find_transformers
    from .zoo.pixels import PixelPipeline

    if isinstance(pipe, PixelPipeline):
        side = int(pipe.config.sample_size)
    else:
        transformer: Any = next(iter(find_transformers(pipe).values()))
        config: Any = getattr(transformer, "config", None) or {}
        latents = getattr(pipe, "default_sample_size", None) or config.get("sample_size", None)
        scale = int(getattr(pipe, "vae_scale_factor", 8))
        side = int(latents) * scale if isinstance(latents, int) else _UNKNOWN_SIDE
    return side, side
