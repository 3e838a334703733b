"""What holdover does with one tiny model; `python tests/models/reach.py` writes the table of all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import holdover
from holdover.models.inputs import iter_tensors
from holdover.runtime.replay import ReplayReport
from tiny.models import MODELS, TinyModel, transformer_classes, with_timestep

STEPS = 8
TABLE = Path(__file__).resolve().parents[2] / "src/holdover/models/support.json"


def first(output: Any) -> torch.Tensor:
    """The first tensor of an output."""
    return next(iter_tensors(dict(output) if isinstance(output, dict) else output))


def generation(tiny: TinyModel, model: nn.Module, steps: int = STEPS, **of: Any) -> list[torch.Tensor]:
    """The outputs of a denoising loop; the latent moves a little at every step, as it would."""
    inputs = tiny.inputs(**of)
    outputs = []
    with torch.no_grad():
        for i in range(steps):
            now = with_timestep(tiny, _moved(tiny, inputs, 1 - 0.03 * i), 1 - i / steps)
            with _context(model, i, steps):
                outputs.append(first(model(**now)).clone())
    return outputs


def _context(model: nn.Module, step: int, steps: int) -> Any:
    """The step, said as a pipeline says it: not every one of these classes has a timestep of its own."""
    return model.cache_context("cond", step_index=step, num_inference_steps=steps) if _enabled(model) else _Nothing()


def _enabled(model: nn.Module) -> bool:
    return hasattr(model, "cache_context")


class _Nothing:
    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


def _moved(tiny: TinyModel, inputs: dict[str, Any], scale: float) -> dict[str, Any]:
    latent = inputs.get(tiny.latent)
    if isinstance(latent, torch.Tensor) and latent.is_floating_point():
        return {**inputs, tiny.latent: latent * scale}
    if isinstance(latent, (list, tuple)):
        return {**inputs, tiny.latent: type(latent)([t * scale if torch.is_tensor(t) else t for t in latent])}
    return inputs


def replay(tiny: TinyModel) -> ReplayReport | str:
    """The replay check on one model, or why a forward with these inputs is never held."""
    try:
        return holdover.check(tiny.build(), **tiny.inputs())
    except holdover.EnableError as error:
        return str(error)


def under_cache_dit(tiny: TinyModel) -> dict[str, str]:
    """The lists cache-dit caches of one model, or why the model is refused."""
    model, inputs = tiny.build(), tiny.inputs()
    try:
        with torch.no_grad(), holdover.enable(model, "cache_dit", max_warmup_steps=1) as cache:
            for step in range(2):
                with model.cache_context("cond", step_index=step, num_inference_steps=2):
                    model(**inputs)
            report = cache.engine.units[0].report
            return {"lists": str(report.cut).removeprefix("cache-dit: ")}
    except holdover.EnableError as error:
        return {"refused": str(error).partition(". ")[0]}


def rows() -> Iterator[tuple[str, dict[str, Any]]]:
    """One row for each class: of its plain configuration, else of its first."""
    for name in sorted(transformer_classes()):
        configurations = [key for key in MODELS if key.partition("[")[0] == name]
        best = name if name in configurations else configurations[0]
        report, cache_dit = replay(MODELS[best]), under_cache_dit(MODELS[best])
        if isinstance(report, str):
            yield name, {"cut": report, "replay_error": None, "cache_dit": cache_dit}
            continue
        cut = report.cut
        parts = (
            {}
            if isinstance(cut, str)
            else {"lists": cut.lists, "segments": len(cut.segments), "sides": cut.side_output_count}
        )
        streams = [] if isinstance(cut, str) else sorted({f"{c.blocks}.{c.stream}" for c in cut.segments})
        found = {"streams": streams, "left_out": report.left_out, "replays": report.ok, "cache_dit": cache_dit}
        yield name, {"cut": str(cut), **parts, **found}


def write() -> None:
    """Write the support table that ships with the package."""
    import diffusers

    table = {"diffusers": diffusers.__version__, "classes": dict(rows())}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write()
