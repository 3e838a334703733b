"""What the cases share: tiny pipelines, their groups of ranks, and what a cache decided."""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from diffusers import ContextParallelConfig
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tiny.pipelines import PIPELINES, run

STEPS = 10
NAMES = {"flux": "FluxPipeline", "qwen": "QwenImagePipeline", "wan": "WanPipeline"}
GUIDED = NAMES | {"flux": "FluxPipeline[true_cfg]"}
METHODS: dict[str, dict[str, Any]] = {
    "tea_cache": {"coefficients": (1.0, 0.0)},
    "mag_cache": {"mag_ratios": (0.97,) * STEPS, "mag_threshold": 0.12, "mag_retention_ratio": 0.2},
    "cache_dit": {"max_warmup_steps": 2},
    "plan": {"budget": 5},
    "none": {},
}
# Some steps are held, some are not.
THRESHOLDS = {"flux": 0.25, "qwen": 0.25, "wan": 0.8}
DIFFERENCES = {"flux": 0.5, "qwen": 0.3, "wan": 0.2}

diffusers.utils.logging.set_verbosity_error()
torch.accelerator.device_count = lambda: 1  # diffusers divides by it to find its device; a CPU has none


def flash_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    """Attention with its log-sum-exp, which the ring needs: torch has it for the CPU under another name."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    nothing = torch.empty(0)
    return out, lse, nothing, nothing, query.shape[2], key.shape[2], nothing, nothing, nothing


_ATEN = torch.library.Library("aten", "IMPL")
_ATEN.impl("_scaled_dot_product_flash_attention", flash_attention, "CPU")


def settings(method: str, model: str) -> dict[str, Any]:
    """Settings with which a method holds some steps of a tiny model and computes others."""
    own = {
        "tea_cache": {"rel_l1_thresh": THRESHOLDS[model]},
        "cache_dit": {"residual_diff_threshold": DIFFERENCES[model]},
    }
    return METHODS[method] | own.get(method, {})


def build(model: str) -> Any:
    """A tiny pipeline."""
    return PIPELINES[NAMES[model]].build()


def draw(pipe: Any, model: str, seed: int = 0, **more: Any) -> torch.Tensor:
    """One generation."""
    return run(pipe, **PIPELINES[NAMES[model]].call(steps=STEPS, seed=seed) | more)


def split(pipe: Any, mesh: DeviceMesh | None = None, **how: Any) -> Any:
    """The pipeline with its tokens split over ranks by diffusers."""
    if how.get("ring_degree", 1) > 1:
        pipe.transformer.set_attention_backend("_native_flash")
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(mesh=mesh, **how))
    return pipe


def two_by_two(outer: str) -> DeviceMesh:
    """Four ranks: two groups over each of which diffusers splits the tokens."""
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(outer, "ring", "ulysses"))


def decided(cache: Any) -> dict[str, str]:
    """The decisions of the last generation by branch: `C` computed, `h` held."""
    last = cache.stats().last
    return {branch: last.trace(branch) for branch in last.branches}


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())
