"""Which branch is this forward, and do its inputs still belong to the same prompt?

The branch is the name in diffusers' `cache_context`, else the guider's name for the pass, else the conditioning, else
the CFG rank.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..models.inputs import unwrap_module
from ..policies.base import Decision
from .install import NO_HINT, CachedTransformer, ContextHint, Observed

MAX_BRANCHES = 32  # that are remembered; a new one replaces the oldest
OTHER_INPUTS = Decision(True, "the inputs have another shape, dtype or device")
OTHER_CONDITIONING = Decision(True, "the conditioning changed")
OTHER_LOOP = Decision(True, "the loop of the step before has ended")
OTHER_THREAD = Decision(True, "the step before ran in another thread")


@dataclass(slots=True)
class Conditioning:
    """The conditioning tensors of one forward. Keeping them prevents their memory from being reused for others."""

    tensors: tuple[torch.Tensor, ...]
    versions: tuple[int, ...]

    @classmethod
    def keep(cls, tensors: Sequence[torch.Tensor]) -> Conditioning:
        return cls(tuple(tensors), tuple(map(_version, tensors)))

    def is_same(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these are the same tensors, or others in the same memory, and not written to since."""
        if len(tensors) != len(self.tensors):
            return False
        for mine, theirs, version in zip(self.tensors, tensors, self.versions, strict=True):
            if version != (-1 if theirs.is_inference() else theirs._version):
                return False
            if mine is not theirs and not (
                mine.data_ptr() == theirs.data_ptr()
                and mine.shape == theirs.shape
                and mine.stride() == theirs.stride()
                and mine.dtype == theirs.dtype
            ):
                return False
        return True

    def equals(self, tensors: Sequence[torch.Tensor]) -> bool:
        """Whether these have the values of the kept ones, which are known unless they were written to; a host read."""
        return (
            len(tensors) == len(self.tensors)
            and not self.is_overwritten()
            and all(
                a.shape == b.shape and a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)
                for a, b in zip(self.tensors, tensors, strict=True)
            )
        )

    def is_overwritten(self) -> bool:
        """Whether one of the kept tensors was written to."""
        return tuple(map(_version, self.tensors)) != self.versions


class Branches:
    """The branches of one transformer in one generation.

    `cfg_rank` is this process's number among the CFG ranks, and how many there are: branches get the numbers they would
    have in one process.
    """

    def __init__(self, cfg_rank: tuple[int, int] = (0, 1)) -> None:
        self._rank, self._ranks = cfg_rank
        self._known: list[tuple[str, Any, Conditioning]] = []  # label, host values, conditioning
        self._count = 0
        self.last_step: dict[str, int] = {}  # by label
        self.last_timestep: dict[str, Any] = {}  # the argument of that forward

    def find(self, step: int, conditioning: Sequence[torch.Tensor], host_values: Any) -> str:
        """The label of a branch without a name: a number for each distinct conditioning."""
        candidates = [(label, known) for label, values, known in self._known if values == host_values]
        for label, known in candidates:
            if known.is_same(conditioning):
                return label
        if conditioning:  # some pipelines build their conditioning again at each step
            for label, known in candidates:
                if known.equals(conditioning):
                    return label
        return self._only_branch(step) or self._add(conditioning, host_values)

    def _only_branch(self, step: int) -> str | None:
        """Across CFG ranks, the one branch of this rank where its conditioning is rebuilt at each step."""
        if self._ranks == 1 or len(self._known) != 1:
            return None
        label = self._known[0][0]
        return label if label in self.last_step and self.last_step[label] != step else None

    def _add(self, tensors: Sequence[torch.Tensor], host_values: Any) -> str:
        # Inference tensors have no version that would show a later write: keep their values instead.
        kept = Conditioning.keep([t.clone() if t.is_inference() else t for t in tensors])
        label = str(1 + self._rank + self._ranks * self._count)
        self._count += 1
        self._known = [*self._known[1 - MAX_BRANCHES :], (label, host_values, kept)]
        return label

    def name_repetition(self, label: str, step: int) -> str:
        """The label of a branch's second or later forward at one step: a branch of its own."""
        own, number = label, 1
        while self.last_step.get(own) == step:
            number += 1
            own = f"{label}#{number}"
        return own


class BranchInputs:
    """The inputs of one branch at its last step, to notice those of another prompt or another generation.

    An input that was the same tensor at two steps is constant: prompt embeddings, masks, positions. A constant input
    that is replaced or written to begins something new, whatever its values are. Inputs that are new at every step
    (latents, ControlNet residuals) say nothing; only where they are the conditioning are their values compared. Where
    all inputs are new, the timestep must have moved: it has not where a generation is stopped after its first step.
    """

    def __init__(self) -> None:
        self._signature: Any = None  # structure, shapes, dtypes and devices
        self._seen: list[tuple[weakref.ref[torch.Tensor], int, bool]] = []  # tensor, version, constant
        self._timestep: Any = None
        self._thread: int | None = None
        self._conditioning: Conditioning | None = None
        self._copies = False  # keep copies of a conditioning that the caller writes over

    def compare(
        self,
        signature: Any,
        tensors: Sequence[torch.Tensor],
        latents: Any,
        timestep: Any,
        must_move: bool,
        get_conditioning: Callable[[], Sequence[torch.Tensor]] | None,
    ) -> Decision | None:
        """Remember the inputs of this step; why they do not continue those of the last one, if they do not.

        The timestep `must_move` from step to step where a scheduler tells the step. `get_conditioning` is None where
        the conditioning itself identifies the branch.
        """
        other = self._signature is not None and self._signature != signature
        self._signature = signature
        if other:
            self._seen, self._timestep, self._conditioning = [], None, None
        tensors = [tensor for tensor in tensors if tensor is not latents and tensor is not timestep]
        before = self._seen if len(self._seen) == len(tensors) else []
        self._seen, changed, new = [], False, 0
        for index, tensor in enumerate(tensors):
            version = -1 if tensor.is_inference() else tensor._version
            if before and before[index][0]() is tensor and before[index][1] == version:
                self._seen.append((before[index][0], version, True))
            else:
                new += 1
                changed |= bool(before) and before[index][2]
                self._seen.append((weakref.ref(tensor), version, False))
        last, self._timestep = self._timestep, timestep
        all_new = bool(before) and new == len(tensors)
        if must_move and all_new and isinstance(timestep, torch.Tensor) and last is not timestep:
            changed = changed or (timestep.shape == last.shape and torch.equal(timestep, last))
        if new and get_conditioning is not None:
            kept, conditioning = self._conditioning, get_conditioning()
            if kept is None or not kept.is_same(conditioning):
                if kept is not None:
                    changed = changed or not kept.equals(conditioning)
                    self._copies |= kept.is_overwritten()
                self._conditioning = Conditioning.keep([t.clone() if self._copies else t for t in conditioning])
        thread, self._thread = self._thread, threading.get_ident()
        if thread not in (None, self._thread):
            return OTHER_THREAD
        if other:
            return OTHER_INPUTS
        return OTHER_CONDITIONING if changed else None


class ObservedGuider(Observed):
    """A guider of diffusers, which says what each pass of a step is.

    It splits a step's inputs into batches that bear the name of their pass, and prepares the model for each batch in
    turn: some guiders skip layers or perturb their attention in one of the passes.
    """

    end_pass: Callable[[], None]  # ends the pass that an exception left: the model is what it was before

    def make_methods(self, guider: Any) -> dict[str, Callable[..., Any]]:
        prepared: Any = None  # the model, from the start of a pass to its end
        names: Iterator[str | None] = iter(())  # of the passes of this step that were not prepared yet
        base: Any = next(cls for cls in type(guider).__mro__ if "_identifier_key" in vars(cls))
        changes_model = type(guider).prepare_models is not base.prepare_models
        plain_prepare, plain_cleanup = guider.prepare_models, guider.cleanup_models

        def observe_split(plain: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(plain)
            def split(*args: Any, **kwargs: Any) -> Any:
                nonlocal names
                batches = plain(*args, **kwargs)
                names = iter([getattr(batch, guider._identifier_key, None) for batch in batches])
                return batches

            return split

        @functools.wraps(plain_prepare)
        def prepare_models(denoiser: Any) -> Any:
            nonlocal prepared
            prepared, result = denoiser, plain_prepare(denoiser)
            name = next(names, None)
            self._announce(denoiser, NO_HINT if name is None else ContextHint(name, variant=name * changes_model))
            return result

        @functools.wraps(plain_cleanup)
        def cleanup_models(denoiser: Any) -> Any:
            nonlocal prepared
            prepared = None
            self._announce(denoiser, NO_HINT)
            return plain_cleanup(denoiser)

        def end_pass() -> None:
            if prepared is not None:
                cleanup_models(prepared)

        self.end_pass = end_pass

        splits = ("prepare_inputs", "prepare_inputs_from_block_state")
        methods = {name: observe_split(getattr(guider, name)) for name in splits}
        return {**methods, "prepare_models": prepare_models, "cleanup_models": cleanup_models}

    def _announce(self, denoiser: Any, hint: ContextHint) -> None:
        for guiders in self.living():
            guiders.announce(denoiser, hint)


def find_guiders(pipeline: Any) -> dict[str, Any]:
    """The guiders that a pipeline has at the moment, by component name; None where one is expected and missing."""
    names = getattr(pipeline, "_component_specs", None) or getattr(pipeline, "config", None) or ()
    parts = {name: getattr(pipeline, name, None) for name in names if "guider" in name}
    return {name: part if hasattr(part, "_identifier_key") else None for name, part in parts.items()}


class PipelineGuiders:
    """The guiders that a pipeline has at the moment: they name the branches of its transformers."""

    def __init__(self, pipeline: Any, transformers: Sequence[CachedTransformer]) -> None:
        self._pipeline = pipeline
        self._transformers = transformers
        self._has_guiders = bool(find_guiders(pipeline))
        self._observed: list[tuple[Any, ObservedGuider]] = []

    def watch(self) -> None:
        """Follow the guiders that the pipeline has now, and no others."""
        if self._has_guiders:
            self._keep([guider for guider in find_guiders(self._pipeline).values() if guider is not None])

    def unwatch(self) -> None:
        """Leave the guiders as they were."""
        self._keep([])

    def _keep(self, guiders: Sequence[Any]) -> None:
        known, self._observed = self._observed, []
        for guider, observed in known:
            if any(guider is other for other in guiders):
                self._observed.append((guider, observed))
            else:
                if observed.living() == [self]:
                    observed.end_pass()
                observed.leave(self)
        for guider in guiders:
            if all(guider is not other for other, _ in self._observed):
                self._observed.append((guider, ObservedGuider.observe(guider, self)))

    def start(self) -> None:
        """A generation starts: the pass in which an exception ended the last one is over."""
        for _, observed in self._observed:
            observed.end_pass()
        self.watch()
        for transformer in self._transformers:
            if transformer.context.hint.variant is not None:
                transformer.context.hint = NO_HINT

    def announce(self, denoiser: Any, hint: ContextHint) -> None:
        """The next forward of a transformer is this pass of a guider."""
        for transformer in self._transformers:
            if unwrap_module(denoiser) is transformer.core:
                transformer.context.hint = hint


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
