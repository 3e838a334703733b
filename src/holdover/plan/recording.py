"""Recording a trajectory: latents, outputs by branch, and how the scheduler's input is mixed from the branches.

Pipelines combine their branches (cond, uncond) in different ways. The mix is found by least squares, not assumed:

- The scheduler's input is the same linear mix of the branches' outputs at every step: branches are kept separate.
- It is such a mix, scaled, plus a share of the latent, differently at each step (models that their pipeline
  preconditions, such as Cosmos): branches are kept separate, together with the `Preconditioning`.
- It is a mix of the branches, or of the parts of a doubled batch, that changes from step to step (CogVideoX's dynamic
  guidance): they are kept separate, with the mix of each step, and are held with the same weights.
- It is none of these (rescaled norms, cropped outputs, a branch that runs at some steps only): only what the scheduler
  got is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch

from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Method, NoneConfig, Runner
from ..engine.output import OutputRunner
from ..engine.state import ComputedForward
from ..errors import ConfigError, HoldoverError
from ..grid import Grid
from ..models.inputs import iter_tensors
from ..policies.base import AlwaysCompute
from .error_model import Array, Measurements
from .generation import GenerationSpec, Preconditioning, describe_generation, model_output

PLACES = ("device", "cpu", "disk")
Kept = Literal["outputs", "branches", "residuals"]
_SAME_MIX = 1e-2  # relative to the largest share: how much the mix may differ between runs
_UNEXPLAINED = 1e-4  # of the squared length: what rounding to bfloat16 may leave unexplained
_LATENT_ROUNDING = 4e-6  # of the squared latent: what its own rounding may leave unexplained


class TrajectoryRecord(ExitStack):
    """The trajectory of one run: latents and, as `keep` says, the model's outputs, mixed and by branch, and residuals.

    A context manager that frees all tensors. `outputs` are what the scheduler got; with a `preconditioning`, the
    model's own. `announce` is called with the first latent before it is kept.
    """

    def __init__(
        self,
        place: str,
        keep: Collection[Kept] = (),
        preconditioning: Preconditioning | None = None,
        announce: Callable[[torch.Tensor], None] | None = None,
    ) -> None:
        if place not in PLACES:
            raise ConfigError(f"Trajectories are kept on the 'device', on the 'cpu' or on 'disk', not on {place!r}.")
        super().__init__()
        self._place, self._keep, self._announce = place, keep, announce
        self._folder = self.enter_context(TemporaryDirectory(prefix="holdover-")) if place == "disk" else None
        self._files = itertools.count()
        self.preconditioning = preconditioning
        self.latents: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []
        self.branches: dict[str, list[torch.Tensor]] = {}
        self.first_branches = 0  # how many ran in the first step
        self._residuals: dict[str, list[tuple[int, torch.Tensor]]] = {}
        self._residual_branch: dict[str, str] = {}
        self._last: SchedulerStep | None = None
        self.callback(self.clear)

    def clear(self) -> None:
        """Remove all tensors."""
        for kept in (self.latents, self.outputs, self.branches, self._residuals):
            kept.clear()

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy where this record keeps its tensors."""
        copy = tensor.detach().to(tensor.device if self._place == "device" else "cpu", torch.float32, copy=True)
        if self._folder is None:
            return copy
        path = Path(self._folder) / f"{next(self._files)}.npy"
        np.save(path, copy.numpy())
        return torch.from_numpy(np.load(path, mmap_mode="c"))

    @property
    def steps(self) -> int:
        """The number of steps that the scheduler made."""
        return len(self.latents) - 1

    def add_forward(self, computed: ComputedForward) -> None:
        """Record the transformer's output in one branch."""
        if "branches" in self._keep:
            outputs = [self._copy(output) for output in itertools.islice(iter_tensors(computed.output), 1)]
            self.branches.setdefault(computed.branch, []).extend(outputs)

    def add_residual(self, computed: ComputedForward) -> None:
        """Record the residual of the blocks of one transformer, in the branch that runs first."""
        name = computed.transformer.name
        if "residuals" in self._keep and self._residual_branch.setdefault(name, computed.branch) == computed.branch:
            flat = self._copy(torch.cat([r.flatten(1) for r in computed.residual], dim=1))
            self._residuals.setdefault(name, []).append((computed.step, flat))

    def add_step(self, stepped: SchedulerStep) -> None:
        """Record a step of the scheduler."""
        if self._announce is not None and not self.latents:
            self._announce(stepped.sample)
        self.first_branches = self.first_branches or len(self.branches)
        self.latents.append(self._copy(stepped.sample))
        if "outputs" in self._keep:
            self.outputs.append(self._copy(model_output(stepped, self.preconditioning)))
        self._last = stepped

    def finish(self) -> None:
        """Record the final latent."""
        if self._last is not None:
            result, self._last = self._last.result, None
            self.latents.append(self._copy(result[0] if isinstance(result, tuple) else result.prev_sample))

    def residual_grams(self) -> dict[str, Array]:
        """(batch, N, N) by transformer: Gram matrices of its residuals, 0 at steps that another expert ran."""
        found = {}
        for name, residuals in self._residuals.items():
            grams, steps = gram_matrices([[flat for _, flat in residuals]]), [step for step, _ in residuals]
            found[name] = np.zeros((len(grams), self.steps, self.steps))
            found[name][np.ix_(range(len(grams)), steps, steps)] = grams
        return found

    def squared_errors(self, other: TrajectoryRecord, step: int) -> Array:
        """The mean squared difference of the latents of two runs before `step`, for each entry of the batch."""
        difference = self.latents[step] - other.latents[step]
        return difference.flatten(1).double().square().mean(1).cpu().numpy()


def gram_matrices(lists: Iterable[Sequence[torch.Tensor]], chunk: int = 1 << 20) -> Array:
    """(batch, tensors, tensors): inner products of all tensors of all lists, divided by the number of values."""
    flat = [tensor.flatten(1) for tensors in lists for tensor in tensors]
    batch, values = flat[0].shape
    total = torch.zeros(batch, len(flat), len(flat), dtype=torch.float64)
    for start in range(0, values, chunk):
        part = torch.stack([f[:, start : start + chunk].double() for f in flat], dim=1)
        total += (part @ part.transpose(1, 2)).cpu()
    return (total / values).numpy()


class OutputRecorder(Method[NoneConfig]):
    """Computes every step and records the trajectory."""

    name = "calibrate"
    observes = True
    follows = True

    def __init__(self, record: TrajectoryRecord) -> None:
        super().__init__(NoneConfig())
        self._record = record
        self._transformers: list[CachedTransformer] = []
        self._pipeline: Any = None
        self.spec: GenerationSpec | None = None

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        self._transformers.append(transformer)
        self._pipeline = pipeline
        return ()

    def make_runner(self, transformer: CachedTransformer) -> Runner:
        return OutputRunner(transformer)

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> AlwaysCompute:
        if self.spec is None:
            self.spec = describe_generation(self._pipeline, self._transformers, grid)
        return AlwaysCompute()

    def observe(self, computed: ComputedForward) -> None:
        self._record.add_forward(computed)

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        self._record.add_step(stepped)

    def on_end(self) -> None:
        self._record.finish()


@dataclass(frozen=True)
class BranchMix:
    """Gram matrices of the outputs, by branch or of what the scheduler got, and how the scheduler's input is mixed.

    Without `branches` there may be several `parts`, with a mix for each step.
    """

    grams: Array
    branches: tuple[str, ...] = ()
    mix: tuple[float, ...] = (1.0,)
    preconditioning: Preconditioning | None = None
    parts: int = 1

    def measurements(self, noise: Array) -> Measurements:
        """The Gram matrices on their noise levels, without error growth."""
        growth = np.zeros((len(self.grams), len(noise) + 1))
        return Measurements(noise, self.grams, growth, self.mix, tied=not self.branches)


def merge_runs(runs: Sequence[BranchMix]) -> BranchMix:
    """Several runs as one; branches are kept separate if all runs have the same branches and mix."""
    if len({run.preconditioning is None for run in runs}) > 1:
        raise HoldoverError("The pipeline's preconditioning changes from call to call: calibrate one kind of call.")
    first = runs[0]
    same = [r.mix for r in runs if (r.branches, len(r.mix)) == (first.branches, len(first.mix))]
    mixes = np.array(same)
    if len(mixes) == len(runs) and np.ptp(mixes, axis=0).max() < _SAME_MIX * np.abs(mixes).max():
        mix = tuple(mixes.mean(axis=0).tolist())
        return replace(first, grams=np.concatenate([run.grams for run in runs]), mix=mix)
    noise = np.zeros(first.grams.shape[1] // max(first.parts, len(first.branches)))
    merged = np.concatenate([run.measurements(noise).merged.grams for run in runs])
    return BranchMix(merged, preconditioning=first.preconditioning)


def find_mix(
    branches: Mapping[str, Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor], latents: Sequence[torch.Tensor]
) -> BranchMix:
    """How the scheduler's inputs `outputs` are mixed from the branches; without branches if no mix explains them."""
    names, steps, like = tuple(branches), len(outputs), outputs[0]
    if not branches or any(len(b) != steps for b in branches.values()):
        return BranchMix(gram_matrices([outputs]))
    if any((b[0].numel(), len(b[0])) != (like.numel(), len(like)) for b in branches.values()):
        return _find_mix_of_steps(branches.values(), outputs) or BranchMix(gram_matrices([outputs]))
    grams = gram_matrices([*branches.values(), outputs])
    found = _find_linear_mix(grams, names, steps)
    if found is None and latents[0].numel() == like.numel():
        found = _find_preconditioned_mix(gram_matrices([*branches.values(), outputs, latents]), names, steps)
    mixed = slice(len(names) * steps, (len(names) + 1) * steps)
    return found or _find_mix_of_steps(branches.values(), outputs) or BranchMix(grams[:, mixed, mixed])


def _find_mix_of_steps(branches: Iterable[Sequence[torch.Tensor]], outputs: Sequence[torch.Tensor]) -> BranchMix | None:
    """The mix of the branches, or of the parts of a doubled batch, where it changes from step to step; else None."""
    steps = [[part for t in tensors for part in t.split(len(outputs[0]))] for tensors in zip(*branches, strict=True)]
    count, size = len(steps[0]), outputs[0].numel()
    if any(len(parts) != count or any(part.numel() != size for part in parts) for parts in steps):
        return None
    grams = [gram_matrices([[*parts, output]]).sum(axis=0) for parts, output in zip(steps, outputs, strict=True)]
    features, target = np.eye(count + 1)[:-1], np.eye(count + 1)[-1]
    fits = [_regress(features, target, gram) for gram in grams]
    is_constant = _regress(features, target, np.sum(grams, axis=0))[1] <= _UNEXPLAINED
    if is_constant or any(unexplained > _UNEXPLAINED for _, unexplained in fits):
        return None
    mix = tuple(np.transpose([shares for shares, _ in fits]).flatten().tolist())
    return BranchMix(gram_matrices(zip(*steps, strict=True)), mix=mix, parts=count)


def _find_linear_mix(grams: Array, branches: tuple[str, ...], steps: int) -> BranchMix | None:
    """The mix, if it is the same at all steps; None if it does not explain what the scheduler got."""
    count, inner = len(branches), len(branches) * steps
    same_step = np.einsum("gbtct->bc", grams.reshape(-1, count + 1, steps, count + 1, steps))
    mix, unexplained = _regress(np.eye(count + 1)[:-1], np.eye(count + 1)[-1], same_step)
    if unexplained > _UNEXPLAINED:
        return None
    if count == 1:
        return BranchMix(grams[:, inner:, inner:])
    return BranchMix(grams[:, :inner, :inner], branches, tuple(map(float, mix)))


def _find_preconditioned_mix(grams: Array, branches: tuple[str, ...], steps: int) -> BranchMix | None:
    """The mix and the preconditioning, if the scheduler got scale_i (mix of outputs) + carry_i (latent) at step i.

    Where a short step is mostly rounding, the unexplained part only has to be small compared with the latent. A third
    of the steps must be explained without that.
    """
    count, inner, total = len(branches), len(branches) * steps, grams.sum(axis=0)
    by_step = [total[at : inner + 2 * steps : steps, at : inner + 2 * steps : steps] for at in range(steps)]
    *outputs, given, latent = np.eye(count + 2)
    shares = np.array([_regress(np.stack([*outputs, latent]), given, gram)[0][:-1] for gram in by_step])
    scale = shares.sum(axis=1, keepdims=True)
    if np.any(np.abs(scale) < 1e-6):
        return None
    mix = np.median(shares / scale, axis=0)
    fits = [_regress(np.stack([mix @ outputs, latent]), given, gram) for gram in by_step]
    unexplained = np.array([rest for _, rest in fits])
    latents = total[inner + steps :, inner + steps :]
    sizes, next_to = np.diag(latents), np.diag(latents, 1)
    moved = (sizes[1:] - 2 * next_to + sizes[:-1]) / np.maximum(sizes[:-1], 1e-30)  # |x_{i+1} - x_i|^2 / |x_i|^2
    explained, rounding = unexplained <= _UNEXPLAINED, unexplained * moved <= _LATENT_ROUNDING * mix @ mix
    if explained.mean() < 1 / 3 or not np.all(explained | rounding):
        return None
    found = BranchMix(grams[:, :inner, :inner], preconditioning=Preconditioning(*np.array([f for f, _ in fits]).T))
    return found if count == 1 else replace(found, branches=branches, mix=tuple(map(float, mix)))


def _regress(features: Array, target: Array, gram: Array) -> tuple[Array, float]:
    """The share of each feature in the target, and the part of the target's squared length that is unexplained."""
    normal, known, whole = features @ gram @ features.T, features @ gram @ target, float(target @ gram @ target)
    size = np.sqrt(np.maximum(np.diag(normal), 1e-30))
    shares: Array = np.linalg.lstsq(normal / np.outer(size, size), known / size, rcond=1e-12)[0] / size
    return shares, (whole - float(shares @ known)) / max(whole, 1e-30)
