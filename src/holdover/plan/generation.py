"""What is about to run: which model, which profile belongs to it, and which steps under which scheduler.

A model is recognized by a fingerprint: a hash of its parameters' names, shapes and a few values of each. The
fingerprint does not depend on the precision of the weights or on adapters (LoRA), which are listed separately. What the
scheduler does with the model's outputs is found by running a copy of it.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from os import PathLike
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import nn

from ..engine.branches import find_guiders
from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer, iter_registries
from ..errors import HoldoverWarning, ProfileError, did_you_mean
from ..grid import Grid
from ..models.inputs import gather_tensor, get_module_class, unwrap_module
from ..models.pipelines import find_transformers
from ..predictors import Newton
from ..profiles import ModelIdentity, Profile, ProfileFacts, measured
from ..profiles.files import SUFFIX
from ..profiles.hub import suffix_of
from .config import NO_PROFILE
from .error_model import Array, Ranges

NEWTON_DEPTH = 2
_SAMPLES = 8  # values of each parameter that enter the fingerprint


def facts_of(transformer: nn.Module) -> ModelIdentity:
    """What a profile records about the transformer it was measured on."""
    name = get_module_class(transformer).__name__
    return ModelIdentity(name, fingerprint(transformer), dtype_of(transformer), adapters(transformer))


@torch.no_grad()
def fingerprint(transformer: nn.Module) -> str:
    """A hash of the parameters' names, shapes and some values of each, as far as they can be read, without adapters."""
    hashed, samples, on_disk = hashlib.sha256(), [], _parameters_on_disk(transformer)
    for name, parameter in sorted(transformer.named_parameters()):
        if "lora_" in name:
            continue
        packed = getattr(parameter, "quant_state", None)  # bitsandbytes packs 4-bit weights again at the first forward
        shape = tuple(parameter.shape if packed is None else packed.shape)
        hashed.update(f"{name.replace('.base_layer', '')} {shape};".encode())
        if packed is not None:
            continue
        values: torch.Tensor = parameter
        if id(parameter) in on_disk:
            path, key = on_disk[id(parameter)]
            with safe_open(path, framework="pt") as file:
                values = file.get_tensor(key)
        elif parameter.is_meta and (kept := _offloaded_values(transformer, name)) is not None:
            values = kept
        if values.numel() and (sample := _sample_values(values)) is not None:
            samples.append(sample)
    if len({sample.device for sample in samples}) > 1:  # group offloading keeps some groups on the device
        samples = [sample.cpu() for sample in samples]
    if samples:
        hashed.update(torch.cat(samples).cpu().numpy().tobytes())
    return hashed.hexdigest()[:16]


def _parameters_on_disk(transformer: nn.Module) -> dict[int, tuple[str, str]]:
    """File and key of the parameters that diffusers' group offloading has written to disk; in memory they are empty."""
    found: dict[int, tuple[str, str]] = {}
    for _, registry in iter_registries(transformer):
        group: Any = getattr(registry.get_hook("group_offloading"), "group", None)
        if getattr(group, "_is_offloaded_to_disk", False):
            found |= {id(tensor): (group.safetensors_file_path, key) for tensor, key in group.tensor_to_key.items()}
    return found


def _offloaded_values(transformer: nn.Module, name: str) -> torch.Tensor | None:
    """The values of a parameter that accelerate keeps elsewhere while the module is not running, if it does."""
    owner, _, local = name.rpartition(".")
    hook: Any = getattr(transformer.get_submodule(owner), "_hf_hook", None)
    maps = [getattr(each, "weights_map", None) for each in getattr(hook, "hooks", (hook,))]
    return next((kept[local] for kept in maps if kept is not None), None)


def _sample_values(values: torch.Tensor) -> torch.Tensor | None:
    """Evenly spaced values, rounded to bfloat16, so that a change of precision does not matter.

    Of weights that torchao quantizes, the values they stand for; of others, what is stored; None if they cannot be
    read.
    """
    try:
        values = gather_tensor(values)
        # torchao's subclasses have no views; offloaded with streams, their values are not on the device they name
        if type(values).dequantize is not torch.Tensor.dequantize:
            values = values.dequantize()
        with torch._C.DisableTorchFunctionSubclass():  # GGUFParameter makes more of itself in every operation
            flat = values.as_subclass(torch.Tensor).flatten()
        positions = [i * (flat.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)]
        sample = flat[torch.tensor(positions, device=flat.device)].to(torch.bfloat16).float()
    except (NotImplementedError, RuntimeError, TypeError):
        return None
    return None if sample.is_meta else sample


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
    """A profile from the object, a file, an address on the Hub or a shipped name; for None, the model's shipped one.

    None for `"none"`, and where none ships.
    """
    if isinstance(profile, Profile):
        return profile
    if profile == NO_PROFILE:
        return None
    if profile is None:
        name, models = get_module_class(transformer).__name__, [(p, m) for p in measured() for _, m in p.facts.models]
        same_class = [(one, model) for one, model in models if model.transformer_class == name]
        current = fingerprint(transformer) if same_class else ""
        return next((one for one, model in same_class if model.fingerprint == current), None)
    if suffix_of(profile) == SUFFIX:
        return Profile.load(profile)
    shipped = {one.name: one for one in measured()}
    if profile not in shipped:
        listed = f" Shipped: {', '.join(shipped)}." if shipped else ""
        raise ProfileError(
            f"There is no profile {profile!r}.{did_you_mean(profile, shipped)}{listed} "
            f"A path to a file must end in {SUFFIX}; hf://owner/name is a profile on the Hub."
        )
    return shipped[profile]


def check_profile(profile: Profile, name: str, transformer: nn.Module) -> None:
    """Raise if a profile is for another class than the transformer called `name`; warn if it is for other weights."""
    recorded, current = dict(profile.facts.models).get(name), facts_of(transformer)
    if recorded is None or recorded.transformer_class != current.transformer_class:
        known = ", ".join(f"{name} ({model.transformer_class})" for name, model in profile.facts.models)
        here = current.transformer_class
        raise ProfileError(f"Profile {profile.name!r} was measured on {known}, not on this {here}.")
    if recorded.fingerprint != current.fingerprint or recorded.adapters != current.adapters:
        difference = "with other adapters" if recorded.fingerprint == current.fingerprint else "on other weights"
        warnings.warn(
            f"Profile {profile.name!r} was measured {difference}: its expected quality and certificates do not apply "
            "here. Calibrate again.",
            HoldoverWarning,
            stacklevel=2,
        )


def load_measured(profile: Profile | str | PathLike[str], pipeline: Any) -> Profile:
    """A profile, or that of a path, an address or a shipped name, for trials on the pipeline that was measured.

    An error if its weights are others: what is found there would be taken for a fact about the measured ones.
    """
    transformers = find_transformers(pipeline)
    found = resolve_profile(
        str(profile) if isinstance(profile, PathLike) else profile, next(iter(transformers.values()))
    )
    if found is None:
        raise ProfileError('Trials need a profile: give the result of holdover.calibrate, or its path; "none" is none.')
    for name, module in transformers.items():
        known = dict(found.facts.models).get(name)
        if known is not None and known.fingerprint != fingerprint(unwrap_module(module)):
            raise ProfileError(f"Profile {found.name!r} was measured on other weights. Calibrate again.")
    return found


@dataclass(frozen=True, eq=False)
class GenerationSpec:
    """What a generation runs, known before its first step.

    `ranges` has the first and last step of each expert; `response`, how much of each scheduler input is in each latent.
    It is that of Euler steps where the scheduler's own is not `known`, because it is random or not linear.
    """

    noise: Array
    ranges: Ranges
    response: Array
    scheduler: str = ""
    guidance: float | None = None
    adapters: tuple[str, ...] = ()
    guider: str = ""
    known: bool = True

    @property
    def length(self) -> int:
        """How many steps run."""
        return sum(last - first + 1 for first, last in self.ranges)

    @property
    def last(self) -> int:
        """The last step that runs."""
        return self.ranges[-1][1]

    @cached_property
    def newton(self) -> Newton:
        """Extrapolation in the noise level, or in the step index where two levels are equal (Heun)."""
        levels: list[float] = self.noise.tolist()
        distinct = len(set(levels)) == len(levels)
        return Newton(NEWTON_DEPTH, tuple(levels if distinct else map(float, range(len(levels)))))


def describe_generation(pipeline: Any, transformers: Sequence[CachedTransformer], grid: Grid) -> GenerationSpec:
    """The spec of a generation; call it at the first forward, when the scheduler is set and has not stepped yet."""
    scheduler = getattr(pipeline, "scheduler", None)
    whole = grid.between(grid.first, grid.count - 1)
    noise = np.array(grid.noise) if grid.noise else np.linspace(1.0, 1.0 / grid.count, grid.count)
    response = None if scheduler is None else scheduler_response(scheduler, whole)
    guidance, guider = guidance_of(pipeline)
    ranges = sorted({(g.first, g.last) for g in (u.family.range_of(pipeline, u.module, whole) for u in transformers)})
    if not ranges or any(a[1] >= b[0] for a, b in pairwise(ranges)):  # transformers that run at the same steps
        ranges = [(whole.first, whole.last)]
    return GenerationSpec(
        noise,
        tuple(ranges),
        euler_response(noise, whole.first) if response is None else response,
        "" if scheduler is None else type(scheduler).__name__,
        guidance,
        tuple(adapter for transformer in transformers for adapter in adapters(transformer.core)),
        guider,
        scheduler is None or response is not None,
    )


def guidance_of(pipeline: Any) -> tuple[float | None, str]:
    """The guidance scale of a pipeline or of its guider, and the guider with all its other settings."""
    guiders = [guider for guider in find_guiders(pipeline).values() if guider is not None]
    scale: Any = getattr(guiders[0] if guiders else pipeline, "guidance_scale", None)
    names = []
    for guider in guiders:
        same_scale = getattr(guider, "guidance_scale", None) == scale
        settings = {k: vars(guider).get(k, v) for k, v in guider.config.items() if k[0] != "_"}
        if same_scale:
            settings.pop("guidance_scale", None)
        settings = {k: float(v) if type(v) is int else v for k, v in settings.items()}
        names.append(f"{type(guider).__name__}({', '.join(f'{k}={v}' for k, v in sorted(settings.items()))})")
    return float(scale) if isinstance(scale, (int, float)) else None, ", ".join(dict.fromkeys(names))


def generation_key(pipeline: Any, transformers: Sequence[CachedTransformer], grid: Grid) -> tuple[Any, ...]:
    """A key that is equal for generations with the same spec, found without running the scheduler."""
    scheduler = getattr(pipeline, "scheduler", None)
    config, guidance = str(getattr(scheduler, "config", None)), guidance_of(pipeline)
    attached = tuple(adapter for transformer in transformers for adapter in adapters(transformer.core))
    return grid.count, grid.noise, grid.first, type(scheduler), config, str(guidance), attached


def euler_response(noise: Array, first: int = 0) -> Array:
    """The response R of Euler steps along these noise levels down to 0, starting at step `first`."""
    response = np.tril(np.tile(np.diff(np.append(noise, 0.0)), (len(noise) + 1, 1)), -1)
    response[:, :first] = 0.0
    return response


def scheduler_response(scheduler: Any, grid: Grid) -> Array | None:
    """The response R of any scheduler, found by running a copy of it on unit vectors, from the grid's first step on.

    None if it is not linear, or in the middle of a generation.
    """
    if getattr(scheduler, "step_index", None) is not None:
        return None
    numbers = torch.randn(3, grid.count + 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    try:
        with torch.random.fork_rng(devices=[]):
            symbolic = _run_scheduler(scheduler, grid, torch.eye(grid.count + 1, dtype=torch.float64))
            actual = _run_scheduler(scheduler, grid, numbers.T.contiguous())
    except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
        return None
    linear = torch.allclose(symbolic @ numbers.T, actual, rtol=1e-3, atol=1e-3)
    return symbolic[:, 1:].numpy() if linear else None


def _run_scheduler(scheduler: Any, grid: Grid, basis: torch.Tensor) -> torch.Tensor:
    """All latents of a generation whose initial latent and outputs are the rows of `basis`."""
    runner = copy.deepcopy(scheduler)
    for name, value in vars(runner).items():
        if isinstance(value, torch.Tensor):
            setattr(runner, name, value.cpu())
    latents = [basis[0]] * (grid.first + 1)
    for step in range(grid.first, grid.count):
        output, latent = (vector.reshape(1, -1, 1, 1) for vector in (basis[1 + step], latents[-1]))
        # the class's own method: what is set on the instance, such as a profiler's, is bound to the original
        stepped = type(runner).step(runner, output, runner.timesteps[step], latent, return_dict=False)[0]
        latents.append(stepped.double().flatten())
    return torch.stack(latents)


@dataclass(frozen=True, eq=False)
class Preconditioning:
    """How a pipeline turns the model's output F and the latent x into the scheduler's input, scale F + carry x.

    Cosmos passes (F + x) / (1 + sigma). Held is F, so plans are made of F. Both fields have one value for each step.
    """

    scale: Array
    carry: Array

    @classmethod
    def of(cls, facts: ProfileFacts, noise: Array) -> Preconditioning | None:
        """The preconditioning in a profile, interpolated to `noise`; None if the scheduler gets outputs unchanged."""
        if not facts.scale:
            return None
        return cls(np.array(facts.scale), np.array(facts.carry)).at(np.array(facts.noise), noise)

    def at(self, known: Array, wanted: Array) -> Preconditioning:
        """The preconditioning on another grid of noise levels."""
        if np.array_equal(wanted, known):
            return self
        return Preconditioning(*(np.interp(-wanted, -known, values) for values in (self.scale, self.carry)))

    def response(self, response: Array) -> Array:
        """The response to the model's outputs F: x = R (scale F + carry x), solved for x."""
        before = np.linalg.solve(np.eye(len(self.scale)) - response[:-1] * self.carry, response[:-1] * self.scale)
        return np.vstack([before, response[-1:] * self.scale + (response[-1:] * self.carry) @ before])


def model_output(stepped: SchedulerStep, preconditioning: Preconditioning | None) -> torch.Tensor:
    """The model's output F at a scheduler step, with its branches mixed."""
    output: torch.Tensor = stepped.output
    if preconditioning is None:
        return output
    carry, scale = float(preconditioning.carry[stepped.step]), float(preconditioning.scale[stepped.step])
    return output.float().sub(stepped.sample, alpha=carry).div(scale)
