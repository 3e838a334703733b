"""The evaluations that a ComfyUI sampler makes, found before the first one.

The sampler's function runs on unit vectors in place of latents. Nothing is imported from ComfyUI.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import ConfigError
from ..plan.error_model import Array

SAME_LEVEL = 1e-4  # relative difference of two noise levels that are the same
_MOST_EVALUATIONS = 8  # per noise level; a sampler that makes more has no end that is known in advance


@dataclass(frozen=True, eq=False)
class Evaluations:
    """The evaluations that a sampler makes, in order: their noise levels, and the response of the latents to them.

    `response` is (N+1, N): how much of each of the model's outputs is in the latent before each evaluation and at the
    end. `adds_noise`: the sampler adds new noise to the latent between them.
    """

    sampler: str
    sigmas: tuple[float, ...]
    response: Array
    adds_noise: bool

    @classmethod
    def of(cls, guider: Any, sampler: Any, sigmas: torch.Tensor) -> Evaluations:
        """Run the sampler's function on unit vectors; ConfigError if it cannot be, or if it is not linear."""
        function = getattr(sampler, "sampler_function", None)
        if function is None:
            raise ConfigError(f"the sampler {type(sampler).__name__} has no function whose evaluations can be listed")
        name = getattr(function, "__name__", "sampler").removeprefix("sample_")
        try:
            devices = [sigmas.device] if sigmas.is_cuda else []
            with torch.random.fork_rng(devices=devices), torch.no_grad():
                levels, _ = _run_sampler(function, guider, sampler, sigmas, None)
                count = len(levels)
                _, symbolic = _run_sampler(function, guider, sampler, sigmas, torch.eye(count + 1))
                numbers = torch.randn(3, count + 1, generator=torch.Generator().manual_seed(0))
                _, actual = _run_sampler(function, guider, sampler, sigmas, numbers.T.contiguous())
                _, noisy = _run_sampler(function, guider, sampler, sigmas, numbers.T.contiguous(), 1.0)
        except Exception as error:  # code of any sampler: whatever it raises, the generation itself goes on
            raise ConfigError(f"the evaluations of the sampler {name} cannot be listed: {error}") from error
        if count == 0 or not torch.allclose(symbolic @ numbers.T.double(), actual, rtol=1e-3, atol=1e-3):
            raise ConfigError(f"the sampler {name} is not linear in the model's outputs")
        return cls(name, tuple(levels), symbolic[:, 1:].numpy(), not torch.equal(noisy, actual))

    def locate(self, sigma: float, last: int) -> int | None:
        """The next evaluation after `last` at this noise level; None if there is none."""
        later = range(last + 1, len(self.sigmas))
        return next((i for i in later if math.isclose(self.sigmas[i], sigma, rel_tol=SAME_LEVEL)), None)


def _run_sampler(
    function: Callable[..., Any],
    guider: Any,
    sampler: Any,
    sigmas: torch.Tensor,
    basis: torch.Tensor | None,
    added: float = 0.0,
) -> tuple[list[float], torch.Tensor]:
    """The noise levels of all evaluations, and the latents if the initial one and the outputs are rows of `basis`.

    `added` takes the place of the noise that the sampler adds, which is no part of the response.
    """
    sampling = guider.inner_model.model_sampling
    rows = torch.zeros(_MOST_EVALUATIONS * len(sigmas) + 1, 1) if basis is None else basis
    vectors = rows.to(sigmas.device).reshape(len(rows), 1, -1, 1, 1)
    levels: list[float] = []
    latents: list[torch.Tensor] = []

    class Model:
        inner_model = guider

        def __call__(self, x: torch.Tensor, sigma: torch.Tensor, **extra: Any) -> Any:
            if len(levels) + 1 >= len(vectors):
                raise ConfigError("their number depends on the latent, or has no limit")
            if extra.get("model_options", {}).get("sampler_post_cfg_function"):
                raise ConfigError("it uses the model's output without guidance on its own")
            levels.append(float(sigma.flatten()[0]))
            latents.append(x)
            return sampling.calculate_denoised(sigma, vectors[len(levels)], x)

    model: Any = Model()
    model.sigmas, model.noise, model.latent_image = sigmas, vectors[0], torch.zeros_like(vectors[0])
    options = dict(getattr(sampler, "extra_options", {}))
    if "noise_sampler" in inspect.signature(function).parameters:
        options["noise_sampler"] = lambda sigma, sigma_next: torch.full_like(vectors[0], added)
    extra = {"model_options": {"transformer_options": {}}, "seed": 0, "denoise_mask": None}
    latents.append(function(model, vectors[0], sigmas, extra_args=extra, callback=None, disable=True, **options))
    return levels, torch.stack([latent.double().flatten() for latent in latents]).cpu()
