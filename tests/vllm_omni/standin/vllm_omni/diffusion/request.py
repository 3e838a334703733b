"""What is asked for."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class OmniDiffusionSamplingParams:
    """How one request is generated; `call` stands for all that is the pipeline's own."""

    num_inference_steps: int | None = None
    extra_args: dict[str, Any] = field(default_factory=dict)
    call: dict[str, Any] = field(default_factory=dict)


@dataclass
class OmniDiffusionRequest:
    """One image."""

    sampling_params: OmniDiffusionSamplingParams


@dataclass
class DiffusionRequestBatch:
    """Requests that are generated together."""

    requests: list[OmniDiffusionRequest]
