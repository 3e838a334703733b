"""cache-dit as a method of the engine: settings and policy for each branch, and the runner of one forward.

The library decides inside the forward, while its unified blocks run. So the runner first runs the forward and then asks
the policy, which reports what the library has decided.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..engine.blocks import BlockPass
from ..engine.install import CachedTransformer
from ..engine.method import Method
from ..engine.parallel import known_to_shards, largest
from ..engine.signals import change_across_ranks
from ..engine.state import ForwardCall, Outcome
from ..engine.storage import HeldTensors, RecentDict
from ..engine.verify import ReplayReport, compare_replay, equal_outputs
from ..errors import ConfigError, UnsupportedModelError
from ..grid import Grid
from .adapters import AdaptedTransformer, TransformerAdapter
from .config import CacheDiTConfig, steps_mask
from .contexts import CacheDiTPolicy, StepContextManager


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
        self.config.check_steps(self.declared_steps)
        adapted = self._adapter.adapt(transformer.core, pipeline)
        self._contexts[transformer] = adapted.contexts(self.config)
        return (f"{transformer.name}: {adapted}",)

    def make_runner(self, transformer: CachedTransformer) -> CacheDiTRunner:
        return CacheDiTRunner(transformer, self._adapter.adapt(transformer.core))

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> CacheDiTPolicy:
        settings, groups, contexts = self.config, transformer.groups, self._contexts[transformer]
        if settings.scm_steps_mask_policy is not None:
            if not grid.bounded:
                raise ConfigError(
                    "An SCM mask needs the number of steps: call refresh(transformer, steps) before the loop, or set "
                    "num_inference_steps."
                )
            expert = transformer.name if grid.length < grid.count else ""
            mask = steps_mask(settings.scm_steps_mask_policy, grid.length, expert)
            configs = (dataclasses.replace(c["cache_config"], steps_computation_mask=mask) for c in contexts)
            contexts = [{**c, "cache_config": config} for c, config in zip(contexts, configs, strict=True)]
        return CacheDiTPolicy(
            self._adapter.adapt(transformer.core).manager_class,
            contexts,
            first=grid.first,
            refresh_step=settings.force_refresh_step_hint,
            repeat=settings.force_refresh_step_policy == "repeat",
            distance=functools.partial(change_across_ranks, groups) if groups.synchronized else None,
        )


class CacheDiTRunner:
    """Runs the forwards of one transformer through cache-dit."""

    def __init__(self, transformer: CachedTransformer, adapted: AdaptedTransformer) -> None:
        self._transformer, self._adapted = transformer, adapted
        self._checked: RecentDict[Any, None] = RecentDict()

    def run(self, call: ForwardCall) -> Outcome:
        """Run one forward; a computed forward of a new kind is checked against the plain model."""
        manager: StepContextManager = call.state.policy_state.at(call.step)
        known = known_to_shards(self._transformer.groups, call.structure in self._checked)
        try:
            output = self._forward(call, manager)
        except (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError) as error:
            if known or isinstance(error, torch.OutOfMemoryError):
                raise
            call.plain(*call.args, **call.kwargs)  # if this fails too, the user sees the model's own error
            raise self._refusal(call, "the model runs, but not through cache-dit", error) from error
        decision = call.decide(None)
        if not decision.compute:
            return Outcome(output, decision, None)
        if not known and manager.decisions:
            self._check(call, output, manager)
        return Outcome(output, decision, HeldContexts(manager))

    def _forward(self, call: ForwardCall, manager: StepContextManager) -> Any:
        pass_ = UnifiedPass(self._adapted, manager)
        try:
            with self._adapted.patches.apply():
                output = self._transformer.run(pass_, call.plain, call.args, call.kwargs)
        finally:
            for unified in self._adapted.lists:
                unified.block.context_manager = None  # it must not outlive the generation
        if missed := [unified.name for unified in self._adapted.lists if unified.name not in pass_.seen]:
            raise UnsupportedModelError(
                f"This forward of {self._transformer.class_name} does not iterate over {', '.join(missed)}, so "
                "cache-dit cannot replace the list. Use tea_cache or mag_cache."
            )
        return output

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
        """Whether two outputs are bit-identical on all ranks."""
        return largest(self._transformer.groups, float(not equal_outputs(one, other))) == 0.0

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

    def make_proxies(self, name: str, modules: list[Any], traced: bool) -> Iterable[Any]:
        """A proxy of the unified block; nothing for a list whose blocks another list's unified block runs."""
        unified = self._unified.get(name)
        return () if unified is None else super().make_proxies(name, [unified.block], traced)

    @torch.compiler.disable(recursive=False)  # type: ignore[untyped-decorator, no-untyped-call]
    def call(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.seen.add(blocks)
        unified = self._unified[blocks].block
        unified.transformer_blocks, unified.context_manager = self._unified[blocks].blocks(), self._manager
        return unified(*args, **kwargs)


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
