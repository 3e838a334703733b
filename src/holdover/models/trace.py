"""Find a transformer's stack by tracing one forward: its block calls in order, and the streams that connect them.

A *segment* is a stretch of the stack in which a stream is passed unbroken from block to block. Its residual is the
output of its last block minus the input of its first. Whatever the model does between two blocks (ControlNet
residuals, hints) ends one segment and starts the next, so it runs live on a held step and is counted once.

Blocks are connected by tensor identity: an argument that is the same object as an earlier block's output continues that
output's stream. A trace keeps only the inputs of each list's first block and the outputs of each list's last block, so
tracing a large model costs a few activations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableError
from .inputs import ArgumentKey, get_parameter_names

TensorSpec = tuple[torch.Size, torch.dtype]

# Lists of small helper modules that are not blocks; they always run.
_HELPER_WORDS = ("proj", "embed", "norm")
# Lists that prepare text or reference tokens: a signal read at their first block would not change with the step.
_PREPARATION_WORDS = ("refiner", "text", "txt", "context", "vace", "caption")


@dataclass(frozen=True, slots=True)
class StreamLink:
    """A stream's way through one block call: in as argument `key`, out as output `slot`.

    `segment` is an index into `Stack.segments`; `closes` is True at the segment's last block.
    """

    slot: int
    key: ArgumentKey
    segment: int
    closes: bool


@dataclass(frozen=True, slots=True)
class BlockCall:
    """One call of block `index` of the list `blocks`.

    `width` is the length of the returned tuple, or 0 for a bare tensor. `side_outputs` are the slots of outputs that
    no later block continues; a held step returns a copy of their last values.
    """

    blocks: str
    index: int
    width: int
    links: tuple[StreamLink, ...]
    side_outputs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Segment:
    """One unbroken stretch of the stream `stream` in the list `blocks`.

    The residuals of segments with the same `group` have the same shape and may be held as one sum.
    """

    blocks: str
    stream: str
    group: int


@dataclass(frozen=True)
class Stack:
    """Every block call of one forward, in order; a method's signal is read at call number `head`."""

    calls: tuple[BlockCall, ...]
    segments: tuple[Segment, ...]
    head: int = 0

    @cached_property
    def lists(self) -> dict[str, int]:
        """The number of block calls per list."""
        return dict(Counter(call.blocks for call in self.calls))

    @property
    def side_output_count(self) -> int:
        """The number of outputs that no later block continues."""
        return sum(len(call.side_outputs) for call in self.calls)

    @cached_property
    def main_stream(self) -> str:
        """The name of the stream that carries the image tokens through the head block."""
        streams = [self.segments[link.segment].stream for link in self.calls[self.head].links]
        return "hidden_states" if "hidden_states" in streams else streams[0]

    @property
    def main_groups(self) -> frozenset[int]:
        """The groups of the main stream's segments."""
        return frozenset(segment.group for segment in self.segments if segment.stream == self.main_stream)

    @property
    def group_names(self) -> dict[int, str]:
        """A readable name per group of residuals that may be held as one sum: list and stream of its last segment."""
        return {segment.group: f"{segment.blocks}.{segment.stream}" for segment in self.segments}

    def find_main_link(self, call: BlockCall) -> StreamLink | None:
        """Return the main stream's link through a call, or None if it does not pass through."""
        return next((link for link in call.links if self.segments[link.segment].stream == self.main_stream), None)

    def __str__(self) -> str:
        lists = ", ".join(f"{name} ({count})" for name, count in self.lists.items())
        streams = ", ".join(sorted({segment.stream for segment in self.segments}))
        segments = f"{len(self.segments)} segments" if len(self.segments) != 1 else "1 segment"
        sides = f", {self.side_output_count} side outputs" if self.side_output_count else ""
        return f"{lists}; streams {streams}; {segments}{sides}"


def find_block_lists(transformer: nn.Module) -> dict[str, nn.ModuleList]:
    """Return the direct block lists by attribute name; one inside a direct ModuleDict is called `name.key`."""
    candidates: dict[str, nn.Module] = {}
    for name, child in transformer.named_children():
        inner = child.items() if isinstance(child, nn.ModuleDict) else ()
        candidates |= {f"{name}.{key}": blocks for key, blocks in inner} or {name: child}
    return {
        name: blocks
        for name, blocks in candidates.items()
        if isinstance(blocks, nn.ModuleList) and len(blocks) and not any(word in name for word in _HELPER_WORDS)
    }


@dataclass
class _TracedCall:
    """One block call: shapes and dtypes of its tensors, and the outputs that its arguments came from."""

    blocks: str
    index: int
    block_class: type
    width: int
    inputs: dict[ArgumentKey, TensorSpec]
    outputs: tuple[TensorSpec | None, ...]
    sources: dict[ArgumentKey, tuple[int, int]]  # argument -> (earlier call, slot) it came from, unmodified


@dataclass
class _TracedList:
    """What a trace keeps of one block list."""

    first_inputs: dict[ArgumentKey, torch.Tensor]
    distances: dict[tuple[int, ArgumentKey], torch.Tensor]  # mean, of the first block's outputs from its inputs
    varying: set[ArgumentKey] = field(default_factory=set)  # arguments that are not the same object in every call
    last_call: int = 0
    last_outputs: tuple[Any, ...] = ()
    last_versions: tuple[object, ...] = ()


class Trace:
    """Records the block calls of one forward."""

    def __init__(self) -> None:
        self._calls: list[_TracedCall] = []
        self._lists: dict[str, _TracedList] = {}

    def run_block(
        self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Any:
        """Run block `index` of the list `blocks`, record the call and return the block's output."""
        values: list[tuple[ArgumentKey, Any]] = [*enumerate(args), *kwargs.items()]
        inputs = {key: value for key, value in values if isinstance(value, torch.Tensor)}
        sources = {key: source for key, t in inputs.items() if (source := self._find_source(t)) is not None}
        output = block(*args, **kwargs)
        outputs, width = _as_tuple(output, block)
        traced = self._lists.get(blocks)
        if traced is None:
            distances = {
                (slot, key): (output - given).abs().mean()
                for slot, output in enumerate(outputs)
                for key, given in inputs.items()
                if isinstance(output, torch.Tensor)
                and _get_spec(output) == _get_spec(given)
                and output.is_floating_point()
            }
            traced = self._lists[blocks] = _TracedList(inputs, distances)
        else:
            traced.varying |= {key for key, t in inputs.items() if t is not traced.first_inputs.get(key)}
        traced.last_call, traced.last_outputs = len(self._calls), outputs
        traced.last_versions = tuple(get_version(t) for t in outputs)
        specs = tuple(_get_spec(t) if isinstance(t, torch.Tensor) else None for t in outputs)
        input_specs = {key: _get_spec(t) for key, t in inputs.items()}
        self._calls.append(_TracedCall(blocks, index, type(block), width, input_specs, specs, sources))
        return output

    def _find_source(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return the earlier call and slot that returned this tensor object, unless it was written to since."""
        for traced in self._lists.values():
            for slot, output in enumerate(traced.last_outputs):
                if output is tensor:
                    unmodified = get_version(tensor) == traced.last_versions[slot]
                    return (traced.last_call, slot) if unmodified else None
        return None

    def build_stack(self, head: str | None = None) -> Stack:
        """Return the stack these calls make.

        `head` is the list at whose first block a signal is read; by default the first list that prepares nothing.
        """
        streams = {name: self._find_streams(name, traced) for name, traced in self._lists.items()}
        if not any(streams.values()):
            raise UntraceableError("No list of blocks passes a stream from block to block in this forward.")
        segments: list[Segment] = []
        last_calls: list[int] = []  # per segment
        open_ends: dict[tuple[int, int], int] = {}  # (call, slot) -> the segment that has come this far
        groups: dict[tuple[str, int, TensorSpec | None], int] = {}
        routes: dict[int, list[tuple[int, ArgumentKey, int]]] = {}  # call -> (slot, argument, segment) of each stream
        for number, call in enumerate(self._calls):
            if not streams[call.blocks]:
                continue
            routes[number] = []
            for slot, key in sorted(streams[call.blocks].items()):
                if slot >= len(call.outputs) or call.outputs[slot] is None or key not in call.inputs:
                    continue
                segment = open_ends.pop(call.sources[key], None) if key in call.sources else None
                if segment is None:
                    segment = len(segments)
                    group = groups.setdefault((call.blocks, slot, call.outputs[slot]), len(groups))
                    names = get_parameter_names(call.block_class)
                    name = key if isinstance(key, str) else names[key] if key < len(names) else f"arg{key}"
                    segments.append(Segment(call.blocks, name, group))
                    last_calls.append(number)
                open_ends[number, slot] = segment
                last_calls[segment] = number
                routes[number].append((slot, key, segment))
        calls = []
        for number, passed in routes.items():
            call = self._calls[number]
            links = tuple(StreamLink(slot, key, s, closes=last_calls[s] == number) for slot, key, s in passed)
            linked = {link.slot for link in links}
            sides = tuple(s for s, spec in enumerate(call.outputs) if spec is not None and s not in linked)
            calls.append(BlockCall(call.blocks, call.index, call.width, links, sides))
        lists = [call.blocks for call in calls]
        if head is None:
            head = next((name for name in lists if not any(word in name for word in _PREPARATION_WORDS)), None)
        return Stack(tuple(calls), tuple(segments), lists.index(head) if head in lists else 0)

    def _find_streams(self, name: str, traced: _TracedList) -> dict[int, ArgumentKey]:
        """Return for each output slot of a list's blocks the argument whose stream it continues."""
        calls = [call for call in self._calls if call.blocks == name]
        streams: dict[int, ArgumentKey] = {}
        for call in calls:
            for key, (source, slot) in call.sources.items():
                if self._calls[source].blocks == name and key not in streams.values():
                    streams.setdefault(slot, key)
        for slot in range(max(len(call.outputs) for call in calls)):
            match = None if slot in streams else _match_by_shape(slot, calls, traced, taken=set(streams.values()))
            if match is not None:
                streams[slot] = match
        return {slot: key for slot, key in streams.items() if _preserves_shape(slot, key, calls)}


def _match_by_shape(
    slot: int, calls: Sequence[_TracedCall], traced: _TracedList, taken: set[ArgumentKey]
) -> ArgumentKey | None:
    """Return the argument a slot continues if the model modifies the stream between blocks.

    It has the same shape and is a different object in each call. Of several, it is the nearest in value, because a
    block adds little to its input.
    """
    varying = (key for key in traced.first_inputs if len(calls) == 1 or key in traced.varying)
    candidates = [key for key in varying if key not in taken and _preserves_shape(slot, key, calls)]
    if len(candidates) > 1:
        candidates.sort(key=lambda key: float(traced.distances[slot, key]))
    return candidates[0] if candidates else None


def _preserves_shape(slot: int, key: ArgumentKey, calls: Sequence[_TracedCall]) -> bool:
    returned = [call for call in calls if slot < len(call.outputs) and call.outputs[slot] is not None]
    return bool(returned) and all(call.outputs[slot] == call.inputs.get(key) for call in returned)


def _as_tuple(output: Any, block: nn.Module) -> tuple[tuple[Any, ...], int]:
    """Return a block's outputs as a tuple, and the length of the tuple it returned (0 for a bare tensor)."""
    if isinstance(output, torch.Tensor):
        return (output,), 0
    if isinstance(output, (tuple, list)) and all(t is None or isinstance(t, torch.Tensor) for t in output):
        return tuple(output), len(output)
    raise UntraceableError(
        f"{type(block).__name__} returns {type(output).__name__}; a block must return a tensor or a tuple of tensors."
    )


def _get_spec(tensor: torch.Tensor) -> TensorSpec:
    return tensor.shape, tensor.dtype


def get_version(value: Any) -> object:
    """Return a value that changes when a tensor is written to; in inference mode, which has no versions, its sum."""
    if not isinstance(value, torch.Tensor):
        return None
    return float(value.double().sum()) if value.is_inference() else value._version
