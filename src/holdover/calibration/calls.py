"""Calling any pipeline the same way: prompts, seeds, settings."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from diffusers.utils import BaseOutput

from ..errors import ConfigError
from ..metrics import as_images
from .prompts import Prompt


@dataclass(frozen=True)
class Caller:
    """A pipeline with the settings all its calls share."""

    pipe: Any
    steps: int
    guidance: float | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"num_inference_steps must be a whole number of at least 1, not {self.steps!r}.")

    def __call__(self, prompts: Sequence[Prompt], seeds: Sequence[int]) -> torch.Tensor | None:
        """Generate one picture for each prompt, in one batch; float pictures, or None where the output is none."""
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        call = {**self._shared(), **_merged(prompts), "generator": generators if len(generators) > 1 else generators[0]}
        known, any_other = keywords_of(self.pipe)
        wanted = {k: v for k, v in call.items() if any_other or k in known or k in self.settings}
        with torch.no_grad():
            output = self.pipe(**wanted)
        try:
            return as_images(output[0] if isinstance(output, (tuple, BaseOutput)) else output)
        except ConfigError:
            return None

    def _shared(self) -> dict[str, Any]:
        guidance = {} if self.guidance is None else {"guidance_scale": self.guidance}
        return {"num_inference_steps": self.steps, "output_type": "pt", **guidance, **self.settings}


def keywords_of(pipe: Any) -> tuple[frozenset[str], bool]:
    """The keywords a pipeline takes, and whether it takes any other, too.

    One that takes `**options` hands them on to the class it is made from: those of that class are its own.
    """
    found: set[str] = set()
    for cls in (c for c in type(pipe).__mro__ if "__call__" in vars(c)):
        parameters = inspect.signature(vars(cls)["__call__"]).parameters.values()
        found |= {parameter.name for parameter in parameters if parameter.kind is not parameter.VAR_KEYWORD}
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters):
            return frozenset(found), False
    return frozenset(found), True


def _merged(prompts: Sequence[Prompt]) -> dict[str, Any]:
    """The keywords of one call: texts side by side, or the keywords of a single one."""
    if all(isinstance(prompt, str) for prompt in prompts):
        return {"prompt": list(prompts) if len(prompts) > 1 else prompts[0]}
    if len(prompts) > 1:
        raise ConfigError("Prompts that are keywords of a call are generated one at a time: use batch_size=1.")
    return dict(prompts[0])  # type: ignore[arg-type]


def batches(prompts: Sequence[Prompt], size: int, seed: int) -> Iterator[tuple[Sequence[Prompt], list[int]]]:
    """Prompts with their seeds, `size` at a time."""
    if size < 1:
        raise ConfigError(f"batch_size must be at least 1, not {size}.")
    for start in range(0, len(prompts), size):
        part = prompts[start : start + size]
        yield part, [seed + start + i for i in range(len(part))]


@contextmanager
def quiet(pipe: Any) -> Iterator[None]:
    """Without the pipeline's own progress bars."""
    if not hasattr(pipe, "set_progress_bar_config"):
        yield
        return
    before = vars(pipe).get("_progress_bar_config")
    pipe.set_progress_bar_config(disable=True)
    try:
        yield
    finally:
        if before is None:
            del pipe._progress_bar_config
        else:
            pipe._progress_bar_config = before
