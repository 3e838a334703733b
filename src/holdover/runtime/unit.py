"""One transformer under the cache: its lists, its cut, the pass that is running."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..models.graph import Stack
from ..models.inputs import ForwardSignature, get_module_class, unwrap_module
from ..models.registry import find_extractor, get_family
from ..models.trace import find_block_lists
from .adopt import Adoptions
from .clock import NO_HINT, Hint
from .compiled import is_compiled, kept_out
from .passes import ComputePass, HoldPass, Pass, Passes
from .ranks import groups_of
from .recent import KINDS, Recent
from .replay import ReplayReport
from .residuals import Held
from .shortcut import WHOLE_WAY, Shortcut
from .splits import Splits
from .standin import BlockByBlock, untraced

_NOTHING = contextlib.nullcontext()
Forward = Callable[["Unit", Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


@dataclass
class CutChoice:
    """The cut for one kind of call, and what its replay has shown: whether the segments of a stream are held as one,
    and what a held step may leave out.
    """

    cut: Stack
    begin: int  # the call at which holding may start
    passes: Passes
    graphable: bool
    lumped: bool = False
    checked: bool = False
    shortcut: Shortcut = WHOLE_WAY
    _computing: dict[tuple[bool, Shortcut], ComputePass] = field(default_factory=dict)
    _holding: dict[Shortcut, HoldPass] = field(default_factory=dict)

    def computing(self, shortcut: Shortcut) -> ComputePass:
        """A pass that computes; it is made once where it keeps nothing from one forward to the next."""
        run = self._computing.get((self.lumped, shortcut))
        if run is None:
            run = self.passes.compute(self.cut, self.lumped, self.begin, shortcut)
            if run.traceable:
                self._computing[self.lumped, shortcut] = run
        run.start()
        return run

    def holding(self, held: Held, shortcut: Shortcut) -> HoldPass:
        """A pass that adds what is held."""
        run = self._holding.get(shortcut)
        if run is None:
            run = self.passes.hold(self.cut, held, self.begin, shortcut)
            if run.traceable:
                self._holding[shortcut] = run
        else:
            run.start()
            run.give(held)
        return run


class Unit:
    """One transformer, the way the runtime sees it."""

    def __init__(self, name: str, module: nn.Module) -> None:
        self.name = name
        self.module = module
        self.core: nn.Module = unwrap_module(module)
        self.family = get_family(self.core)
        self.extractor = find_extractor(self.core)
        self.arguments = ForwardSignature(self.core, self.family.conditioning)
        self.lists = find_block_lists(self.core)
        self.cuts: Recent[Any, CutChoice] = Recent(KINDS)
        self.hint: Hint = NO_HINT
        self.running: Pass | None = None
        self._graphed: BlockByBlock | None = None  # the running pass, where a compiler may look into it
        self._wrapped = False
        self.graphable = True  # whether the loop over the blocks only calls them
        self.groups = groups_of(module, None)
        self._splits = Splits()
        self.report: ReplayReport | None = None
        self.notes: set[str] = set()

    @property
    def class_name(self) -> str:
        return get_module_class(self.core).__name__

    @property
    def device(self) -> torch.device | None:
        parameter = next(self.core.parameters(), None)
        return None if parameter is None else parameter.device

    @property
    def compiled(self) -> bool:
        """Whether the transformer is compiled as a whole; its blocks alone do not count."""
        return self._wrapped or is_compiled(self.core) or is_compiled(self.module)

    def eagerly(self, *args: Any, **kwargs: Any) -> Any:
        """The transformer's own forward, not compiled."""
        return self.core._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    def install(self, adoptions: Adoptions, forward: Forward) -> None:
        """Put the cut on the instances; `adoptions` takes it off again."""
        if self.extractor is None:
            for name, blocks in self.lists.items():
                adoptions.adopt(blocks, self._list_methods(name, type(blocks)))
        methods = {"cache_context": self._cache_context()}
        if self.module is self.core:
            methods["__call__"] = self._call(type(self.core), forward)
        else:  # a wrapper is called, the module inside it is asked for its context
            adoptions.adopt(self.module, {"__call__": self._call(type(self.module), forward)})
        adoptions.adopt(self.core, methods)

    def _call(self, base: type[nn.Module], forward: Forward) -> Callable[..., Any]:
        def ours(plain: Callable[..., Any], wrapped: bool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            self._wrapped = wrapped
            return forward(self, plain, args, kwargs)

        return kept_out(base.__call__, ours)

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

        def stand_ins(this: nn.ModuleList) -> Iterator[Any]:
            running = self.running
            if running is None:
                return iterate(this)
            blocks = list(iterate(this))
            items = running.items(name, blocks) if running.covers(name) else blocks
            return iter(self._splits.before(items, blocks))

        around = untraced(stand_ins)

        def iter_(this: nn.ModuleList) -> Iterator[Any]:
            if self.running is None:
                return iterate(this)
            graphed = self._graphed
            if graphed is None:
                return around(this) if torch.compiler.is_compiling() else stand_ins(this)
            return iter(graphed.prepared(name)) if graphed.covers(name) else iterate(this)

        def getitem(this: nn.ModuleList, index: Any) -> Any:
            if not isinstance(index, slice):
                return item(this, index)
            part = list(iter_(this))[index]
            return part if self.running is not None else nn.ModuleList(part)

        return {"__iter__": iter_, "__getitem__": getitem}

    def run(self, pass_: Pass, plain: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run the transformer's own forward with a pass answering its block calls."""
        outer, self.running = (self.running, self._graphed), pass_
        self._graphed = self._prepared(pass_)
        try:
            with self._split():
                output = plain(*args, **kwargs)
            if self._graphed is not None:
                self._graphed.own()
            return output
        finally:
            self.running, self._graphed = outer

    def _split(self) -> contextlib.AbstractContextManager[None]:
        """The splits at the blocks taken over, where the tokens are spread over ranks."""
        if self.groups.sequence is None:
            return _NOTHING
        return self._splits.taken_over(block for blocks in self.lists.values() for block in blocks.children())

    def _prepared(self, pass_: Pass) -> BlockByBlock | None:
        """A pass a compiler may look into, with its stand-ins made; None where there is nothing to look into."""
        if not (isinstance(pass_, BlockByBlock) and pass_.traceable and self.compiled and self.graphable):
            return None
        if self.groups.sequence is not None:
            return None
        for name, blocks in self.lists.items():
            pass_.prepare(name, list(blocks.children()))
        return pass_
