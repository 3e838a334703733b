"""Runs vLLM-Omni itself: its plugins, selector, config, runner, parallel state and a tiny FLUX transformer.

It runs on the CPU, for which vLLM-Omni has no platform, and writes one JSON object.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.linear import LinearBase
from vllm_omni.diffusion.cache import selector
from vllm_omni.diffusion.data import DiffusionCacheConfig, DiffusionOutput, OmniDiffusionConfig, TransformerConfig
from vllm_omni.diffusion.distributed import parallel_state
from vllm_omni.diffusion.forward_context import set_forward_context
from vllm_omni.diffusion.models.flux.flux_transformer import FluxTransformer2DModel
from vllm_omni.diffusion.request import OmniDiffusionRequest
from vllm_omni.diffusion.worker import diffusion_model_runner
from vllm_omni.inputs.data import OmniDiffusionSamplingParams
from vllm_omni.platforms import current_omni_platform
from vllm_omni.plugins import load_omni_general_plugins

from holdover.vllm_omni import unregister

STEPS = 8
MAG = {"mag_ratios": [1.01] * STEPS}
NOTHING = {
    "holdover_plan": {"schedule": list(range(STEPS))},
    "holdover_tea_cache": {"rel_l1_thresh": 0.0},
    "holdover_mag_cache": MAG | {"mag_threshold": 0.0},
    "holdover_cache_dit": {"residual_diff_threshold": 0.0},
}
HOLDING = {
    "holdover_plan": {"budget": 4, "profile": "none"},
    "holdover_tea_cache": {"rel_l1_thresh": 0.6, "coefficients": [1.0, 0.0]},
    "holdover_mag_cache": MAG | {"mag_threshold": 0.5},
    "holdover_cache_dit": {"residual_diff_threshold": 5.0, "max_warmup_steps": 2},
}
for _method, _settings in {"easy_cache": {"warmup_steps": 2}, "sea_cache": {}, "first_block": {}}.items():
    NOTHING[f"holdover_{_method}"] = {"threshold": 0.0}
    HOLDING[f"holdover_{_method}"] = _settings | {"threshold": 10.0}
for _method in ("taylor_seer", "spectrum"):
    NOTHING[f"holdover_{_method}"] = {"interval": 1, "growth": 0.0}
    HOLDING[f"holdover_{_method}"] = {"interval": 3, "warmup_steps": 2}
TOKENS, WIDTH = 8, 16
SIZES = {"in_channels": WIDTH, "attention_head_dim": 8, "num_attention_heads": 2, "joint_attention_dim": WIDTH}
SIZES |= {"pooled_projection_dim": WIDTH, "axes_dims_rope": (4, 2, 2)}
LAYERS = {"num_layers": 2, "num_single_layers": 3}


class Pipeline(nn.Module):
    """A loop like that of vLLM-Omni's own pipelines."""

    _dit_modules: ClassVar[list[str]] = ["transformer"]

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.scheduler = FlowMatchEulerDiscreteScheduler()

    def forward(self, req: Any) -> DiffusionOutput:
        self.scheduler.set_timesteps(req.requests[0].sampling_params.num_inference_steps or STEPS)
        latents = noise(1, 2 * TOKENS, WIDTH)
        prompt = {"encoder_hidden_states": noise(1, TOKENS, WIDTH), "pooled_projections": noise(1, WIDTH)}
        places = {"img_ids": torch.zeros(2 * TOKENS, 3), "txt_ids": torch.zeros(TOKENS, 3)}
        for t in self.scheduler.timesteps:
            given = prompt | places | {"timestep": t.expand(1) / 1000, "guidance": torch.tensor([3.5])}
            output = self.transformer(hidden_states=latents, **given, return_dict=False)[0]
            latents = self.scheduler.step(output, t, latents, return_dict=False)[0]
        return DiffusionOutput(output=latents)


def noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def on_cpu() -> None:
    """Let vLLM-Omni's platform describe the CPU."""
    platform: Any = type(current_omni_platform)
    for name in ("reset_peak_memory_stats", "memory_reserved", "max_memory_reserved", "max_memory_allocated"):
        setattr(platform, name, classmethod(lambda cls, *args: 0))
    platform.get_device_count = classmethod(lambda cls: 1)
    platform.get_torch_device = classmethod(lambda cls, rank=None: torch.device("cpu"))
    platform.set_device = classmethod(lambda cls, device: None)
    attention = "vllm_omni.diffusion.attention.backends.sdpa.SDPABackend"
    platform.get_diffusion_attn_backend_cls = classmethod(lambda cls, *args, **kwargs: attention)
    platform.is_cuda = lambda self: True  # its attention in plain torch has no other name for it


def tiny_flux(config: OmniDiffusionConfig) -> nn.Module:
    config.tf_model_config = TransformerConfig.from_dict(LAYERS)
    transformer = FluxTransformer2DModel(od_config=config, **SIZES, **LAYERS).eval()
    torch.manual_seed(0)
    for parameter in transformer.parameters():
        nn.init.normal_(parameter, std=0.1)
    for layer in transformer.modules():
        if isinstance(layer, LinearBase):
            layer.cpu_linear = nn.functional.linear  # the kernel vLLM would choose when it has loaded weights
    return transformer


class Worker:
    """The engine's configuration and the model, and one request at a time."""

    def __init__(self) -> None:
        self.vllm, self.omni = VllmConfig(), OmniDiffusionConfig(model=None)
        with set_current_vllm_config(self.vllm):
            parallel_state.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo")
            parallel_state.initialize_model_parallel(backend="gloo")
            with set_forward_context(vllm_config=self.vllm, omni_diffusion_config=self.omni):
                self.transformer = tiny_flux(self.omni)

    def generate(self, backend: str, settings: dict[str, Any], steps: int | None) -> tuple[torch.Tensor, str]:
        """The image, and which steps were held."""
        self.omni.cache_backend, self.omni.cache_config = backend, DiffusionCacheConfig.from_dict(settings)
        runner = diffusion_model_runner.DiffusionModelRunner(self.vllm, self.omni, torch.device("cpu"))
        runner.pipeline = Pipeline(self.transformer)
        cache = diffusion_model_runner.get_cache_backend(self.omni.cache_backend, self.omni.cache_config)
        runner.cache_backend = cache
        if cache is not None:
            cache.enable(runner.pipeline)
        asked = OmniDiffusionSamplingParams(num_inference_steps=steps)
        with set_current_vllm_config(self.vllm):
            generated = runner.execute_model(
                OmniDiffusionRequest(prompt="red apple", sampling_params=asked, request_id="1")
            )
        if cache is None:
            return generated.output, ""
        cache.disable()
        return generated.output, cache.stats().last.trace("1")


def error(settings: dict[str, Any]) -> str:
    try:
        selector.get_cache_backend("holdover_plan", DiffusionCacheConfig.from_dict(settings))
    except ValueError as error:
        return str(error)
    return ""


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def main(target: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    on_cpu()
    plain = selector.get_cache_backend
    load_omni_general_plugins()
    worker = Worker()
    image, _ = worker.generate("none", {}, STEPS)
    same = {name: torch.equal(worker.generate(name, settings, STEPS)[0], image) for name, settings in NOTHING.items()}
    held = {name: [worker.generate(name, settings, n)[1] for n in (STEPS, None)] for name, settings in HOLDING.items()}
    own = type(selector.get_cache_backend("tea_cache", DiffusionCacheConfig.from_dict({}))).__module__
    unknown = error({"buget": 3})
    unregister()
    restored = selector.get_cache_backend is plain and diffusion_model_runner.get_cache_backend is plain
    found = {"same": same, "held": held, "own": own, "unknown": unknown, "restored": restored}
    Path(target).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
