"""One transformer under the cache: its lists, its cut, the pass that is running."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..models.arguments import ForwardArguments
from ..models.cut import Cut
from ..models.extractors import extractor_of
from ..models.lists import block_lists
from ..models.registry import family_of
from .adopt import Adoptions
from .clock import NO_HINT, Hint
from .passes import Pass
from .recent import Recent
from .replay import ReplayReport
from .standin import untraced

_KINDS = 64  # sizes and flags a forward is given by the host make kinds; the oldest is traced again
Forward = Callable[["Unit", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


@dataclass
class CutChoice:
    """The cut for one kind of call, and whether the segments of a stream are held as one."""

    cut: Cut
    lumped: bool = False
    checked: bool = False


class Unit:
    """One transformer, the way the runtime sees it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.core: nn.Module = getattr(module, "_orig_mod", module)
        self.family = family_of(self.core)
        self.extractor = extractor_of(self.core)
        self.arguments = ForwardArguments(self.core, self.family.conditioning)
        self.lists = block_lists(self.core)
        self.cuts: Recent[Any, CutChoice] = Recent(_KINDS)
        self.hint: Hint = NO_HINT
        self.running: Pass | None = None
        self.report: ReplayReport | None = None
        self.notes: set[str] = set()

    @property
    def class_name(self) -> str:
        return type(self.core).__name__

    @property
    def device(self) -> torch.device | None:
        parameter = next(self.core.parameters(), None)
        return None if parameter is None else parameter.device

    def install(self, adoptions: Adoptions, forward: Forward) -> None:
        """Put the cut on the instances; `adoptions` takes it off again."""
        if self.extractor is None:
            for name, blocks in self.lists.items():
                adoptions.adopt(blocks, self._list_methods(name, type(blocks)))
        methods = {"cache_context": self._cache_context()}
        if self.module is self.core:
            methods["__call__"] = self._call(type(self.core), forward)
        else:  # a compiled wrapper is called, the module inside it is asked for its context
            adoptions.adopt(self.module, {"__call__": self._call(type(self.module), forward)})
        adoptions.adopt(self.core, methods)

    def _call(self, base: type[nn.Module], forward: Forward) -> Callable[..., Any]:
        plain: Callable[..., Any] = base.__call__

        def call(this: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return forward(self, functools.partial(plain, this), args, kwargs)

        return call

    def _cache_context(self) -> Callable[..., Any]:
        """diffusers' `cache_context`, overheard; given to models that lack it."""
        plain: Any = getattr(type(self.core), "cache_context", None)

        @contextlib.contextmanager
        def cache_context(this: nn.Module, name: str, **where: Any) -> Iterator[None]:
            outer = self.hint
            self.hint = Hint(name, where.get("step_index"), where.get("num_inference_steps"))
            try:
                with plain(this, name, **where) if plain is not None else contextlib.nullcontext():
                    yield
            finally:
                self.hint = outer

        return cache_context

    def _list_methods(self, name: str, base: type[nn.ModuleList]) -> dict[str, Callable[..., Any]]:
        iterate: Callable[[Any], Iterator[nn.Module]] = base.__iter__
        item: Callable[[Any, Any], Any] = base.__getitem__

        def iter_(this: nn.ModuleList) -> Iterator[Any]:
            running = self.running
            if running is None or not running.covers(name):
                return iterate(this)
            return iter(running.items(name, list(iterate(this))))

        def getitem(this: nn.ModuleList, index: Any) -> Any:
            if not isinstance(index, slice):
                return item(this, index)
            part = list(iter_(this))[index]
            return part if self.running is not None else nn.ModuleList(part)

        # A compiler that traces the whole model stops here and goes on inside the blocks.
        return {"__iter__": untraced(iter_), "__getitem__": untraced(getitem)}

    def run(self, pass_: Pass, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the transformer's own forward with a pass answering its block calls."""
        outer, self.running = self.running, pass_
        try:
            return plain(*args, **kwargs)
        finally:
            self.running = outer
