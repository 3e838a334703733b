"""Find the cut by watching one forward: which block feeds which, by the identity of the tensors passed.

Nothing is kept of the forward but the inputs of each list's first block and the last output of each list, so tracing a
large model costs a few activations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..errors import UntraceableError
from .arguments import Key, parameter_names
from .cut import BlockCall, Chain, Cut, Link

Kind = tuple[torch.Size, torch.dtype]

# Stacks that prepare text or reference tokens: a signal read at their first block would not change with the step.
_PRELUDES = ("refiner", "text", "txt", "context", "vace", "caption")


@dataclass
class _Seen:
    """One block call as it was seen."""

    blocks: str
    index: int
    block_class: type
    width: int
    inputs: dict[Key, Kind]
    outputs: tuple[Kind | None, ...]
    sources: dict[Key, tuple[int, int]]  # argument -> (earlier call, slot) it came from, untouched


@dataclass
class _ListTrace:
    """What is remembered of one list while it is iterated."""

    first_inputs: dict[Key, torch.Tensor]
    distances: dict[tuple[int, Key], torch.Tensor]
    varying: set[Key] = field(default_factory=set)
    last: tuple[int, tuple[Any, ...], tuple[object, ...]] | None = None


class Trace:
    """Watches the block calls of one forward."""

    def __init__(self) -> None:
        self._seen: list[_Seen] = []
        self._lists: dict[str, _ListTrace] = {}

    def run(self, blocks: str, index: int, block: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run one block and remember how its streams are connected."""
        inputs = _tensor_arguments(args, kwargs)
        sources = {key: source for key, t in inputs.items() if (source := self._source(t)) is not None}
        output = block(*args, **kwargs)
        outputs, width = _as_tuple(output, block)
        listed = self._lists.get(blocks)
        if listed is None:
            listed = self._lists[blocks] = _ListTrace(inputs, _distances(inputs, outputs))
        else:
            listed.varying |= {k for k, t in inputs.items() if t is not listed.first_inputs.get(k)}
        marks = tuple(_mark(t) for t in outputs)
        listed.last = (len(self._seen), outputs, marks)
        kinds = tuple(_kind(t) if isinstance(t, torch.Tensor) else None for t in outputs)
        seen_inputs = {key: _kind(t) for key, t in inputs.items()}
        self._seen.append(_Seen(blocks, index, type(block), width, seen_inputs, kinds, sources))
        return output

    def _source(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """The earlier call and slot this very tensor left, unless it was written to since."""
        for listed in self._lists.values():
            call, outputs, marks = listed.last or (0, (), ())
            for slot, output in enumerate(outputs):
                if output is tensor:
                    return (call, slot) if _mark(tensor) == marks[slot] else None
        return None

    def cut(self, head: str | None = None) -> Cut:
        """The cut these calls make."""
        streams = {name: self._streams(name, listed) for name, listed in self._lists.items()}
        carried = [seen for seen in self._seen if streams[seen.blocks]]
        if not carried:
            raise UntraceableError("No list of blocks passes a stream from block to block in this forward.")
        calls, chains = _chained(carried, self._seen, streams)
        return Cut(calls, chains, _head(carried, head))

    def _streams(self, name: str, listed: _ListTrace) -> dict[int, Key]:
        """For each output slot of a list's blocks, the argument it continues."""
        calls = [seen for seen in self._seen if seen.blocks == name]
        streams = self._by_identity(name, calls)
        for slot in range(max(len(seen.outputs) for seen in calls)):
            if slot not in streams:
                key = _by_shape(slot, calls, listed, taken=set(streams.values()))
                if key is not None:
                    streams[slot] = key
        return {slot: key for slot, key in streams.items() if _preserves_shape(slot, key, calls)}

    def _by_identity(self, name: str, calls: Sequence[_Seen]) -> dict[int, Key]:
        streams: dict[int, Key] = {}
        for seen in calls:
            for key, (source, slot) in seen.sources.items():
                if self._seen[source].blocks == name and key not in streams.values():
                    streams.setdefault(slot, key)
        return streams


def _chained(
    carried: Sequence[_Seen], everything: Sequence[_Seen], streams: Mapping[str, Mapping[int, Key]]
) -> tuple[tuple[BlockCall, ...], tuple[Chain, ...]]:
    """Join the links of consecutive calls into chains."""
    number = {id(seen): i for i, seen in enumerate(everything)}
    chains: list[Chain] = []
    tails: dict[tuple[int, int], int] = {}  # (call, slot) -> the chain that ends there
    groups: dict[tuple[str, int, Kind | None], int] = {}
    drafts: list[tuple[_Seen, list[tuple[int, Key, int]]]] = []
    for seen in carried:
        links: list[tuple[int, Key, int]] = []
        for slot, key in sorted(streams[seen.blocks].items()):
            if slot >= len(seen.outputs) or seen.outputs[slot] is None or key not in seen.inputs:
                continue
            chain = tails.pop(seen.sources[key], None) if key in seen.sources else None
            if chain is None:
                chain = len(chains)
                group = groups.setdefault((seen.blocks, slot, seen.outputs[slot]), len(groups))
                chains.append(Chain(seen.blocks, _stream_name(seen, key), group))
            tails[number[id(seen)], slot] = chain
            links.append((slot, key, chain))
        drafts.append((seen, links))
    return tuple(_closed(drafts)), tuple(chains)


def _closed(drafts: Sequence[tuple[_Seen, list[tuple[int, Key, int]]]]) -> list[BlockCall]:
    """The drafted calls with the last link of each chain marked as its end."""
    last = {chain: i for i, (_, links) in enumerate(drafts) for _, _, chain in links}
    calls = []
    for i, (seen, links) in enumerate(drafts):
        finished = tuple(Link(s, k, c, closes=last[c] == i) for s, k, c in links)
        linked = {link.slot for link in finished}
        sides = tuple(s for s, kind in enumerate(seen.outputs) if kind is not None and s not in linked)
        calls.append(BlockCall(seen.blocks, seen.index, seen.width, finished, sides))
    return calls


def _head(carried: Sequence[_Seen], declared: str | None) -> int:
    """The call a signal is read at: the declared list's first, else the first that is not a prelude."""
    for i, seen in enumerate(carried):
        if seen.blocks == declared or (declared is None and not any(p in seen.blocks for p in _PRELUDES)):
            return i
    return 0


def _by_shape(slot: int, calls: Sequence[_Seen], listed: _ListTrace, taken: set[Key]) -> Key | None:
    """The argument a slot continues when the model touches the stream between blocks: same shape, another
    object each time.
    """
    candidates = [
        key
        for key in listed.first_inputs
        if key not in taken and (len(calls) == 1 or key in listed.varying) and _preserves_shape(slot, key, calls)
    ]
    if len(candidates) > 1:  # a block adds little to what it is given
        candidates.sort(key=lambda key: float(listed.distances[slot, key]))
    return candidates[0] if candidates else None


def _preserves_shape(slot: int, key: Key, calls: Sequence[_Seen]) -> bool:
    pairs = [(s.outputs[slot] if slot < len(s.outputs) else None, s.inputs.get(key)) for s in calls]
    there = [(out, given) for out, given in pairs if out is not None]
    return bool(there) and all(out == given for out, given in there)


def _distances(inputs: Mapping[Key, torch.Tensor], outputs: Sequence[Any]) -> dict[tuple[int, Key], torch.Tensor]:
    """How far each output is from each input of its shape, for the rare case that nothing else tells them apart."""
    pairs = {
        (slot, key): (output, given)
        for slot, output in enumerate(outputs)
        for key, given in inputs.items()
        if isinstance(output, torch.Tensor) and _kind(output) == _kind(given) and output.is_floating_point()
    }
    return {pair: (output - given).abs().mean() for pair, (output, given) in pairs.items()}


def _tensor_arguments(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[Key, torch.Tensor]:
    values: list[tuple[Key, Any]] = [*enumerate(args), *kwargs.items()]
    return {key: value for key, value in values if isinstance(value, torch.Tensor)}


def _as_tuple(output: Any, block: nn.Module) -> tuple[tuple[Any, ...], int]:
    if isinstance(output, torch.Tensor):
        return (output,), 0
    if isinstance(output, (tuple, list)) and all(t is None or isinstance(t, torch.Tensor) for t in output):
        return tuple(output), len(output)
    raise UntraceableError(
        f"{type(block).__name__} returns {type(output).__name__}; a block must return a tensor or a tuple of tensors."
    )


def _kind(tensor: torch.Tensor) -> Kind:
    return tensor.shape, tensor.dtype


def _mark(value: Any) -> object:
    """Changes when the tensor is written to: its version, or its sum where inference mode keeps no versions."""
    if not isinstance(value, torch.Tensor):
        return None
    return float(value.double().sum()) if value.is_inference() else value._version


def _stream_name(seen: _Seen, key: Key) -> str:
    if isinstance(key, str):
        return key
    names = parameter_names(seen.block_class)
    return names[key] if key < len(names) else f"arg{key}"
