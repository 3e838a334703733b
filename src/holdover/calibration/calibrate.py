"""Measure a model: a few uncached generations, each followed by a short one that shows how errors grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from ..errors import ConfigError
from ..profiles import Profile
from .calls import Caller, batches, quiet
from .prompts import GENERATIONS, Prompt, built_in
from .session import Session


def calibrate(
    pipe: Any,
    prompts: Sequence[Prompt] | None = None,
    num_inference_steps: int = 50,
    *,
    guidance_scale: float | None = None,
    seed: int = 0,
    batch_size: int = 1,
    seams: bool = False,
    store: str = "device",
    name: str | None = None,
    progress: bool = True,
    **call: Any,
) -> Profile:
    """Measure everything every method needs, on a few uncached generations.

    A prompt is a text, or the keywords of one call; without any, four of a built-in list are used. `batch_size` of them
    run at once, and `call` goes to every call of the pipeline. `store` says where the outputs of a generation wait
    until it is over: on the `"device"`, the `"cpu"` or on `"disk"`. `seams` measures residuals too, for plans that hold
    those. Each generation is followed by one in which a sixth of the steps is computed, so the whole costs about a
    fifth more than the generations alone.
    """
    chosen = list(built_in(pipe)[:GENERATIONS] if prompts is None else prompts)
    if not chosen:
        raise ConfigError("Calibrating needs at least one prompt.")
    if not hasattr(getattr(pipe, "scheduler", None), "step"):
        raise ConfigError(f"Calibrating needs a pipeline with a scheduler; {type(pipe).__name__} has none.")
    caller, parts = Caller(pipe, num_inference_steps, guidance_scale, call), list(batches(chosen, batch_size, seed))
    bar = tqdm(total=2 * len(parts), disable=not progress, desc="calibrating", unit="run")
    with quiet(pipe), bar, Session(caller, store, seams) as session:
        for part, seeds in parts:
            session.measure(part, seeds, bar)
        return session.profile(name or f"calibrated-{type(pipe).__name__}", chosen)
