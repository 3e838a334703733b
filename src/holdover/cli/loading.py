"""From what was typed to a pipeline and a prompt it understands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ConfigError, did_you_mean
from ..zoo import MODELS


def load_pipeline(model: str) -> Any:
    """The model in the box, a folder, or a checkpoint's id; on the GPU where there is one."""
    if model not in MODELS and not Path(model).is_dir() and "/" not in model:
        hint = did_you_mean(model, MODELS)
        raise ConfigError(f"There is no model {model!r}.{hint} Give 'emoji', a folder or an id like 'owner/name'.")
    with _quiet():
        return _loaded(model)


def checked_prompt(model: str, prompt: str) -> str:
    """The prompt, if there is one; for the model in the box with its style written out, if it knows it."""
    if not prompt.strip():
        raise ConfigError("The prompt is empty; say what to draw, for example 'red apple, glossy 3d style'.")
    if model not in MODELS:
        return prompt
    from ..zoo.emoji.text import STYLES, caption

    subject, comma, style = (part.strip() for part in prompt.rpartition(","))
    if comma and (style in STYLES or style.endswith("style")):
        return caption(subject, style)
    return prompt


def _loaded(model: str) -> Any:
    import torch

    gpu = torch.cuda.is_available()
    if model in MODELS:
        from ..zoo import load

        return load(model).to("cuda" if gpu else "cpu")
    dtype = torch.bfloat16 if gpu else torch.float32
    local = Path(model).is_dir()
    try:
        cls = _pipeline_class(Path(model))
        pipe = cls.from_pretrained(model, dtype=dtype, local_files_only=local, use_safetensors=True)
    except (OSError, ValueError, AttributeError) as error:
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"Cannot load {model!r}: {first}") from None
    return pipe.to("cuda" if gpu else "cpu")


def _pipeline_class(folder: Path) -> Any:
    """The model in the box has a class of its own, also where it was saved; all others are diffusers'."""
    from diffusers import DiffusionPipeline

    from ..zoo.emoji import EmojiPipeline

    index = folder / "model_index.json"
    own = index.exists() and json.loads(index.read_text("utf-8")).get("_class_name") == EmojiPipeline.__name__
    return EmojiPipeline if own else DiffusionPipeline


@contextmanager
def _quiet() -> Iterator[None]:
    """Loading is not worth three progress bars, and what goes wrong is said once."""
    import diffusers.utils.logging as diffusing
    import transformers.utils.logging as transforming

    level = diffusing.get_verbosity()
    diffusing.set_verbosity(diffusing.CRITICAL)
    diffusing.disable_progress_bar()
    transforming.disable_progress_bar()
    try:
        yield
    finally:
        diffusing.set_verbosity(level)
        diffusing.enable_progress_bar()
        transforming.enable_progress_bar()
