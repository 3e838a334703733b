"""cache-dit as a method of the engine: settings and policy for each branch, and the runner of one forward.

The library decides inside the forward, while its unified blocks run. So the runner first runs the forward and then asks
the policy, which reports what the library has decided.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.blocks import BlockPass
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.parallel import known_to_shards, true_on_all
from ..engine.signals import change_across_ranks
from ..engine.state import ForwardCall, Outcome
from ..engine.storage import HeldTensors, RecentDict
from ..engine.verify import ReplayReport, compare_replay
from ..errors import ConfigError, UnsupportedModelError
from ..grid import Grid
from ..models.inputs import iter_tensors
from ..policies.base import Decision
from .adapters import AdaptedTransformer, TransformerAdapter
from .config import CacheDiTConfig, steps_mask
from .contexts import BranchContexts, StepContextManager


@dataclasses.dataclass(frozen=True)
class CacheDiTPolicy:
    """Creates the contexts of a branch, and reports what the library decided in the forward that has just run."""

    start: Callable[[], BranchContexts]
    needs_signal: bool = False

    def decide(self, step: int, signal: float | None, state: BranchContexts) -> Decision:
        decision = state.decision()
        if decision.compute:
            state.anchor = step
        return decision


class CacheDiTMethod(Method[CacheDiTConfig]):
    """cache-dit with one set of settings."""

    name = "cache_dit"

    def __init__(self, config: CacheDiTConfig, adapter: TransformerAdapter) -> None:
        super().__init__(config)
        self._adapter = adapter
        self._contexts: dict[CachedTransformer, list[dict[str, Any]]] = {}

    @property
    def declared_steps(self) -> int | None:
        return self.config.num_inference_steps

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        if self.declared_steps is not None:
            self.config.check_steps(self.declared_steps)
        adapted = self._adapter.adapt(transformer.core, pipeline)
        self._contexts[transformer] = adapted.contexts(self.config)
        return (f"{transformer.name}: {adapted}",)

    def make_runner(self, transformer: CachedTransformer) -> CacheDiTRunner:
        return CacheDiTRunner(transformer, self._adapter.adapt(transformer.core))

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> CacheDiTPolicy:
        settings = self.config
        start = functools.partial(
            BranchContexts,
            self._adapter.adapt(transformer.core).manager_class,
            self._masked_contexts(transformer, grid),
            first=grid.first,
            refresh_step=settings.force_refresh_step_hint,
            repeat=settings.force_refresh_step_policy == "repeat",
            distance=functools.partial(change_across_ranks, transformer.groups)
            if transformer.groups.synchronized
            else None,
        )
        return CacheDiTPolicy(start)

    def _masked_contexts(self, transformer: CachedTransformer, grid: Grid) -> list[dict[str, Any]]:
        """The settings of the contexts, with the mask for exactly the steps this transformer runs."""
        policy = self.config.scm_steps_mask_policy
        if policy is None:
            return self._contexts[transformer]
        if not grid.bounded:
            raise ConfigError(
                "An SCM mask needs the number of steps: call refresh(transformer, steps) before the loop, or set "
                "num_inference_steps."
            )
        mask = steps_mask(policy, grid.length, transformer.name if grid.length < grid.count else "")
        return [
            {**context, "cache_config": dataclasses.replace(context["cache_config"], steps_computation_mask=mask)}
            for context in self._contexts[transformer]
        ]


class CacheDiTRunner:
    """Runs the forwards of one transformer through cache-dit."""

    def __init__(self, transformer: CachedTransformer, adapted: AdaptedTransformer) -> None:
        self._transformer, self._adapted = transformer, adapted
        self._checked: RecentDict[Any, None] = RecentDict()

    def run(self, call: ForwardCall) -> Outcome:
        """Run one forward; a computed forward of a new kind is checked against the plain model."""
        contexts: BranchContexts = call.state.policy_state
        manager = contexts.at(call.step)
        known = known_to_shards(self._transformer.groups, call.structure in self._checked)
        output = self._forward(call, manager) if known else self._try_forward(call, manager)
        decision = call.decide(None)
        if not decision.compute:
            return Outcome(output, decision, None)
        if not known and manager.decisions:
            self._check(call, output, manager)
        return Outcome(output, decision, HeldContexts(manager))

    def _forward(self, call: ForwardCall, manager: StepContextManager) -> Any:
        run = UnifiedPass(self._adapted, manager)
        try:
            with self._adapted.patches.apply():
                output = self._transformer.run(run, call.plain, call.args, call.kwargs)
        finally:
            for unified in self._adapted.lists:
                unified.block.context_manager = None  # it must not outlive the generation
        missed = [unified.name for unified in self._adapted.lists if unified.name not in run.seen]
        if missed:
            raise UnsupportedModelError(
                f"This forward of {self._transformer.class_name} does not iterate over {', '.join(missed)}, so "
                "cache-dit cannot replace the list. Use tea_cache or mag_cache."
            )
        return output

    def _try_forward(self, call: ForwardCall, manager: StepContextManager) -> Any:
        """The first forward of a kind: a model that fails only under cache-dit is refused by name."""
        try:
            return self._forward(call, manager)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            call.plain(*call.args, **call.kwargs)  # if this fails too, the user sees the model's own error
            raise self._refusal(call, "the model runs, but not through cache-dit", error) from error

    def _check(self, call: ForwardCall, output: Any, manager: StepContextManager) -> None:
        """A computed step must equal the plain forward, and holding it at once must give the same output."""
        plain = call.plain(*call.args, **call.kwargs)
        if not self._equal(plain, output):
            report = self._compare(plain, output)
            if not report.ok or self._equal(plain, call.plain(*call.args, **call.kwargs)):
                raise self._refusal(call, "a computed step is not the plain forward", report)
        manager.replaying = True
        try:
            report = self._compare(output, self._forward(call, manager))
        finally:
            manager.replaying = False
        if not report.ok:
            raise self._refusal(call, "a held step does not replay a computed one", report)
        self._checked[call.structure] = None
        self._transformer.report = report

    def _compare(self, one: Any, other: Any) -> ReplayReport:
        transformer = self._transformer
        return compare_replay(transformer.class_name, transformer.groups, (one, {}), (other, {}), str(self._adapted))

    def _equal(self, one: Any, other: Any) -> bool:
        """Whether two outputs are bit-identical on all ranks; equal NaNs count as equal."""
        ours, theirs = (list(iter_tensors(dict(o) if isinstance(o, dict) else o)) for o in (one, other))
        equal = len(ours) == len(theirs) and all(
            a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
            for a, b in zip(ours, theirs, strict=True)
        )
        return true_on_all(self._transformer.groups, equal)

    def _refusal(self, call: ForwardCall, problem: str, details: object) -> UnsupportedModelError:
        """An error that names the model, the arguments that cause the problem, and an alternative."""
        arguments = self._transformer.inputs.bind(call.args, call.kwargs).items()
        control = [name for name, value in arguments if "control" in name and value is not None]
        cause = f" with {', '.join(control)}" if control else ""
        return UnsupportedModelError(
            f"cache-dit cannot cache {self._transformer.class_name}{cause}: {problem}. It runs all blocks of a list as "
            "one block, so anything the model does between blocks is lost. Use tea_cache or mag_cache, which keep it.\n"
            f"{details}",
            details if isinstance(details, ReplayReport) else None,
        )


class UnifiedPass(BlockPass):
    """Answers the transformer's loop over a list with one block: cache-dit's unified block."""

    def __init__(self, adapted: AdaptedTransformer, manager: StepContextManager) -> None:
        super().__init__()
        self._unified = {unified.name: unified for unified in adapted.lists}
        self._manager = manager
        self.lists = frozenset([*self._unified, *adapted.emptied])
        self.seen: set[str] = set()

    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise AssertionError("cache-dit's unified block calls the blocks itself.")

    def make_proxies(self, name: str, modules: list[Any], traced: bool) -> Iterable[Any]:
        """The unified block of a list; nothing for a list that another one runs."""
        return _UnifiedList(self, name) if name in self._unified else ()

    def iterate(self, name: str) -> Iterator[Any]:
        """Start the loop over a list: its unified block gets the contexts of the running branch."""
        unified = self._unified[name]
        unified.block.transformer_blocks = unified.blocks()
        unified.block.context_manager = self._manager
        self.seen.add(name)
        return iter((unified.block,))


@dataclasses.dataclass(frozen=True)
class _UnifiedList:
    """One block list while cache-dit runs it; the pass notices when the model iterates it."""

    pass_: UnifiedPass
    name: str

    def __iter__(self) -> Iterator[Any]:
        return self.pass_.iterate(self.name)


class HeldContexts(HeldTensors):
    """The tensors that cache-dit's contexts keep, for the statistics: the library itself adds and extrapolates them."""

    def __init__(self, manager: StepContextManager) -> None:
        self._manager = manager

    @property
    def main(self) -> tuple[torch.Tensor, ...]:
        return tuple(self._manager.tensors())

    @property
    def nbytes(self) -> int:
        return sum({tensor.data_ptr(): tensor.nbytes for tensor in self._manager.tensors()}.values())

    def map(self, function: Callable[[Any], Any]) -> HeldContexts:
        return self

    def weighted_sum(self, terms: Sequence[tuple[float, HeldContexts]]) -> HeldContexts:
        raise TypeError("cache-dit extrapolates what it holds itself.")
