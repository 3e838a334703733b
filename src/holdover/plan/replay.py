"""Plans run on recorded generations, without the pipeline: only the transformer's computed steps cost anything.

`Replay` records uncached generations once: every call of the transformer, the latents, and what the scheduler made of
the outputs. A plan then runs on all recorded batches side by side. The latent before step i is

    x_i = (x_i of the uncached run) + sum_{k<i} R[i,k] (u_k - v_k),

with u the outputs of the plan, v those of the uncached run and R the scheduler response. It is put in the place of the
recorded one in the transformer's input; all other arguments of the call are the recorded ones.

`Replay.fit` fits the weights of each held step when it comes, on all batches at once: the last computed outputs are
regressed on the output that puts the next latent where the uncached generation has it,

    v_i - sum_{k<i} R[i+1,k] / R[i+1,i] (u_k - v_k).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor, nn

from ..engine.clock import SchedulerStep
from ..profiles import PlannerOptions, Profile
from .calls import Batch, Caller, installed_engine
from .config import PlanConfig
from .error_model import Array, Weights, held_steps, solve_ridge
from .generation import GenerationSpec, Preconditioning
from .method import PlanMethod
from .planner import PlanProblem, plan_problem
from .recorded import CallRecorder, RecordedBatch, ReplayError, like
from .recording import TrajectoryRecord

_SAME_END = 0.2  # of the error of a plan: how far the replayed plan may be from the one that the pipeline runs
_SAME_ROUNDING = 3  # and of the rounding of the latent: 0.6 to 2.2 in 30 tiny pipelines in bfloat16
Tables = Mapping[int, Tensor]  # (sets, held steps, anchors) by the computed step before a gap
Factors = Mapping[int, float | Tensor]  # of the timestep argument, by computed step
UNCHANGED: Factors = {}


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
        outputs = outputs * like(self.batch.mix.shares[step][:, None], outputs)
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
                recorder = CallRecorder(record)
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
        latent = self.batches[0].latents[-1]
        actual, rounding = method.latent.to(replayed) - latent, self.batches[0].rounding * float(latent.norm())
        if float((actual - replayed).norm()) > _SAME_END * float(actual.norm()) + _SAME_ROUNDING * rounding:
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
