"""What the cases share: tiny pipelines and their settings, tokens and weights split over ranks, a guided loop."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import diffusers
import diffusers.hooks.tensor_parallel
import torch
import torch.distributed as dist
from diffusers import ContextParallelConfig, TensorParallelConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

import holdover
from constant_free import HOLD
from holdover.plan.search import growing
from tiny.pipelines import PIPELINES, run

STEPS = 10
BRANCHES = ("cond", "uncond")
NAMES = {"flux": "FluxPipeline", "qwen": "QwenImagePipeline", "wan": "WanPipeline"}
GUIDED = NAMES | {"flux": "FluxPipeline[true_cfg]"}
METHODS: dict[str, dict[str, Any]] = {
    "tea_cache": {"coefficients": (1.0, 0.0)},
    "mag_cache": {"mag_ratios": (0.97,) * STEPS, "mag_threshold": 0.12, "mag_retention_ratio": 0.2},
    "cache_dit": {"max_warmup_steps": 2},
    "plan": {"schedule": growing(STEPS, 5)},
    "none": {},
    **HOLD,
}
# Some steps are held, some are not.
THRESHOLDS = {"flux": 0.25, "qwen": 0.25, "wan": 0.8}
DIFFERENCES = {"flux": 0.5, "qwen": 0.3, "wan": 0.2}

diffusers.utils.logging.set_verbosity_error()
torch.accelerator.device_count = lambda: 1  # diffusers divides by it to find its device; a CPU has none
diffusers.hooks.tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)  # works on the CPU, though diffusers does not list it


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
    """Attention with its log-sum-exp, which ring attention needs; torch has it under another name on the CPU."""
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, dropout_p, is_causal, scale=scale
    )
    empty = torch.empty(0)
    return out, lse, empty, empty, query.shape[2], key.shape[2], empty, empty, empty


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


def generate(pipe: Any, model: str, seed: int = 0, **more: Any) -> torch.Tensor:
    """One generation."""
    return run(pipe, **PIPELINES[NAMES[model]].call(steps=STEPS, seed=seed) | more)


def traces(cache: Any) -> dict[str, str]:
    """The decisions of the last generation by branch: `C` computed, `h` held."""
    last = cache.stats().last
    return {branch: last.trace(branch) for branch in last.branches}


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value."""
    return float((one - other).abs().max() / other.abs().max())


# Tokens split over ranks


def split_tokens(pipe: Any, mesh: DeviceMesh | None = None, **how: Any) -> Any:
    """The pipeline with its tokens split over ranks by diffusers."""
    if how.get("ring_degree", 1) > 1:
        pipe.transformer.set_attention_backend("_native_flash")
    pipe.transformer.enable_parallelism(config=ContextParallelConfig(mesh=mesh, **how))
    return pipe


def mesh_of_four(outer: str) -> DeviceMesh:
    """Four ranks: two groups over each of which diffusers splits the tokens."""
    return init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=(outer, "ring", "ulysses"))


# Weights split over ranks


def shard_fully(pipe: Any) -> None:
    """Shard each block and the transformer with `fully_shard`."""
    mesh = init_device_mesh("cpu", (2,))
    for blocks in _block_lists(pipe.transformer):
        for block in blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(pipe.transformer, mesh=mesh)


def wrap_in_fsdp(pipe: Any) -> None:
    """Wrap each block and the transformer in the older FullyShardedDataParallel."""
    cpu = torch.device("cpu")
    for blocks in _block_lists(pipe.transformer):
        for i, block in enumerate(blocks):
            blocks[i] = FullyShardedDataParallel(block, device_id=cpu, use_orig_params=True)
    pipe.transformer = FullyShardedDataParallel(pipe.transformer, device_id=cpu, use_orig_params=True)


def split_tensors(pipe: Any) -> None:
    """Split every weight of the blocks with diffusers' tensor parallelism."""
    pipe.transformer.enable_parallelism(config=TensorParallelConfig(tp_degree=2))


def _block_lists(transformer: nn.Module) -> list[nn.ModuleList]:
    return [child for child in transformer.children() if isinstance(child, nn.ModuleList)]


SHARD = {"fully_shard": shard_fully, "wrapper": wrap_in_fsdp, "tensor": split_tensors}


# Branches of guidance on different ranks


class GuidedLoop:
    """A denoising loop with guidance whose branches run in one process, or each on a rank of its own."""

    def __init__(self, model: str, named: bool = True, drifting: bool = False) -> None:
        self.model, self._named, self._drifting = model, named, drifting
        tiny = PIPELINES[GUIDED[model]]
        pipe = tiny.build()
        self.transformer = pipe.transformer
        self.scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
        self.inputs = self._record_inputs(pipe, tiny.call(steps=2))
        self._scale = 1000.0 if float(self.inputs[0]["timestep"].max()) > 1.0 else 1.0

    def _record_inputs(self, pipe: Any, call: dict[str, Any]) -> list[dict[str, Any]]:
        """What the pipeline passes to the transformer in the two branches of its first step."""
        seen: list[dict[str, Any]] = []
        hook = pipe.transformer.register_forward_pre_hook(lambda _, __, given: seen.append(given), with_kwargs=True)
        run(pipe, **call)
        hook.remove()
        return seen[:2]

    def generate(self, method: str, cfg: Any = None, **more: Any) -> tuple[torch.Tensor, dict[str, str]]:
        """A generation, with both branches here or one on each rank of the group `cfg`; and its decisions."""
        ranks = None if cfg is None else holdover.Ranks(cfg=cfg)
        host = SimpleNamespace(transformer=self.transformer, scheduler=self.scheduler)
        with holdover.enable(host, method, ranks=ranks, **settings(method, self.model) | more) as cache:
            return self._denoise(ranks), traces(cache)

    @torch.no_grad()
    def _denoise(self, ranks: holdover.Ranks | None) -> torch.Tensor:
        latents = self.inputs[0]["hidden_states"]
        self.scheduler.set_timesteps(STEPS)
        for step, time in enumerate(self.scheduler.timesteps):
            if ranks is None:
                cond, uncond = (self._forward(branch, step, time, latents) for branch in (0, 1))
            else:
                cond, uncond = self._gather(ranks.groups().cfg, step, time, latents)
            latents = self.scheduler.step(uncond + 4.0 * (cond - uncond), time, latents, return_dict=False)[0]
        return latents

    def _gather(self, group: Any, *where: Any) -> list[torch.Tensor]:
        own = self._forward(dist.get_rank(group), *where)
        outputs = [torch.empty_like(own) for _ in BRANCHES]
        dist.all_gather(outputs, own.contiguous(), group)
        return outputs

    def _forward(self, branch: int, step: int, time: torch.Tensor, latents: torch.Tensor) -> torch.Tensor:
        given = self.inputs[branch] | {"hidden_states": latents, "timestep": (time / 1000 * self._scale).expand(1)}
        if self._drifting:
            given["encoder_hidden_states"] = given["encoder_hidden_states"] * (1 + 0.001 * step)
        context = self.transformer.cache_context(BRANCHES[branch]) if self._named else nullcontext()
        with context:
            output: torch.Tensor = self.transformer(**given | {"return_dict": False})[0]
        return output
