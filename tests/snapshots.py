"""What a pipeline is made of, object by object, to see that undoing leaves nothing behind."""

from __future__ import annotations

from typing import Any

from diffusers import DiffusionPipeline
from torch import nn


def snapshot(target: Any) -> dict[str, Any]:
    """The class and every attribute of the target, its components, their modules and the scheduler, by path."""
    parts: dict[str, Any] = {"": target}
    if isinstance(target, DiffusionPipeline):
        parts |= {name: part for name, part in target.components.items() if part is not None}
    found: dict[str, Any] = {}
    for name, part in parts.items():
        modules = part.named_modules(prefix=name) if isinstance(part, nn.Module) else [(name, part)]
        for path, module in modules:
            found[f"{path}:class"] = type(module)
            for key, value in vars(module).items():
                found[f"{path}.{key}"] = value
                if isinstance(value, dict):
                    found |= {f"{path}.{key}[{inner!r}]": kept for inner, kept in value.items()}
    return found


# What pipelines and schedulers set on themselves in each run, and the registry diffusers' own cache_context creates.
_OWN = (
    "_guidance_scale",
    "_interrupt",
    "_progress_bar_config",
    "_num_timesteps",
    "_current_timestep",
    "_joint_attention_kwargs",
    "_attention_kwargs",
)
_REGISTRY = "_diffusers_hook"


def differences(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """The paths whose object is not the very same one."""
    changed = [path for path in before.keys() | after.keys() if before.get(path) is not after.get(path)]
    return sorted(path for path in changed if not path.endswith(_OWN) and _REGISTRY not in path)


def denoiser(target: Any) -> dict[str, Any]:
    """The part of the snapshot a cache may touch: the pipeline's own attributes and its transformers.

    The scheduler keeps its place between runs, and other components (a VAE, a guider) keep state of their own.
    """
    return {path: value for path, value in snapshot(target).items() if path.startswith(("transformer", "."))}
