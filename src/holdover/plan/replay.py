"""Plans run on recorded generations, without the pipeline: only the transformer's computed steps cost anything.

`Replay` records uncached generations once: every call of the transformer, the latents, and what the scheduler made of
the outputs. A plan then runs on all recorded batches side by side. The latent before step i is

    x_i = (x_i of the uncached run) + sum_{k<i} R[i,k] (u_k - v_k),

with u the outputs of the plan, v those of the uncached run and R the scheduler response. It is put in the place of the
recorded one in the transformer's input; all other arguments of the call are the recorded ones.

`Replay.fit` fits the weights of each held step when it comes, on all batches at once: the last computed outputs are
regressed on the output that puts the next latent where the uncached generation has it,

    v_i - sum_{k<i} R[i+1,k] / R[i+1,i] (u_k - v_k).

What the scheduler gets is mixed from the outputs of the branches, and of the parts of a doubled batch, as recorded:
linearly, with a mix that may change from step to step (dynamic guidance), or rescaled to the norm of one branch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..engine.clock import SchedulerStep
from ..engine.install import CachedTransformer
from ..engine.method import Runner
from ..engine.output import OutputRunner
from ..engine.state import ForwardCall, Outcome
from ..errors import HoldoverError
from ..models.inputs import copy_containers, iter_tensors, scale_argument
from ..profiles import PlannerOptions, Profile
from .calls import Batch, Caller, installed_engine
from .config import PlanConfig
from .error_model import Array, Weights, held_steps, solve_ridge
from .generation import GenerationSpec, Preconditioning
from .method import PlanMethod
from .planner import PlanProblem, plan_problem
from .recording import OutputRecorder, TrajectoryRecord

_UNEXPLAINED = 1e-4  # of a squared length: what rounding to bfloat16 may leave unexplained
_SAME_END = 0.2  # of the error of a plan: how far the replayed plan may be from the one that the pipeline runs
Tables = Mapping[int, Tensor]  # (sets, held steps, anchors) by the computed step before a gap
Factors = Mapping[int, float | Tensor]  # of the timestep argument, by computed step
UNCHANGED: Factors = {}


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
        mixed: Tensor = (parts * _like(self.shares[steps].T, parts)).sum(0)
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
    part of a doubled batch.
    """

    calls: list[dict[str, RecordedCall]]
    latents: Tensor
    outputs: Tensor
    parts: Tensor
    mix: Mix
    images: Tensor | None

    @property
    def size(self) -> int:
        """The number of generations."""
        return self.outputs.shape[1]


@dataclass(eq=False)
class Rollout:
    """A plan under way on one batch: its computed outputs by part, and the errors of all outputs so far."""

    batch: RecordedBatch
    computed: list[Tensor] = field(default_factory=list)  # (parts, ...) each
    errors: list[Tensor] = field(default_factory=list)  # (steps, ...) each
    exact: bool = True  # nothing was held yet

    def latent_error(self, row: Tensor) -> Tensor:
        """The errors of the outputs so far, weighted by a row of the scheduler response."""
        errors = torch.cat(self.errors)
        error: Tensor = torch.tensordot(row[: len(errors)], errors, 1)
        return error

    def add(self, parts: Tensor, steps: slice) -> None:
        """Go on by some steps with these outputs, (parts, steps, ...)."""
        self.errors.append(self.batch.mix(parts, steps) - self.batch.outputs[steps])

    def features(self, step: int, count: int, sets: Sequence[int]) -> Tensor:
        """(sets x anchors, values): what each weight of a held step multiplies, for the last `count` computed steps."""
        outputs = torch.stack(self.computed[-count:], dim=1)  # (parts, anchors, ...)
        outputs = outputs * _like(self.batch.mix.shares[step][:, None], outputs)
        features = torch.zeros(1 + max(sets), *outputs.shape[1:]).to(outputs)
        features.index_add_(0, torch.tensor(sets, device=outputs.device), outputs)
        return features.flatten(0, 1).flatten(1).double()


class Replay:
    """Recorded generations of some batches, on which plans are run and fitted.

    `runs` counts what was computed, in generations; a gradient counts as two more forwards.
    """

    def __init__(self, caller: Caller, profile: Profile, batches: Sequence[Batch]) -> None:
        self.runs, self.recompute, self.batches = 0.0, False, list[RecordedBatch]()
        preconditioning = Preconditioning.of(profile.facts, np.array(profile.facts.noise))
        for prompts, seeds in batches:
            with TrajectoryRecord("device", ["outputs"], preconditioning) as record:
                recorder = _CallRecorder(record)
                with installed_engine(caller.pipe, recorder):
                    images = caller(prompts, seeds)
                self.batches.append(recorder.finish(images))
                self.runs += len(prompts)
            assert recorder.spec is not None
            self.spec: GenerationSpec = recorder.spec
        problem = plan_problem(self.spec, profile)
        self.branches = tuple(self.batches[0].calls[0])
        if set(problem.branches) == set(self.branches):
            self.problem: PlanProblem = problem
        else:  # the mix is not the same at all steps, or a batch has all branches
            self.problem = problem.merged
        self.response = torch.tensor(self.problem.response, dtype=torch.float32, device=self.batches[0].outputs.device)

    def first(self, count: int) -> list[RecordedBatch]:
        """The first batches, with at least so many generations if there are so many."""
        sizes = np.cumsum([batch.size for batch in self.batches])
        return self.batches[: int(np.searchsorted(sizes, count)) + 1]

    def check(self, caller: Caller, profile: Profile, batch: Batch) -> None:
        """Run one plan on the first batch with the pipeline too; an error if the two do not end in the same place."""
        assert self.problem.search is not None
        steps = len(self.spec.noise)
        computed = self.problem.search.frontier[max(len(self.spec.ranges), -(-steps // 3))].computed
        if len(computed) == steps:
            return
        plain = profile.with_facts(schedules=(), options=self.problem.options)
        method = _FinalLatent(PlanConfig(profile=plain, schedule=computed))
        with installed_engine(caller.pipe, method):
            caller(*batch)
        self.runs += len(batch[0]) * len(computed) / steps
        with torch.no_grad():
            tables = self.tables(computed, self.problem.search.model.fit_weights(computed))
            replayed = self.final_difference(self.batches[0], computed, tables)
        assert method.latent is not None
        actual = method.latent.to(replayed) - self.batches[0].latents[-1]
        if float((actual - replayed).norm()) > _SAME_END * float(actual.norm()):
            raise ReplayError(
                "A plan does not end where it ends in the pipeline: more than the latent depends on what was held, or "
                "its scheduler is random or not linear."
            )

    @property
    def has_noise_levels(self) -> bool:
        """Whether every call gets its timestep as a floating-point tensor, which may be multiplied by a factor."""
        return all(c.timestep is not None for b in self.batches for calls in b.calls for c in calls.values())

    @property
    def modules(self) -> list[nn.Module]:
        """The transformers that were called."""
        return list(dict.fromkeys(call.module for calls in self.batches[0].calls for call in calls.values()))

    def part_sets(self, separate: bool) -> list[int]:
        """For each part its set of weights: one set for each branch, in the order of the profile, or one for all."""
        if not separate:
            return [0] * len(self.batches[0].parts)
        return [self.problem.branches.index(branch) for branch in self.branches]

    def gaps(self, computed: Sequence[int], depth: int) -> dict[int, tuple[slice, tuple[int, ...]]]:
        """By computed step, the steps held after it and their anchors."""
        found, held = {}, held_steps(computed, self.spec.ranges)
        for step, following in zip(computed, (*computed[1:], len(self.spec.noise)), strict=True):
            if step + 1 < following:
                found[step] = slice(step + 1, following), held[step + 1][-depth:]
        return found

    def tables(self, computed: Sequence[int], weights: Mapping[int, Weights]) -> dict[int, Tensor]:
        """The weights of each gap as one tensor."""
        found = {}
        for step, (gap, _) in self.gaps(computed, 1).items():
            held = [weights[t] for t in range(gap.start, gap.stop)]
            values = np.stack([np.reshape(w.values, (-1, len(w.anchors))) for w in held], axis=1)
            found[step] = torch.tensor(values, dtype=torch.float32, device=self.response.device)
        return found

    @torch.no_grad()
    def run(
        self,
        computed: Sequence[int],
        weights: Mapping[int, Weights],
        factors: Factors = UNCHANGED,
        batches: Sequence[RecordedBatch] | None = None,
    ) -> Array:
        """The mean squared error of the final latent of each generation under a plan; by default of all batches."""
        tables, batches = self.tables(computed, weights), self.batches if batches is None else batches
        errors = [self.final_errors(batch, computed, tables, factors).double().cpu().numpy() for batch in batches]
        return np.concatenate(errors)

    def final_errors(
        self, batch: RecordedBatch, computed: Sequence[int], tables: Tables, factors: Factors = UNCHANGED
    ) -> Tensor:
        """The mean squared error of the final latent of each generation in a batch."""
        return self.final_difference(batch, computed, tables, factors).flatten(1).square().mean(1)

    def final_difference(
        self, batch: RecordedBatch, computed: Sequence[int], tables: Tables, factors: Factors = UNCHANGED
    ) -> Tensor:
        """The final latents of a plan minus those of the uncached run."""
        rollout = Rollout(batch)
        for step in computed:
            self.compute(rollout, step, factors.get(step))
            if step in tables:
                self.hold(rollout, slice(step + 1, step + 1 + tables[step].shape[1]), tables[step])
        return rollout.latent_error(self.response[-1])

    def compute(self, rollout: Rollout, step: int, factor: float | Tensor | None = None) -> None:
        """Run the transformer at a computed step; outputs are the recorded ones until something differs."""
        batch = rollout.batch
        if rollout.exact and factor is None:
            parts = batch.parts[:, step]
        else:
            latent = batch.latents[step]
            if not rollout.exact:
                latent = latent + rollout.latent_error(self.response[step])
            calls = batch.calls[step]
            parts = torch.cat([calls[branch].run(latent, factor, self.recompute) for branch in self.branches])
            rollout.exact = False
            self.runs += batch.size / len(self.spec.noise) * (3 if torch.is_grad_enabled() else 1)
        rollout.computed.append(parts)
        rollout.add(parts[:, None], slice(step, step + 1))

    def hold(self, rollout: Rollout, steps: slice, table: Tensor) -> None:
        """Predict held steps from the last computed outputs."""
        outputs = torch.stack(rollout.computed[-table.shape[2] :], dim=1)  # (parts, anchors, ...)
        sets = self.part_sets(len(table) > 1)
        rollout.add(
            torch.stack([torch.tensordot(table[s], part, 1) for s, part in zip(sets, outputs, strict=True)]), steps
        )
        rollout.exact = False

    @torch.no_grad()
    def fit(
        self, computed: Sequence[int], options: PlannerOptions, batches: Sequence[RecordedBatch] | None = None
    ) -> dict[int, Weights]:
        """The weights of all held steps of a schedule, fitted along its path on some batches; by default on all."""
        separate = bool(self.problem.branches) and options.branch_tie is not None
        problem = replace(self.problem if separate else self.problem.merged, options=options)
        weights: dict[int, Weights] = {}
        if options.fitted_below < 1:
            assert problem.search is not None
            simulated = problem.search.model.fit_weights(computed)
            weights = {t: w for t, w in simulated.items() if self.spec.noise[t] > options.fitted_below}
        rollouts = [Rollout(batch) for batch in (self.batches if batches is None else batches)]
        gaps = self.gaps(computed, options.depth)
        for step in computed:
            for rollout in rollouts:
                self.compute(rollout, step)
            gap, anchors = gaps.get(step, (slice(0, 0), ()))
            for held in range(gap.start, gap.stop):
                if held not in weights:
                    weights[held] = self._fit_step(rollouts, held, anchors, options, self.part_sets(separate))
                table = np.reshape(weights[held].values, (-1, 1, len(anchors)))
                for rollout in rollouts:
                    self.hold(rollout, slice(held, held + 1), torch.tensor(table).to(self.response))
        return dict(sorted(weights.items()))

    def _fit_step(
        self, rollouts: Sequence[Rollout], step: int, anchors: Sequence[int], options: PlannerOptions, sets: list[int]
    ) -> Weights:
        """The weights of one held step, from the outputs and the errors so far."""
        row, count = self.response[step + 1], 1 + max(sets)
        shares = row / row[step] if abs(self.problem.response[step + 1, step]) > 1e-12 else torch.zeros_like(row)
        shares[: anchors[-1]] *= options.corrected_share  # errors that the model has seen
        moments = []
        for rollout in rollouts:
            batch = rollout.batch
            target = batch.outputs[step] - rollout.latent_error(shares)
            features = rollout.features(step, len(anchors), sets)
            rows = torch.cat([features, target.flatten()[None].double()])
            moments.append(rows @ rows.T)
        normal = torch.stack(moments).sum(0).cpu().numpy()
        values = solve_ridge(normal[:-1, :-1], normal[:-1, -1], count, options.branch_tie or 0.0)
        return Weights(tuple(anchors), tuple(map(float, values)))


class _FinalLatent(PlanMethod):
    """Runs a plan and keeps its final latent."""

    follows = True
    latent: Tensor | None = None

    def on_scheduler_step(self, stepped: SchedulerStep) -> None:
        super().on_scheduler_step(stepped)
        self._last = stepped

    def on_end(self) -> None:
        super().on_end()
        result = self._last.result
        self.latent = result[0] if isinstance(result, tuple) else result.prev_sample


class _CallRecorder(OutputRecorder):
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
        return RecordedBatch(calls, latents, outputs, mixed, find_mix_of_parts(mixed, outputs), images)


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
    many = len(tensors) > 1 and all(t.numel() * len(latent) == latent.numel() for t in tensors)
    try:
        return _latent_part(torch.stack(tensors) if many else tensors[0], latent).float()
    except (TypeError, ValueError):
        raise ReplayError("The outputs of its transformer are not like its latents.") from None


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
        mix = Mix(shares.expand(len(outputs), -1), kept)
        if _is_explained(mix(parts, slice(None)), outputs):
            return mix
    raise ReplayError("What its scheduler gets is no mix of the outputs of its transformer.")


def _is_explained(mixed: Tensor, outputs: Tensor) -> bool:
    return float((mixed - outputs).square().sum()) <= _UNEXPLAINED * float(outputs.square().sum())


def _like(shares: Tensor, tensor: Tensor) -> Tensor:
    """`shares` with as many dimensions as `tensor`."""
    return shares.reshape(*shares.shape, *[1] * (tensor.dim() - shares.dim()))
