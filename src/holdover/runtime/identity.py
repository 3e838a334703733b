"""Which model is this? Enough of its weights to know it again, and what is attached to it."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ..models.wrapping import class_of, whole
from ..profiles import ModelIdentity

_SAMPLES = 8  # values of each parameter that enter the fingerprint


def facts_of(transformer: nn.Module) -> ModelIdentity:
    """What a profile says of the transformer it was measured on."""
    return ModelIdentity(
        class_of(transformer).__name__, fingerprint(transformer), dtype_of(transformer), adapters(transformer)
    )


def fingerprint(transformer: nn.Module) -> str:
    """A hash of the parameters' names and shapes and of some values of each; adapters do not change it."""
    hashed, samples = hashlib.sha256(), []
    for name, parameter in sorted(transformer.named_parameters()):
        if "lora_" in name:
            continue
        hashed.update(f"{name.replace('.base_layer', '')} {tuple(parameter.shape)};".encode())
        if not parameter.is_meta and parameter.numel():
            samples.append(_sample(parameter))
    if samples:
        hashed.update(torch.cat(samples).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def _sample(parameter: nn.Parameter) -> torch.Tensor:
    """A few values spread over a parameter, rounded so that a change of precision does not matter."""
    flat = whole(parameter.detach()).flatten()
    places = [i * (flat.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return flat[torch.tensor(places, device=flat.device)].to(torch.bfloat16).float()


def dtype_of(transformer: nn.Module) -> str:
    parameter = next(transformer.parameters(), None)
    return "none" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def adapters(transformer: Any) -> tuple[str, ...]:
    """The names of the adapters in use."""
    if not getattr(transformer, "peft_config", None) or not any(map(_adapts, transformer.modules())):
        return ()
    active = transformer.active_adapters() if callable(transformer.active_adapters) else transformer.active_adapters
    return tuple(sorted([active] if isinstance(active, str) else active))


def _adapts(module: nn.Module) -> bool:
    """Whether a module is one of peft's and its adapters are switched on."""
    return getattr(module, "disable_adapters", None) is False
