"""Which model is this, and which profile belongs to it?

A model is recognized by a fingerprint: a hash of its parameters' names, shapes and a few values of each. The
fingerprint does not depend on the precision of the weights or on adapters (LoRA), which are listed separately.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import Any

import torch
from torch import nn

from ..errors import HoldoverWarning, ProfileError, did_you_mean
from ..models.inputs import gather_tensor, get_module_class
from ..profiles import ModelIdentity, Profile, measured
from ..profiles.profile import SUFFIX

_SAMPLES = 8  # values of each parameter that enter the fingerprint


def facts_of(transformer: nn.Module) -> ModelIdentity:
    """What a profile records about the transformer it was measured on."""
    return ModelIdentity(
        get_module_class(transformer).__name__, fingerprint(transformer), dtype_of(transformer), adapters(transformer)
    )


def fingerprint(transformer: nn.Module) -> str:
    """A hash of the parameters' names, shapes and some values of each, without adapters."""
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
    """A few values spread over a parameter, rounded to bfloat16 so that a change of precision does not matter."""
    flat = gather_tensor(parameter.detach()).flatten()
    positions = [i * (flat.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
    return flat[torch.tensor(positions, device=flat.device)].to(torch.bfloat16).float()


def dtype_of(transformer: nn.Module) -> str:
    """The dtype of the first parameter, without the prefix `torch.`."""
    parameter = next(transformer.parameters(), None)
    return "none" if parameter is None else str(parameter.dtype).removeprefix("torch.")


def adapters(transformer: Any) -> tuple[str, ...]:
    """The names of the active adapters; empty while peft's layers are disabled."""
    enabled = (getattr(module, "disable_adapters", None) is False for module in transformer.modules())
    if not getattr(transformer, "peft_config", None) or not any(enabled):
        return ()
    active = transformer.active_adapters() if callable(transformer.active_adapters) else transformer.active_adapters
    return tuple(sorted([active] if isinstance(active, str) else active))


def resolve_profile(profile: Profile | str | None, transformer: nn.Module) -> Profile | None:
    """A profile from the object, a file or the name of a shipped one; for None, the shipped one of this model."""
    if isinstance(profile, Profile):
        return profile
    if profile is None:
        return _shipped_profile_of(transformer)
    if profile.endswith(SUFFIX):
        return Profile.load(profile)
    shipped = {one.name: one for one in measured()}
    if profile not in shipped:
        listed = f" Shipped: {', '.join(shipped)}." if shipped else ""
        raise ProfileError(
            f"There is no profile {profile!r}.{did_you_mean(profile, shipped)}{listed} "
            f"A path to a file must end in {SUFFIX}."
        )
    return shipped[profile]


def _shipped_profile_of(transformer: nn.Module) -> Profile | None:
    same_class = [
        (profile, model)
        for profile in measured()
        for _, model in profile.facts.models
        if model.transformer_class == get_module_class(transformer).__name__
    ]
    if not same_class:
        return None
    current = fingerprint(transformer)
    return next((profile for profile, model in same_class if model.fingerprint == current), None)


def check_profile(profile: Profile, name: str, transformer: nn.Module) -> None:
    """Raise if a profile is for another class than the transformer called `name`; warn if it is for other weights."""
    recorded = dict(profile.facts.models).get(name)
    current = facts_of(transformer)
    if recorded is None or recorded.transformer_class != current.transformer_class:
        known = ", ".join(f"{name} ({model.transformer_class})" for name, model in profile.facts.models)
        raise ProfileError(
            f"Profile {profile.name!r} was measured on {known}, not on this {current.transformer_class}."
        )
    if recorded.fingerprint != current.fingerprint or recorded.adapters != current.adapters:
        difference = "with other adapters" if recorded.fingerprint == current.fingerprint else "on other weights"
        warnings.warn(
            f"Profile {profile.name!r} was measured {difference}: its expected quality and certificates do not apply "
            "here. Calibrate again.",
            HoldoverWarning,
            stacklevel=2,
        )
