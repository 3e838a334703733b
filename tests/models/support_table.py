"""Run holdover on the tiny models; `python tests/models/support_table.py` writes the table of supported classes."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import holdover
from holdover.engine.verify import ReplayReport
from holdover.models.inputs import iter_tensors
from tiny.models import MODELS, TinyModel, transformer_classes, with_timestep

STEPS = 8
TABLE = Path(__file__).resolve().parents[2] / "src/holdover/models/support.json"


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of an output."""
    return next(iter_tensors(dict(output) if isinstance(output, dict) else output))


def run_generation(tiny: TinyModel, model: nn.Module, steps: int = STEPS, **inputs: Any) -> list[torch.Tensor]:
    """Run a denoising loop in which the latent changes a little at every step, and return each step's output."""
    start = tiny.inputs(**inputs)
    outputs = []
    with torch.no_grad():
        for i in range(steps):
            arguments = with_timestep(tiny, _scale_latent(tiny, start, 1 - 0.03 * i), 1 - i / steps)
            # The step is passed as a pipeline passes it, because some of these classes have no timestep argument.
            name_step = getattr(model, "cache_context", None)
            with name_step("cond", step_index=i, num_inference_steps=steps) if name_step else contextlib.nullcontext():
                outputs.append(first_tensor(model(**arguments)).clone())
    return outputs


def _scale_latent(tiny: TinyModel, inputs: dict[str, Any], scale: float) -> dict[str, Any]:
    latent = inputs.get(tiny.latent)
    if isinstance(latent, torch.Tensor) and latent.is_floating_point():
        return {**inputs, tiny.latent: latent * scale}
    if isinstance(latent, (list, tuple)):
        return {**inputs, tiny.latent: type(latent)([t * scale if torch.is_tensor(t) else t for t in latent])}
    return inputs


def check_replay(tiny: TinyModel) -> ReplayReport | str:
    """Return the replay report of one model, or the reason why a forward with these inputs is never held."""
    try:
        return holdover.check(tiny.build(), **tiny.inputs())
    except holdover.EnableError as error:
        return str(error)


def run_cache_dit(tiny: TinyModel) -> dict[str, str]:
    """Return the lists that cache-dit caches in one model, or the reason why the model is refused."""
    model, inputs = tiny.build(), tiny.inputs()
    try:
        with torch.no_grad(), holdover.enable(model, "cache_dit", max_warmup_steps=1) as cache:
            for step in range(2):
                with model.cache_context("cond", step_index=step, num_inference_steps=2):
                    model(**inputs)
            return {"lists": str(cache.reports()["transformer"].stack).removeprefix("cache-dit: ")}
    except holdover.EnableError as error:
        return {"refused": str(error).partition(". ")[0]}


def build_row(name: str) -> dict[str, Any]:
    """Return one class's row of the table, from its plain configuration or else from its first one."""
    tiny = MODELS[name if name in MODELS else next(key for key in MODELS if key.partition("[")[0] == name)]
    report, cache_dit = check_replay(tiny), run_cache_dit(tiny)
    if isinstance(report, str):
        return {"stack": report, "streams": [], "replays": False, "cache_dit": cache_dit}
    stack, parts, streams = report.stack, {}, []
    if not isinstance(stack, str):
        parts = {"segments": len(stack.segments), "side_outputs": stack.side_output_count}
        streams = sorted({f"{segment.blocks}.{segment.stream}" for segment in stack.segments})
    return {"stack": str(stack), **parts, "streams": streams, "replays": report.ok, "cache_dit": cache_dit}


def write_table() -> None:
    """Write the support table that ships with the package."""
    import diffusers

    rows = {name: build_row(name) for name in sorted(transformer_classes())}
    TABLE.write_text(json.dumps({"diffusers": diffusers.__version__, "classes": rows}, indent=1) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    write_table()
