"""Recorded generations whose transformer calls can be made again: the same arguments with another latent.

What the scheduler gets is mixed from the outputs of the branches, and of the parts of a doubled batch, as recorded:
linearly, with a mix that may change from step to step (dynamic guidance), or rescaled to the norm of one branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..engine.install import CachedTransformer
from ..engine.method import Runner
from ..engine.output import OutputRunner
from ..engine.state import ForwardCall, Outcome
from ..errors import HoldoverError
from ..models.inputs import copy_containers, iter_tensors, scale_argument
from .recording import OutputRecorder, TrajectoryRecord

_UNEXPLAINED = 1e-4  # of a squared length: what rounding to bfloat16 may leave unexplained


class ReplayError(HoldoverError):
    """Generations of this pipeline cannot be replayed without it."""


@dataclass(frozen=True)
class RecordedCall:
    """One call of the transformer, without its output.

    `key` is where it gets its latent, `scale` times x, and `timestep` where its timestep, if that is floating-point.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    key: int | str
    scale: float
    timestep: int | str | None

    def run(self, latent: Tensor, factor: float | Tensor | None, recompute: bool) -> Tensor:
        """(parts, ...): the output for another latent, and for the timestep times `factor` if there is one.

        `recompute` saves memory where there is a gradient.
        """
        given = self.args, self.kwargs
        if factor is not None and self.timestep is not None:
            given = scale_argument(*given, self.timestep, factor)
        args, kwargs = copy_containers((list(given[0]), dict(given[1])))
        place: Any = args if isinstance(self.key, int) else kwargs
        place[self.key] = _with_latent(place[self.key], latent * self.scale)
        if recompute and torch.is_grad_enabled():
            output: Any = checkpoint(self.module, *args, use_reentrant=False, **kwargs)
        else:
            output = self.module(*args, **kwargs)
        return split_parts(output, latent)


@dataclass(frozen=True)
class Mix:
    """How the scheduler's input is mixed from the parts: linearly, by step, and then with the norms of one part."""

    shares: Tensor  # (steps, parts)
    norm_of: int | None = None

    def __call__(self, parts: Tensor, steps: slice) -> Tensor:
        """(parts, steps, ...) -> (steps, ...)."""
        mixed: Tensor = (parts * like(self.shares[steps].T, parts)).sum(0)
        if self.norm_of is None:
            return mixed
        norm: Tensor = parts[self.norm_of].norm(dim=-1, keepdim=True)
        rescaled: Tensor = mixed * norm / mixed.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        return rescaled


@dataclass(eq=False)
class RecordedBatch:
    """One batch of uncached generations.

    `calls` by step and branch; `latents` (steps + 1, batch, ...) before each step and at the end; `outputs` (steps,
    batch, ...) as the scheduler got them; `parts` (parts, steps, batch, ...), the outputs of each branch, and of each
    part of a doubled batch, which the transformer rounds to a relative precision of `rounding`.
    """

    calls: list[dict[str, RecordedCall]]
    latents: Tensor
    outputs: Tensor
    parts: Tensor
    mix: Mix
    rounding: float
    images: Tensor | None

    @property
    def size(self) -> int:
        """The number of generations."""
        return self.outputs.shape[1]


class CallRecorder(OutputRecorder):
    """Also records the calls of the transformer, and its outputs by part."""

    def __init__(self, record: TrajectoryRecord) -> None:
        super().__init__(record)
        self._inputs: dict[int, dict[str, tuple[Any, ...]]] = {}

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return _RecordingRunner(transformer, self._inputs)

    def finish(self, images: Tensor | None) -> RecordedBatch:
        """The recorded batch; an error if it cannot be replayed."""
        record = self._record
        if self.spec is None or not record.outputs:
            raise HoldoverError("The pipeline did not call its transformer: there is nothing to replay.")
        if record.steps != len(self.spec.noise) or sorted(self._inputs) != list(range(record.steps)):
            raise ReplayError("Its scheduler does not make each of its steps once.")
        latents, outputs = torch.stack(record.latents), torch.stack(record.outputs)
        calls, parts = [], []
        for step in range(record.steps):
            if self._inputs[step].keys() != self._inputs[0].keys():
                raise ReplayError("Its branches change from step to step.")
            calls.append(
                {
                    branch: RecordedCall(
                        module,
                        args,
                        kwargs,
                        *find_latent(inputs.latents_name, args, kwargs, latents[step]),
                        inputs.find_timestep(args, kwargs),
                    )
                    for branch, (module, inputs, args, kwargs, _) in self._inputs[step].items()
                }
            )
            parts.append(torch.cat([split_parts(one[-1], latents[step]) for one in self._inputs[step].values()]))
        mixed = torch.stack(parts, dim=1)
        given = next(iter_tensors([one[-1] for one in self._inputs[0].values()]))
        rounding = torch.finfo(given.dtype).eps
        return RecordedBatch(calls, latents, outputs, mixed, find_mix_of_parts(mixed, outputs), rounding, images)


class _RecordingRunner(OutputRunner):
    """Records the inputs and the output of each call."""

    def __init__(self, transformer: CachedTransformer, inputs: dict[int, dict[str, tuple[Any, ...]]]) -> None:
        super().__init__(transformer)
        self._recorded = inputs

    def run(self, call: ForwardCall) -> Outcome:
        args, kwargs = copy_containers((tuple(call.args), dict(call.kwargs)))
        outcome = super().run(call)
        transformer = call.transformer
        recorded = (transformer.module, transformer.inputs, args, kwargs, outcome.output)
        self._recorded.setdefault(call.step, {})[call.branch] = recorded
        return outcome


def find_latent(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], latent: Tensor) -> tuple[int | str, float]:
    """Where a call gets its latent, and how it is scaled; `name` is the most likely keyword."""
    places = sorted([*range(len(args)), *kwargs], key=lambda key: key not in (0, name))
    for key in places:
        value = args[key] if isinstance(key, int) else kwargs[key]
        try:
            given, known = _latent_part(value, latent).double(), latent.double()
        except (ValueError, TypeError):
            continue
        scale = float((given * known).sum() / known.square().sum() / len(given))
        if float((given - scale * known).square().sum()) <= _UNEXPLAINED * float(given.square().sum()) and scale:
            return key, 1.0 if abs(scale - 1) < 2e-3 else scale
    raise ReplayError("The latent is not among the inputs of its transformer, scaled or not.")


def _latent_part(value: Any, latent: Tensor) -> Tensor:
    """(repeats, batch, ...): the part of an input that may be the latent, each sample once or several times."""
    if isinstance(value, list):
        value = torch.stack(value)
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim() or len(value) % len(latent):
        raise TypeError
    repeats = len(value) // len(latent)
    if value.numel() == repeats * latent.numel():
        return value.reshape(repeats, *latent.shape)
    return value[_region(value, latent)].reshape(repeats, *latent.shape)


def _region(value: Tensor, latent: Tensor) -> tuple[slice, ...]:
    """The region of a larger tensor that begins like the latent: more channels, or more tokens."""
    if value.dim() != latent.dim() or any(a < b for a, b in zip(value.shape[1:], latent.shape[1:], strict=True)):
        raise ValueError
    return (slice(None), *(slice(size) for size in latent.shape[1:]))


def _with_latent(value: Any, latent: Tensor) -> Any:
    """An input with another latent in its place."""
    if isinstance(value, list):
        return [latent[i % len(latent)].to(one.dtype).reshape(one.shape) for i, one in enumerate(value)]
    repeated = latent.to(value.dtype).repeat(len(value) // len(latent), *[1] * (latent.dim() - 1))
    if repeated.numel() == value.numel():
        return repeated.reshape(value.shape)
    changed = value.clone()
    changed[_region(value, latent)] = repeated
    return changed


def split_parts(output: Any, latent: Tensor) -> Tensor:
    """(parts, batch, ...): the first output of a transformer like the latent; a doubled batch has two parts."""
    tensors = list(iter_tensors(output))
    many = all(t.numel() * len(latent) == latent.numel() for t in tensors)  # a list of samples
    try:
        return _latent_part(torch.stack(tensors) if many else tensors[0], latent).float()
    except (TypeError, ValueError):
        raise ReplayError("The outputs of its transformer are not like its latents.") from None


def find_shares(outputs: Sequence[Any], mixed: Tensor) -> tuple[float, ...] | None:
    """The share of each part of some branches in what the scheduler got at one step; none if it is no mix of them.

    None if the outputs are not like what the scheduler got.
    """
    try:
        parts = torch.cat([split_parts(output, mixed) for output in outputs]).cpu()
    except ReplayError:
        return None
    try:
        return tuple(find_mix_of_parts(parts[:, None], mixed[None].float().cpu()).shares[0].tolist())
    except ReplayError:
        return ()


def find_mix_of_parts(parts: Tensor, outputs: Tensor) -> Mix:
    """How what the scheduler gets is mixed from the parts (parts, steps, ...); an error if it is not."""
    flat, target = parts.flatten(2).double(), outputs.flatten(1).double()
    normal, known = torch.einsum("psx,qsx->spq", flat, flat), torch.einsum("psx,sx->sp", flat, target)
    ridge = 1e-9 * torch.eye(len(parts)).to(flat) * normal.diagonal(dim1=1, dim2=2).sum(1)[:, None, None]
    constant = torch.linalg.solve((normal + ridge).sum(0), known.sum(0)).expand(len(target), -1)
    for shares in (constant, torch.linalg.solve(normal + ridge, known)):
        mix = Mix(shares.float())
        if _is_explained(mix(parts, slice(None)), outputs):
            return mix
    direction = torch.nn.functional.normalize(outputs.double(), dim=-1)

    def across(values: Tensor) -> Tensor:
        return values - (values * direction).sum(-1, keepdim=True) * direction

    for kept in range(2 if len(parts) == 2 else 0):  # u + s (c - u), rescaled to the norms of c
        base, change = across(parts[1 - kept].double()), across((parts[kept] - parts[1 - kept]).double())
        scale = float(-(base * change).sum() / change.square().sum().clamp_min(1e-30))
        shares = torch.tensor([scale, 1 - scale] if kept == 0 else [1 - scale, scale]).to(parts)
        mixed = Mix(shares.expand(len(outputs), -1), kept)(parts, slice(None))
        sign = 1 if float((mixed * outputs).sum()) > 0 else -1  # Lumina 2 passes on the negative
        if _is_explained(sign * mixed, outputs):
            return Mix(sign * shares.expand(len(outputs), -1), kept)
    raise ReplayError("What its scheduler gets is no mix of the outputs of its transformer.")


def _is_explained(mixed: Tensor, outputs: Tensor) -> bool:
    return float((mixed - outputs).square().sum()) <= _UNEXPLAINED * float(outputs.square().sum())


def like(shares: Tensor, tensor: Tensor) -> Tensor:
    """`shares` with as many dimensions as `tensor`."""
    return shares.reshape(*shares.shape, *[1] * (tensor.dim() - shares.dim()))
