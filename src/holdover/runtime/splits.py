"""Context parallel, where diffusers splits the tokens at a block: the split is made before a pass sees the call.

For Wan and Qwen-Image it is a hook of the first block that gives each rank its part. Held, that block is not called,
and seen from outside it returns a part of what it was given. So for the length of a forward the hooks at the blocks are
emptied, and what they do is done to the arguments on their way to the pass.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from diffusers.hooks.context_parallel import ContextParallelSplitHook
from torch import nn

from .standin import untraced


class Splits:
    """The splits at the blocks of one transformer, for one forward."""

    def __init__(self) -> None:
        self._of_block: dict[int, list[ContextParallelSplitHook]] = {}
        self._parts: dict[tuple[int, torch.Size], tuple[torch.Tensor, torch.Tensor]] = {}

    @contextlib.contextmanager
    def taken_over(self, blocks: Iterable[nn.Module]) -> Iterator[None]:
        """Empty the hooks of these blocks until the end; a forward inside a forward finds it done."""
        if self._of_block:
            yield
            return
        plans = [(block, hook, hook.metadata) for block in blocks for hook in _hooks(block)]
        for block, hook, plan in plans:
            hook.metadata = {key: split for key, split in plan.items() if _of_output(split)}
            own = ContextParallelSplitHook(
                {key: split for key, split in plan.items() if not _of_output(split)}, hook.parallel_config
            )
            own.initialize_hook(block)
            self._of_block.setdefault(id(block), []).append(own)
        try:
            yield
        finally:
            for _, hook, plan in plans:
                hook.metadata = plan
            self._of_block.clear()
            self._parts.clear()

    def before(self, items: Iterable[Any], blocks: Sequence[nn.Module]) -> Iterable[Any]:
        """What the model's loop gets, with the split of each block before it."""
        if not self._of_block:
            return items
        items = list(items)
        hooks = [self._of_block.get(id(block)) for block in blocks[: len(items)]]
        return [item if own is None else Split(self, own, item) for item, own in zip(items, hooks, strict=True)]

    def part(self, hook: ContextParallelSplitHook, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The arguments with this rank's part of what is split; the part of one tensor is one tensor."""
        split_args, split_kwargs = hook.pre_forward(None, *args, **dict(kwargs))
        parts = tuple(self._same(*pair) for pair in zip(args, split_args, strict=True))
        return parts, {name: self._same(kwargs[name], value) for name, value in split_kwargs.items()}

    def _same(self, whole: Any, part: Any) -> Any:
        if part is whole or not isinstance(whole, torch.Tensor):
            return part
        return self._parts.setdefault((id(whole), part.shape), (whole, part))[1]


class Split:
    """Called, it splits the arguments first; otherwise it is what it stands for."""

    __slots__ = ("_hooks", "_item", "_splits")

    def __init__(self, splits: Splits, hooks: Sequence[ContextParallelSplitHook], item: Any) -> None:
        self._splits, self._hooks, self._item = splits, hooks, item

    @untraced(recursive=False)  # type: ignore[untyped-decorator]
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for hook in self._hooks:
            args, kwargs = self._splits.part(hook, args, kwargs)
        return self._item(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name in Split.__slots__:
            raise AttributeError(name)
        return getattr(self._item, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        found: type = self._item.__class__
        return found


def _hooks(block: nn.Module) -> list[ContextParallelSplitHook]:
    registry = getattr(block, "_diffusers_hook", None)
    hooks = () if registry is None else registry.hooks.values()
    return [hook for hook in hooks if isinstance(hook, ContextParallelSplitHook)]


def _of_output(split: Any) -> bool:
    splits = split if isinstance(split, (list, tuple)) else (split,)
    return all(each.split_output for each in splits)
