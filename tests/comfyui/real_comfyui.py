"""ComfyUI itself with a tiny random FLUX on the CPU; torchvision and torchaudio are replaced by empty modules."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _Empty(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def load(path: str) -> None:
    """Import ComfyUI from a checkout, for the CPU."""
    import holdover.comfyui  # noqa: F401  # first: transformers must not take the empty torchvision for a real one

    for package, part in (("torchvision", "transforms"), ("torchaudio", "functional")):
        if importlib.util.find_spec(package) is None:
            for name in (package, f"{package}.{part}"):
                module = sys.modules[name] = _Empty(name)
                module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.path[:0] = path.split(os.pathsep)
    argv, sys.argv = sys.argv, [sys.argv[0], "--cpu"]
    try:
        import comfy.options

        comfy.options.enable_args_parsing()
        import comfy.cli_args
    finally:
        sys.argv = argv


def tiny_flux(seed: int = 0) -> Any:
    """A MODEL: two double and two single blocks of FLUX with random weights."""
    import comfy.model_base
    import comfy.model_patcher
    import comfy.ops
    import comfy.supported_models

    shape = {"in_channels": 16, "out_channels": 16, "vec_in_dim": 8, "context_in_dim": 16, "hidden_size": 32}
    blocks = {"mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "depth_single_blocks": 2, "axes_dim": [4, 6, 6]}
    rest = {"theta": 10_000, "patch_size": 2, "qkv_bias": True, "guidance_embed": False, "txt_ids_dims": []}
    config = comfy.supported_models.Flux({"image_model": "flux", **shape, **blocks, **rest})
    config.custom_operations = comfy.ops.disable_weight_init
    config.set_inference_dtype(torch.float32, None)
    model = comfy.model_base.Flux(config, device="cpu")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.08)
    return comfy.model_patcher.ModelPatcher(model.eval(), torch.device("cpu"), torch.device("cpu"))


def condition(seed: int) -> Any:
    """A CONDITIONING."""
    generator = torch.Generator().manual_seed(seed)
    pooled = torch.randn(1, 8, generator=generator)
    return [[torch.randn(1, 5, 16, generator=generator), {"pooled_output": pooled}]]


class RealComfyUI:
    """The same functions for tests as those of the stand-in."""

    @contextmanager
    def low_vram(self) -> Iterator[None]:
        """What a card without memory for the model does: no weight is loaded to the device before its forward."""
        from comfy.model_management import LoadedModel, unload_all_models

        plain = LoadedModel.model_load
        LoadedModel.model_load = lambda self, memory, **options: plain(self, 0.1, **options)
        try:
            yield
        finally:
            LoadedModel.model_load = plain
            unload_all_models()

    def model(self, seed: int = 0) -> Any:
        return tiny_flux(seed)

    def inner(self, model: Any) -> torch.nn.Module:
        """A part of the diffusion model, which runs when the model is computed."""
        found: torch.nn.Module = model.model.diffusion_model.img_in
        return found

    def sample(
        self,
        model: Any,
        seed: int = 0,
        sampler: str = "euler",
        cfg: float = 3.0,
        steps: int = 12,
        batch: int = 1,
        together: bool = True,
    ) -> torch.Tensor:
        """The final latent. ComfyUI puts conditionings in one batch where it can; `together=False` forbids it."""
        import comfy.samplers

        from holdover.comfyui.nodes import run_sampler

        latent, can_concat = {"samples": torch.zeros(batch, 16, 8, 8)}, comfy.samplers.can_concat_cond
        comfy.samplers.can_concat_cond = can_concat if together else lambda one, other: one is other
        try:
            with torch.inference_mode():
                return run_sampler(model, seed, condition(1), condition(2), latent, steps, cfg, sampler, "simple")
        finally:
            comfy.samplers.can_concat_cond = can_concat
