"""One of two ranks: runs a guided request alone, then with the other rank in each parallel mode of vLLM-Omni."""

from __future__ import annotations

import sys
from typing import Any

import torch
import torch.distributed as dist
from omni_pipelines import Loop
from vllm_omni.diffusion.data import OmniDiffusionConfig
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.request import OmniDiffusionRequest, OmniDiffusionSamplingParams
from vllm_omni.diffusion.worker.diffusion_model_runner import DiffusionModelRunner
from vllm_omni.plugins import load_omni_general_plugins

from holdover.errors import EnableError

METHODS: dict[str, dict[str, Any]] = {
    "holdover_mag_cache": {
        "mag_ratios": {"1": [1.01] * 8, "2": [1.2] * 8},
        "mag_threshold": 0.15,
        "mag_max_skip_steps": 3,
    },
    "holdover_tea_cache": {"rel_l1_thresh": 0.5, "coefficients": [1.0, 0.0], "signal": "input"},
    "holdover_plan": {"budget": 4, "profile": "none"},
}


def generate(backend: str) -> dict[str, Any]:
    """The image, and the decisions of each branch that this rank computed."""
    runner = DiffusionModelRunner(OmniDiffusionConfig(backend, METHODS[backend]))
    runner.load_model(Loop(guided=True))
    image = runner.execute_model(OmniDiffusionRequest(OmniDiffusionSamplingParams(8)))
    last = runner.cache_backend.stats().last
    return {"image": image, "decisions": {branch: last.trace(branch) for branch in last.branches}}


def refusal() -> str:
    try:
        generate("holdover_plan")
    except EnableError as error:
        return str(error)
    return ""


def main(folder: str, rank: str) -> None:
    torch.set_num_threads(1)
    load_omni_general_plugins()
    found: dict[str, Any] = {"alone": {name: generate(name) for name in METHODS}}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=int(rank), world_size=2)
    for size in ("cfg", "sp"):
        parallel_state.initialize_model_parallel(**{size: 2})
        found[size] = {name: generate(name) for name in METHODS}
    parallel_state.initialize_model_parallel(pp=2)
    found["pp"] = refusal()
    torch.save(found, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
