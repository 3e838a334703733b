"""cache-dit as a method of the engine: settings and policy for each branch, and the runner of one forward.

The library decides inside the forward, while its unified blocks run. So the runner first runs the forward and then asks
the policy, which reports what the library has decided.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
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
from ..errors import ConfigError, HoldoverError, HoldoverWarning, UnsupportedModelError
from ..grid import Grid
from .adapters import AdaptedTransformer, TransformerAdapter
from .config import CacheDiTConfig, steps_mask
from .contexts import CacheDiTPolicy, StepContextManager

# The settings that a refresh function takes from its own config.
_REFRESHED = ("scm_steps_mask_policy", "scm_steps_policy", "force_refresh_step_hint", "force_refresh_step_policy")

ResidualDiffs = dict[tuple[str, str], list[float]]  # by transformer and branch, of its last generation


class CacheDiTMethod(Method[CacheDiTConfig]):
    """cache-dit with one set of settings, on transformers that were adapted with the settings `base`."""

    name = "cache_dit"

    def __init__(
        self, config: CacheDiTConfig, base: CacheDiTConfig, adapter: TransformerAdapter, diffs: ResidualDiffs
    ) -> None:
        super().__init__(config)
        self._base, self._adapter, self._diffs = base, adapter, diffs
        self._warned: set[int] = set()

    @property
    def declared_steps(self) -> int | None:
        return self.config.num_inference_steps or self._adapter.declared_steps

    def prepare(self, transformer: CachedTransformer, pipeline: Any) -> tuple[str, ...]:
        adapted = self._adapter.adapt(transformer.core, self._base.for_transformer(transformer.name), pipeline)
        adapted.contexts(self._settings_of(transformer))  # raises where they do not fit the lists
        return (f"{transformer.name}: {adapted}",)

    def make_runner(self, transformer: CachedTransformer) -> CacheDiTRunner:
        return CacheDiTRunner(transformer, self._adapter.adapted[transformer.core])

    def policy(self, transformer: CachedTransformer, branch: str, grid: Grid) -> CacheDiTPolicy:
        adapted, settings = self._adapter.adapted[transformer.core], self._settings_of(transformer)
        contexts, groups = adapted.contexts(settings), transformer.groups
        mask, first = self._mask(settings, transformer, grid), contexts[0]["cache_config"]
        refresh_step, repeat = first.force_refresh_step_hint, first.force_refresh_step_policy == "repeat"
        for context in contexts:
            config = context["cache_config"]
            config.steps_computation_mask = config.steps_computation_mask or mask
            config.num_inference_steps = config.force_refresh_step_hint = None  # the policy starts the contexts over
        diffs = self._diffs[transformer.name, branch] = []
        distance = functools.partial(change_across_ranks, groups) if groups.synchronized else None
        return CacheDiTPolicy(adapted.manager_class, contexts, grid.first, refresh_step, repeat, distance, diffs)

    def _settings_of(self, transformer: CachedTransformer) -> CacheDiTConfig:
        """The settings of one transformer: those of the last refresh function where these settings have the base's."""
        refreshed, changes = self._adapter.refreshed, {}
        if refreshed is not None:
            unchanged = (n for n in _REFRESHED if getattr(self.config, n) == getattr(self._base, n))
            changes = {name: getattr(refreshed, name) for name in unchanged}
        return self.config.replaced(**changes).for_transformer(transformer.name)

    def _mask(self, settings: CacheDiTConfig, transformer: CachedTransformer, grid: Grid) -> list[int] | None:
        """The SCM mask for the steps that this transformer runs, if there is one."""
        if settings.scm_steps_mask_policy is None:
            return None
        if not grid.bounded:
            raise ConfigError(
                "An SCM mask needs the number of steps: call refresh(transformer, steps) before the loop, or set "
                "num_inference_steps."
            )
        mask = steps_mask(settings.scm_steps_mask_policy, grid.length)
        if mask is None and grid.length not in self._warned:
            self._warned.add(grid.length)
            owner = f" that {transformer.name} handles" if grid.length < grid.count else ""
            warnings.warn(
                f"SCM has no mask for the {grid.length} steps{owner}, only for 4, 6, and 8 or more: here the residual "
                "threshold alone decides. Change the number of steps, or leave scm_steps_mask_policy out.",
                HoldoverWarning,
                stacklevel=2,
            )
        return mask


# What a model may raise that does not run through cache-dit.
MODEL_ERRORS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, AssertionError)


class CacheDiTRunner:
    """Runs the forwards of one transformer through cache-dit."""

    def __init__(self, transformer: CachedTransformer, adapted: AdaptedTransformer) -> None:
        self._transformer, self._adapted = transformer, adapted
        self._checked: RecentDict[Any, None] = RecentDict()

    def run(self, call: ForwardCall) -> Outcome:
        """Run one forward; a computed forward of a new kind is checked against the plain model."""
        manager: StepContextManager = call.state.policy_state.at(call.step)
        known = known_to_shards(self._transformer.groups, call.structure in self._checked)
        again = call if known else _copied(call)  # models may change lists in their arguments
        try:
            output = self._forward(call, manager)
        except MODEL_ERRORS as error:
            if known or isinstance(error, torch.OutOfMemoryError):
                raise
            self._plain(again)  # if this fails too, the user sees the model's own error
            raise self._refusal(call, "the model runs, but not through cache-dit", error) from error
        decision = call.decide(None)
        if not decision.compute:
            return Outcome(output, decision, None)
        if not known and manager.decisions:
            self._check(again, output, manager)
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

    @staticmethod
    def _plain(call: ForwardCall) -> Any:
        call = _copied(call)
        return call.plain(*call.args, **call.kwargs)

    def _check(self, call: ForwardCall, output: Any, manager: StepContextManager) -> None:
        """A computed step must equal the plain forward, and holding it at once must give the same output.

        An input that is all zeros hides what the model does with it between blocks: a ControlNet that begins late gives
        zeros at first. So the first comparison is made again with ones in place of zeros.
        """
        self._compare_with_plain(call, output)
        if (filled := self._fill_zeros(call)) is not None:
            contexts: Any = call.state.policy.start()  # of their own: nothing of this may be kept
            self._compare_with_plain(filled, self._forward(_copied(filled), contexts.at(call.step)))
        try:
            with manager.replay():
                report = self._compare(output, self._forward(_copied(call), manager))
        except MODEL_ERRORS as error:
            if isinstance(error, (torch.OutOfMemoryError, HoldoverError)):
                raise
            raise self._refusal(call, "a held step fails", error) from error
        if not report.ok:
            raise self._refusal(call, "a held step does not replay a computed one", report)
        self._checked[call.structure] = None
        self._transformer.report = report

    def _compare_with_plain(self, call: ForwardCall, output: Any) -> None:
        plain = self._plain(call)
        if not self._equal(plain, output):
            report = self._compare(plain, output)
            if not report.ok or self._equal(plain, self._plain(call)):
                raise self._refusal(call, "a computed step is not the plain forward", report)

    def _fill_zeros(self, call: ForwardCall) -> ForwardCall | None:
        """The call with ones in place of all-zero tensors, position ids excepted; None if it has no such tensor."""
        filled = False

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal filled
            if not tensor.is_floating_point() or not tensor.numel() or bool(tensor.any()):
                return tensor
            filled = True
            return torch.ones_like(tensor)

        names = self._transformer.inputs.names
        args = [v if "ids" in n else _map_tensors(v, fill) for n, v in zip(names, call.args, strict=False)]
        kwargs = {n: v if "ids" in n else _map_tensors(v, fill) for n, v in call.kwargs.items()}
        if largest(self._transformer.groups, float(filled)) == 0.0:
            return None
        return dataclasses.replace(call, args=[*args, *call.args[len(names) :]], kwargs=kwargs)

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


def _copied(call: ForwardCall) -> ForwardCall:
    """The same call with lists and dicts of its own, which the model may change."""
    args, kwargs = (
        _map_tensors([*call.args], lambda tensor: tensor),
        _map_tensors({**call.kwargs}, lambda tensor: tensor),
    )
    return dataclasses.replace(call, args=args, kwargs=kwargs)


def _map_tensors(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A value with every tensor in nested lists, tuples and dicts replaced; other objects stay as they are."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if type(value) is dict:
        return {key: _map_tensors(item, function) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_map_tensors(item, function) for item in value)
    return value


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
