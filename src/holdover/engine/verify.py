"""Replay identity: on the same input, a computed step equals the plain forward, and a held step the computed one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from ..errors import UnsupportedModelError
from ..models.inputs import iter_tensors
from ..models.trace import Stack
from .parallel import Groups, largest
from .storage import DivergedError, HeldTensors, Residuals, UnreadStream, UnreadStreamError

if TYPE_CHECKING:
    from .blocks import CallPath
    from .install import CachedTransformer
    from .state import ForwardCall


@dataclass(frozen=True)
class ReplayReport:
    """The plain forward, a computed step and a forced hold on the same inputs, compared.

    `outputs` and `streams` compare the held step with the computed one, `plain_error` the computed one with the plain
    forward. `merged` says that one residual is held per stream. `unread` names streams that nothing reads after the
    blocks, so that they are not held.
    """

    model: str
    stack: Stack | str
    merged: bool
    outputs: tuple[float, ...]
    streams: tuple[tuple[str, float], ...]
    tolerance: float
    unread: tuple[str, ...] = ()
    plain_error: float = 0.0

    @property
    def max_error(self) -> float:
        """The largest difference, relative to the largest value of that output or stream."""
        return max((self.plain_error, *self.outputs, *(error for _, error in self.streams)))

    @property
    def ok(self) -> bool:
        """Whether all three are equal up to the rounding of their dtype."""
        return self.max_error <= self.tolerance

    def __str__(self) -> str:
        verdict = "replays" if self.ok else "does not replay"
        lines = [f"{self.model} {verdict}: largest relative error {self.max_error:.1e} (allowed {self.tolerance:.0e})"]
        lines.append(f"  stack: {self.stack}{', one residual per stream' if self.merged else ''}")
        if self.unread:
            lines.append(f"  not held, because nothing reads it after the blocks: {', '.join(self.unread)}")
        if self.plain_error > 0:
            lines.append(f"  computed step, compared with the plain forward: {self.plain_error:.1e}")
        lines += [f"  output {i}: {error:.1e}" for i, error in enumerate(self.outputs)]
        lines += [f"  stream {name}: {error:.1e}" for name, error in self.streams]
        return "\n".join(lines)


def compare_replay(
    model: str,
    groups: Groups,
    computed: tuple[Any, Mapping[int, torch.Tensor]],
    held: tuple[Any, Mapping[int, torch.Tensor]],
    stack: Stack | str,
    merged: bool = False,
    plain_error: float = 0.0,
) -> ReplayReport:
    """Compare outputs and streams of a computed and a held forward; ranks that run the same blocks agree."""
    (output, streams), (held_output, held_streams) = computed, held
    before, after = list(iter_tensors(_as_plain(output))), list(iter_tensors(_as_plain(held_output)))
    names = {} if isinstance(stack, str) else stack.group_names
    errors = tuple(
        (names.get(group, str(group)), relative_error(streams[group], held_streams[group]))
        for group in streams.keys() & held_streams.keys()
    )
    # Adding a residual back rounds once: a few units in the last place, and 1e-3 where there are many digits.
    dtypes = [t.dtype for t in (*before, *streams.values()) if t.is_floating_point()]
    tolerance = max([1e-3, *(8 * torch.finfo(dtype).eps for dtype in dtypes)])
    outputs = tuple(relative_error(a, b) for a, b in zip(before, after, strict=True))
    report = ReplayReport(model, stack, merged, outputs, errors, tolerance, plain_error=plain_error)
    worst = largest(groups, report.max_error)
    if worst > report.max_error:
        report = replace(report, streams=(*report.streams, ("on another rank", worst)))
    return report


def compare_plain(transformer: CachedTransformer, call: ForwardCall, computed: Any) -> float:
    """The largest difference between the output of a computed step and that of the plain forward."""
    run = transformer.eager_call(call.plain)
    plain = call.repeat(lambda args, kwargs: run(*args, **kwargs))
    return compare_replay(transformer.class_name, transformer.groups, (plain, {}), (computed, {}), "").max_error


def verify_output(
    transformer: CachedTransformer, computed: Any, held: Any, stack: str, problem: str, plain_error: float = 0.0
) -> None:
    """Raise with a description of the problem unless a held forward gives the output of the computed one."""
    report = compare_replay(
        transformer.class_name, transformer.groups, (computed, {}), (held, {}), stack, plain_error=plain_error
    )
    if not report.ok:
        raise UnsupportedModelError(f"{report}\n{problem}", report)
    transformer.report = report


def relative_error(reference: torch.Tensor, other: torch.Tensor) -> float:
    """The largest absolute difference over the largest absolute value; equal NaNs are equal."""
    if reference.shape != other.shape:
        return float("inf")
    if not reference.numel():
        return 0.0
    a, b = reference.double(), other.double()
    same = (a == b) | (a.isnan() & b.isnan())
    difference = torch.where(same, 0.0, (a - b).abs()).nan_to_num(nan=float("inf"))
    scale = a.nan_to_num(0.0, 0.0, 0.0).abs().max().clamp_min(torch.finfo(torch.float64).tiny)
    return float(difference.max() / scale)


def equal_outputs(one: Any, other: Any) -> bool:
    """Whether two outputs are the same, bit for bit."""
    pairs = list(zip(iter_tensors([one]), iter_tensors([other]), strict=True))
    return all(a.dtype == b.dtype and relative_error(a, b) == 0.0 for a, b in pairs)


def _as_plain(output: Any) -> Any:
    return dict(output) if isinstance(output, Mapping) else output


# What a model raises for an unexpected tensor; errors of a user's hooks are of other kinds and pass through.
_MODEL_ERRORS = (NameError, LookupError, AttributeError, TypeError, ValueError, RuntimeError, AssertionError)


def verify_path(
    transformer: CachedTransformer, call: ForwardCall, path: CallPath, computed: Any, held: HeldTensors
) -> HeldTensors:
    """Compare the step that was just computed with the plain forward, and hold it: refused unless all are the same.

    Returns what is held in the form in which it replays. Merged residuals are tried first, they are fewer.
    """
    plain_error = compare_plain(transformer, call, computed[0])
    candidates = [held]
    if isinstance(held, Residuals) and len(path.stack.group_names) < len(path.stack.segments):
        candidates.insert(0, held.merge())
    for candidate in candidates:
        pass_ = path.passes.hold(path.stack, path.begin, frozenset(), {})
        pass_.load(candidate)
        with pass_.use_once() as leaving:
            output = call.repeat(functools.partial(transformer.run, pass_, transformer.eager_call(call.plain)))
            pass_.finish()
        merged = candidate is not held
        report = compare_replay(
            transformer.class_name, transformer.groups, computed, (output, leaving), path.stack, merged, plain_error
        )
        if report.ok:
            path.verified, path.merged = True, merged
            path.unread, path.lengths = _find_shortcut(transformer, call, path, candidate, output)
            path.compute_passes.clear()
            path.hold_passes.clear()
            names = path.stack.group_names
            transformer.report = replace(report, unread=tuple(names[group] for group in sorted(path.unread)))
            return candidate.without(path.unread) if isinstance(candidate, Residuals) else candidate
    raise UnsupportedModelError(
        f"{report}\nA computed or held step would differ from the plain forward, so nothing is held on this model. "
        "Register an extractor for it with holdover.register_extractor.",
        report,
    )


def _find_shortcut(
    transformer: CachedTransformer, call: ForwardCall, path: CallPath, held: HeldTensors, output: Any
) -> tuple[frozenset[int], Mapping[str, int]]:
    """What a held step may leave out: streams that nothing reads after the blocks, and the rest of a loop over blocks.

    The step is held once more with a placeholder for each such stream and with loops that end where the blocks left
    would only pass streams on. A stream that is read stays, and the output must not change by a bit. Not where a
    compiler traces the whole model, and not where ranks meet in the blocks.
    """
    nothing: tuple[frozenset[int], Mapping[str, int]] = (frozenset(), {})
    if not path.passes.skips_unread or transformer.compiled or transformer.groups.synchronized:
        return nothing
    unread = frozenset(segment.group for segment in path.stack.segments) - path.stack.main_groups
    lengths: Mapping[str, int] = path.passes.hold(path.stack, path.begin, unread, {}).find_lengths()
    while unread or lengths:
        pass_ = path.passes.hold(path.stack, path.begin, unread, lengths)
        pass_.load(held)
        found: Any = None
        try:
            with pass_.use_once():
                found = call.repeat(functools.partial(transformer.run, pass_, call.plain))
                pass_.finish()
        except UnreadStreamError as error:
            unread -= {error.group}
            continue
        except (DivergedError, *_MODEL_ERRORS):
            pass
        returned = next((t.group for t in iter_tensors([found]) if isinstance(t, UnreadStream)), None)
        if returned is not None:
            unread -= {returned}
        elif found is not None and equal_outputs(found, output):
            return unread, lengths
        elif not lengths:
            return nothing
        else:
            lengths = {}  # the model needs its whole loop
    return nothing
