"""What ComfyUI does around a model, as small as possible: a patcher with wrappers, a guider, and samplers."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn


class Executor:
    """Calls wrappers from the outside in, then the function itself."""

    def __init__(self, function: Callable[..., Any], class_obj: Any, wrappers: list[Any]) -> None:
        self.function, self.class_obj, self.wrappers = function, class_obj, wrappers

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.wrappers:
            return self.function(*args, **kwargs)
        return self.wrappers[0](Executor(self.function, self.class_obj, self.wrappers[1:]), *args, **kwargs)


class TinyModel(nn.Module):
    """A diffusion model."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(4, 4, generator=generator) * 0.3)
        self.activation = nn.Tanh()

    def forward(self, x: torch.Tensor, sigma: torch.Tensor, context: Any, transformer_options: dict[str, Any]) -> Any:
        wrappers = transformer_options.get("wrappers", {}).get("diffusion_model", {})
        executor = Executor(self.run, self, [f for group in wrappers.values() for f in group])
        return executor(x, sigma, context, transformer_options=transformer_options)

    def run(self, x: torch.Tensor, sigma: torch.Tensor, context: Any, transformer_options: dict[str, Any]) -> Any:
        mixed = torch.einsum("ij,bjhw->bihw", self.weight, x) + context.reshape(-1, 4, 1, 1)
        return self.activation(mixed) * (1 + sigma / (1 + sigma)).reshape(-1, 1, 1, 1)


class ModelSampling:
    """Noise levels of a flow, or with a larger maximum of a model that predicts the noise."""

    def __init__(self, sigma_max: float) -> None:
        self.sigma_max = sigma_max

    def calculate_denoised(self, sigma: torch.Tensor, output: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return x - output * sigma.reshape(sigma.shape[:1] + (1,) * (x.ndim - 1))

    def percent_to_sigma(self, percent: float) -> float:
        return self.sigma_max * (1.0 - percent)


class Patcher:
    """A MODEL: clones share the weights and have wrappers of their own."""

    def __init__(self, model: Any) -> None:
        self.model, self.patches = model, dict[str, Any]()
        self.wrappers: dict[str, dict[str, list[Any]]] = {}
        self.model_options: dict[str, Any] = {}

    def clone(self) -> Patcher:
        other = Patcher(self.model)
        other.model_options = dict(self.model_options)
        other.wrappers = {
            kind: {key: list(found) for key, found in keys.items()} for kind, keys in self.wrappers.items()
        }
        return other

    def add_wrapper_with_key(self, kind: str, key: str, wrapper: Any) -> None:
        self.wrappers.setdefault(kind, {}).setdefault(key, []).append(wrapper)

    def remove_wrappers_with_key(self, kind: str, key: str) -> None:
        self.wrappers.get(kind, {}).pop(key, None)

    def get_wrappers(self, kind: str, key: str) -> list[Any]:
        return self.wrappers.get(kind, {}).get(key, [])

    def all_wrappers(self, kind: str) -> list[Any]:
        return [f for found in self.wrappers.get(kind, {}).values() for f in found]


class Guider:
    """Classifier-free guidance, with both conditionings in one batch or one after the other."""

    def __init__(self, patcher: Patcher, cfg: float, together: bool) -> None:
        self.patcher, self.cfg, self.together, self.inner_model = patcher, cfg, together, patcher.model
        self.model_patcher = patcher
        self.model_options = {**patcher.model_options, "transformer_options": {"wrappers": patcher.wrappers}}
        values = torch.linspace(-0.5, 0.5, 8).reshape(2, 4)
        self.conditions = [(uuid.uuid4(), kind, values[kind : kind + 1]) for kind in ((0, 1) if cfg != 1 else (0,))]

    def sample(self, noise: torch.Tensor, sampler: Any, sigmas: torch.Tensor) -> torch.Tensor:
        self.model_options = {**self.model_options}
        self.model_options["transformer_options"] = dict(self.model_options["transformer_options"])
        executor = Executor(self.outer_sample, self, self.patcher.all_wrappers("outer_sample"))
        found: torch.Tensor = executor(noise, torch.zeros_like(noise), sampler, sigmas, None, None, True, 0)
        return found

    def outer_sample(self, noise: torch.Tensor, latent: torch.Tensor, sampler: Any, sigmas: Any, *rest: Any) -> Any:
        def run(guider: Guider, sigmas: Any, extra: Any, callback: Any, noise: torch.Tensor) -> Any:
            return sampler.sampler_function(guider, noise, sigmas, extra_args=extra)

        executor = Executor(run, sampler, self.patcher.all_wrappers("sampler_sample"))
        return executor(self, sigmas, {"model_options": self.model_options, "seed": 0}, None, noise)

    def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **extra: Any) -> Any:
        wrappers = self.patcher.all_wrappers("predict_noise")
        return Executor(self.predict_noise, self, wrappers)(x, sigma, self.model_options, extra.get("seed"))

    def predict_noise(self, x: torch.Tensor, sigma: torch.Tensor, model_options: Any, seed: Any) -> torch.Tensor:
        groups = [self.conditions] if self.together else [[condition] for condition in self.conditions]
        denoised: dict[int, torch.Tensor] = {}
        for group in groups:
            rows = len(group)
            options = {
                **model_options["transformer_options"],
                "uuids": [one[0] for one in group],
                "cond_or_uncond": [one[1] for one in group],
                "sigmas": sigma,
            }
            context = torch.cat([one[2].expand(len(x), -1) for one in group])
            model, scale = self.inner_model.diffusion_model, 1.0
            if self.inner_model.model_sampling.sigma_max > 1:
                scale = float(sigma[0] ** 2 + 1) ** -0.5
            inputs = torch.cat([x * scale] * rows), torch.cat([sigma] * rows), context
            if "one_by_one" in model_options:  # as a node's own model_function_wrapper may do
                each = zip(*(value.chunk(rows) for value in inputs), strict=True)
                output = torch.cat([model(*one, transformer_options=options) for one in each])
            else:
                output = model(*inputs, transformer_options=options)
            for one, row in zip(group, output.chunk(rows), strict=True):
                denoised[one[1]] = self.inner_model.model_sampling.calculate_denoised(sigma, row, x)
        return denoised[0] if 1 not in denoised else denoised[1] + self.cfg * (denoised[0] - denoised[1])


def sample_euler(model: Any, x: Any, sigmas: Any, extra_args: Any = None, callback: Any = None, disable: Any = None):
    for sigma, after in itertools.pairwise(sigmas):
        slope = (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma
        x = x + slope * (after - sigma)
    return x


def sample_heun(model: Any, x: Any, sigmas: Any, extra_args: Any = None, callback: Any = None, disable: Any = None):
    for sigma, after in itertools.pairwise(sigmas):
        slope = (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma
        if after > 0:
            ahead = x + slope * (after - sigma)
            slope = (slope + (ahead - model(ahead, after * x.new_ones(len(x)), **extra_args)) / after) / 2
        x = x + slope * (after - sigma)
    return x


def sample_euler_cfg_pp(model: Any, x: Any, sigmas: Any, extra_args: Any, callback: Any = None, disable: Any = None):
    """Asks for the output without guidance."""
    extra_args["model_options"]["sampler_post_cfg_function"] = [lambda found: found]
    return sample_euler(model, x, sigmas, extra_args)


def sample_unlisted(model: Any, x: Any, sigmas: Any, extra_args: Any = None, callback: Any = None, disable: Any = None):
    """Not linear in the model's outputs."""
    for sigma, after in itertools.pairwise(sigmas):
        slope = (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma
        x = x + slope.clamp(-0.1, 0.1) * (after - sigma)
    return x


def sample_euler_ancestral(
    model: Any,
    x: Any,
    sigmas: Any,
    extra_args: Any = None,
    callback: Any = None,
    disable: Any = None,
    noise_sampler: Any = None,
):
    """Steps down to half the next noise level, and adds noise up to it."""
    generator = torch.Generator().manual_seed(extra_args.get("seed") or 0)
    for sigma, after in itertools.pairwise(sigmas):
        slope = (x - model(x, sigma * x.new_ones(len(x)), **extra_args)) / sigma
        x = x + slope * (after / 2 - sigma)
        noise = torch.randn(x.shape, generator=generator) if noise_sampler is None else noise_sampler(sigma, after)
        x = x + noise * after / 2
    return x


SAMPLERS = {
    "euler": sample_euler,
    "heun": sample_heun,
    "euler_ancestral": sample_euler_ancestral,
    "euler_cfg_pp": sample_euler_cfg_pp,
    "unlisted": sample_unlisted,
}


class StandIn:
    """The same functions for tests as those of `real_comfyui`."""

    def model(self, seed: int = 0, sigma_max: float = 1.0) -> Patcher:
        return Patcher(SimpleNamespace(diffusion_model=TinyModel(seed), model_sampling=ModelSampling(sigma_max)))

    def inner(self, model: Patcher) -> nn.Module:
        """A part of the diffusion model, which runs when the model is computed."""
        found: nn.Module = model.model.diffusion_model.activation
        return found

    def sample(
        self,
        model: Patcher,
        seed: int = 0,
        sampler: str = "euler",
        cfg: float = 3.0,
        steps: int = 12,
        batch: int = 1,
        together: bool = True,
    ) -> torch.Tensor:
        noise = torch.randn(batch, 4, 6, 6, generator=torch.Generator().manual_seed(seed))
        chosen = SimpleNamespace(sampler_function=SAMPLERS[sampler], extra_options={})
        sigmas = torch.linspace(model.model.model_sampling.sigma_max, 0, steps + 1)
        with torch.no_grad():
            return Guider(model, cfg, together).sample(noise * sigmas[0], chosen, sigmas)
