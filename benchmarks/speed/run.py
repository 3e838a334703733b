"""The sections of a run: the table of each model, eager and compiled, and what grows on FLUX."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .loop import Pipeline, floors
from .measure import Results, check_identity, compare_to_ideal, first_line, measure_row
from .methods import SHORTEST_PLAN, UNCACHED, Candidate, candidates
from .models import MODELS, Model, Shape
from .table import RESIDUAL

CHIEF = (RESIDUAL, "plan, K = 10 of 50")  # compiling the whole model again takes a minute for each
FLOAT8 = ("plan, K = 10 of 50", "plan, K = 8 of 50", "plan, K = 6 of 50", RESIDUAL)
COMPILE_S = 100.0  # must be left in the budget before blocks are compiled; otherwise the mode is left to the next run
TINY = Shape(64, 64, text=6)


@dataclass(frozen=True)
class Options:
    """Options of a run."""

    tiny: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    @property
    def steps(self) -> int:
        return 6 if self.tiny else 50

    def shape(self, model: Model) -> Shape:
        return replace(TINY, frames=min(model.shape.frames, 5)) if self.tiny else model.shape


class Table:
    """The rows of one model in some modes: eager, with compiled blocks, compiled whole, in float8."""

    def __init__(
        self, name: str, options: Options, results: Results, modes: Sequence[str] = ("eager", "compiled")
    ) -> None:
        self._name, self._options, self._results, self._modes = name, options, results, modes
        self._model = MODELS[name]
        self._shape = options.shape(self._model)
        self._rows = candidates(self._model.ratios)
        self._uncached: dict[str, dict[str, Any]] = {}
        self._floors: dict[str, float] = {}

    def run(self) -> None:
        """Measure the missing rows."""
        lacking = [mode for mode in self._modes if self._results.lacking(self._identities(mode))]
        if not lacking:
            return
        pipe = None
        for mode in ["eager", *(mode for mode in lacking if mode != "eager")]:
            self._results.check_time(0 if mode == "eager" or self._options.tiny else COMPILE_S)
            discard(pipe)  # other libraries may leave hooks behind: each mode starts with a new model
            pipe = build(self._name, self._options, self._shape)
            compile_model(pipe, mode, self._options)
            self._baseline(pipe, mode)
            if mode in lacking:
                self._mode(pipe, mode)
        discard(pipe)

    def _identities(self, mode: str) -> Iterator[dict[str, Any]]:
        for row in self._rows_in(mode):
            yield self._identity(mode, row)
        if mode != "whole":
            yield self._identity(mode, Candidate("identical", "", UNCACHED.enable))

    def _rows_in(self, mode: str) -> list[Candidate]:
        """All rows; only the chief ones for a model compiled as a whole, and plans down to 6 of 50 in float8."""
        if mode == "float8":
            rows = {row.label: row for row in (*self._rows, SHORTEST_PLAN)}
            return [rows[label] for label in FLOAT8]
        return [row for row in self._rows if mode != "whole" or row.label in CHIEF]

    def _identity(self, mode: str, row: Candidate) -> dict[str, Any]:
        return describe_row("table", self._name, self._shape, self._options.steps) | {
            "mode": mode,
            "by": row.by,
            "label": row.label,
            "title": self._model.title,
        }

    def _baseline(self, pipe: Pipeline, mode: str) -> None:
        """The uncached run: measured in every process, because rows are compared with it; added only if missing."""
        stop = min(self._model.uncached_steps, self._options.steps)
        row = measure_row(pipe, UNCACHED, self._options.steps, stop)
        if "wall_s" in row:
            row["seconds"] = row["wall_s"] * self._options.steps / row["measured_steps"]
        self._uncached[mode] = row
        if mode != "whole":
            self._floors = floors(pipe)
        row_id = self._identity(mode, UNCACHED)
        if self._results.needs(row_id):
            self._results.add(row_id | row | {"floors_ms": self._floors})

    def _mode(self, pipe: Pipeline, mode: str) -> None:
        for candidate in self._rows_in(mode):
            row_id = self._identity(mode, candidate)
            if not self._results.needs(row_id):
                continue
            self._results.check_time()
            row = measure_row(pipe, candidate, self._options.steps)
            if "raised" not in row:
                row |= {"seconds": row["wall_s"]} | self._compare_to_uncached(row, mode)
                row |= self._compare_to_ideal(row, mode, candidate)
            self._results.add(row_id | {"forced": candidate.forced} | row)
        if mode != "whole":
            self._identical(pipe, mode)

    def _compare_to_ideal(self, row: dict[str, Any], mode: str, candidate: Candidate) -> dict[str, Any]:
        """A computed step counts as the mean of the uncached run: single steps differ by a tenth."""
        plain = self._uncached[mode]
        if "seconds" not in plain:
            return {}
        step_ms = plain["seconds"] * 1e3 / self._options.steps
        return compare_to_ideal(row, step_ms, self._floors.get(candidate.floor or ""))

    def _identical(self, pipe: Pipeline, mode: str) -> None:
        row_id = self._identity(mode, Candidate("identical", "", UNCACHED.enable))
        if self._results.needs(row_id):
            found = check_identity(pipe, self._model.ratios, self._options.steps)
            self._results.add(row_id | {"identical": found})

    def _compare_to_uncached(self, row: dict[str, Any], mode: str) -> dict[str, Any]:
        """Speedups over the uncached runs of this process, and memory beyond the one in the same mode."""
        plain = self._uncached[mode]
        over = {name: u["seconds"] / row["wall_s"] for name, u in self._uncached.items() if "seconds" in u}
        if row["peak_bytes"] is None or "peak_bytes" not in plain:
            return {"speedup": over}
        return {"speedup": over, "bytes_over_uncached": row["peak_bytes"] - plain["peak_bytes"]}


def describe_row(section: str, model: str, shape: Shape, steps: int) -> dict[str, Any]:
    """The part of a row's key that says what is generated."""
    return {"section": section, "model": model, "shape": str(shape), "batch": shape.batch, "steps": steps}


def build(name: str, options: Options, shape: Shape) -> Pipeline:
    """A pipeline of that model, after the memory of the last one is freed."""
    empty_memory(options)
    transformer = MODELS[name].build(options.device, options.tiny)
    return Pipeline(transformer, MODELS[name].inputs_for(transformer, shape))


def empty_memory(options: Options) -> None:
    """Free what compiled code and dropped models take on the device."""
    torch._dynamo.reset()
    gc.collect()
    if not options.tiny:
        torch.cuda.empty_cache()


def compile_model(pipe: Any, mode: str, options: Options) -> None:
    """Compile the blocks (in float8 after quantizing them), the whole, or nothing; a tiny run only traces."""
    how: dict[str, Any] = {"backend": "eager"} if options.tiny else {}
    if mode == "float8":
        quantize_blocks(pipe.transformer, options)
    if mode in ("compiled", "float8"):
        pipe.transformer.compile_repeated_blocks(fullgraph=True, **how)
    elif mode == "whole":
        pipe.transformer = torch.compile(pipe.transformer, **how)


def quantize_blocks(transformer: nn.Module, options: Options) -> None:
    """Float8 weights, and inputs quantized per row, in the blocks' linear layers but those of one row (modulation).

    Processors do not multiply in float8 with torchao: a tiny run quantizes to int8.
    """
    from torchao import quantization as ao

    config = (
        ao.Int8DynamicActivationInt8WeightConfig()
        if options.tiny
        else ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow())
    )
    for blocks in transformer.children():
        if isinstance(blocks, nn.ModuleList):
            ao.quantize_(blocks, config, lambda module, name: isinstance(module, nn.Linear) and "norm" not in name)


def discard(pipe: Pipeline | None) -> None:
    """Free the weights, even if something still references the model."""
    if pipe is not None:
        for parameter in pipe.transformer.parameters():
            parameter.data = torch.empty(0)


def growth_points(tiny: bool) -> list[tuple[str, Shape, int]]:
    """What grows, the shape, and the number of steps."""
    if tiny:
        return [("resolution", TINY, 6), ("batch", replace(TINY, batch=2), 6), ("steps", TINY, 12)]
    usual = Shape(1024, 1024)
    return [
        *(("batch", replace(usual, batch=batch), 50) for batch in (1, 2, 4, 8)),
        *(("steps", usual, steps) for steps in (20, 50, 100)),
        *(("resolution", Shape(side, side), 50) for side in (512, 1024, 1536, 2048)),
    ]


def measure_growth(options: Options, results: Results) -> None:
    """What a step costs beyond the ideal as images, batches and step counts grow; FLUX, eager."""
    model, transformer = MODELS["flux"], None
    chosen = [row for row in candidates(model.ratios) if row.label in CHIEF]
    for axis, shape, steps in growth_points(options.tiny):
        for row in chosen:
            row_id = describe_row("growth", "flux", shape, steps) | {"mode": axis, "by": row.by, "label": row.label}
            if not results.needs(row_id):
                continue
            results.check_time()
            if transformer is None:
                transformer = build("flux", options, shape).transformer
            results.add(
                row_id | _measure_growth_row(Pipeline(transformer, model.inputs_for(transformer, shape)), row, steps)
            )


def _measure_growth_row(pipe: Pipeline, candidate: Candidate, steps: int) -> dict[str, Any]:
    try:
        floor = floors(pipe)[candidate.floor or ""]
    except Exception as error:
        return {"raised": first_line(error)}
    row = measure_row(pipe, candidate, steps)
    if "raised" in row:
        return row
    row |= compare_to_ideal(row, row["gpu_ms"]["computed"], floor)
    return row | {"overhead_ms_per_step": (row["wall_s"] - row["ideal_s"]) * 1e3 / steps}
