"""One iteration of training a plan through FLUX.1-dev: seconds and peak memory of a gradient through K computed steps.

Weights are random and nothing is encoded or decoded: a FluxPipeline of the transformer alone gets prompt embeddings.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline

import holdover
from holdover.plan.calls import Caller, make_batches
from holdover.plan.replay import Replay
from holdover.plan.search import growing
from holdover.plan.training import TrainingState, train

from .measure import Results, first_line
from .models import MODELS, Shape
from .run import TINY, Options, describe_row, empty_memory

COMPUTED, STEPS = 8, 16
ITERATIONS = 4  # of which the first warms up


def measure_training(options: Options, results: Results) -> None:
    """One row for each size of an image."""
    pipe: FluxPipeline | None = None
    for shape in (TINY,) if options.tiny else (Shape(512, 512), Shape(1024, 1024)):
        row_id = describe_row("training", "flux", shape, STEPS) | {
            "mode": "eager",
            "by": "holdover",
            "label": f"gradient through {COMPUTED} computed steps",
        }
        if not results.needs(row_id):
            continue
        results.check_time()
        if pipe is None:
            empty_memory(options)
            pipe = build_pipeline(options)
        try:
            row = _measure_iterations(pipe, options, shape)
        except Exception as error:
            row = {"raised": first_line(error)}
        results.add(row_id | {"title": MODELS["flux"].title} | row)


def build_pipeline(options: Options) -> FluxPipeline:
    """A FluxPipeline without encoders and VAE."""
    nothing = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
    transformer = MODELS["flux"].build(options.device, options.tiny)
    return FluxPipeline(scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0), transformer=transformer, **nothing)


def _measure_iterations(pipe: FluxPipeline, options: Options, shape: Shape) -> dict[str, Any]:
    fixed = MODELS["flux"].inputs_for(pipe.transformer, shape).fixed
    prompt = {
        "prompt_embeds": fixed["encoder_hidden_states"],
        "pooled_prompt_embeds": fixed["pooled_projections"],
        "height": shape.height,
        "width": shape.width,
        "output_type": "latent",
    }
    profile = holdover.calibrate(pipe, [prompt], STEPS, effort="quick", progress=False)
    replay = Replay(Caller.like(profile, pipe, {}), profile, make_batches([prompt], 1, 0))
    computed = growing(STEPS, COMPUTED)
    weights = replay.fit(computed, replace(replay.problem.options, fitted_below=1.0))
    marks, calls = list[float](), list[float]()

    def mark(state: TrainingState, score: float, *plan: Mapping[int, Any]) -> None:
        if not options.tiny:
            torch.cuda.synchronize()
            if state.iteration == 1:
                torch.cuda.reset_peak_memory_stats()
        marks.append(time.perf_counter())
        calls.append(replay.runs * STEPS)

    train(replay, computed, weights, lambda *_: float(len(marks)), ITERATIONS, report=mark)
    last = len(marks) - 1
    return {
        "computed": len(computed),
        "seconds": (marks[last] - marks[1]) / (last - 1),
        "model_calls": (calls[last] - calls[1]) / (last - 1),  # three for each computed step after a held one
        "peak_gigabytes": None if options.tiny else torch.cuda.max_memory_allocated() / 1e9,
        "parameters": sum(parameter.numel() for parameter in pipe.transformer.parameters()),
    }
