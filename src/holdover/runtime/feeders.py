"""Modules that only feed the blocks, like the embedders of positions and of text: a held step does without them.

Not run, such a module returns stand-ins for its tensors. The model's own forward hands them on to blocks that do not
run either. Whoever looks into one ends the forward, so nothing is ever made of a tensor that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from torch import nn

from ..models.inputs import iter_tensors
from .outputs import mapped
from .standin import DivergedError

Forward = Callable[..., Any]
Origin = nn.Module | int  # a module that is not run, or a group of chains of which nothing is held
HANDED_ON = frozenset([torch.cat, torch.stack, torch.Tensor.unsqueeze])  # what a model may do to what it hands on
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


class TouchedError(DivergedError):
    """The forward looked into a tensor that is not there; `origins` are what it would have been made of."""

    def __init__(self, origins: frozenset[Origin]) -> None:
        super().__init__()
        self.origins = origins


class Unrun(torch.Tensor):
    """Stands for a tensor made of what modules would have returned, or streams brought; can be handed on, no more."""

    origins: frozenset[Origin]
    waiting: list[Later] | None  # where calls go that may be wanted after all

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        carried = [t for t in iter_tensors([args, kwargs]) if isinstance(t, Unrun)]
        origins = frozenset[Origin]().union(*(t.origins for t in carried))
        if func not in HANDED_ON or "out" in (kwargs or {}):
            raise TouchedError(origins)
        made = unrun(origins, next((t.waiting for t in carried if t.waiting is not None), None))
        if made.waiting is not None:
            made.waiting.append((func, args, kwargs or {}, made))
        return made

    def become(self, tensor: torch.Tensor) -> None:
        """Be that tensor from now on, for everyone who carries this one."""
        with torch._C.DisableTorchFunctionSubclass():
            _swap(self, tensor.detach())  # which wants a tensor that nobody else knows


Later = tuple[Forward, Sequence[Any], Mapping[str, Any], Any]  # a call, and what stands for its result


def unrun(origins: Iterable[Origin], waiting: list[Later] | None = None) -> Unrun:
    """A tensor that is not there."""
    made: Unrun = torch.Tensor._make_subclass(Unrun, torch.empty(0))
    made.origins, made.waiting = frozenset(origins), waiting
    return made


def _standing_for(result: Any, feeder: nn.Module, waiting: list[Later] | None = None) -> Any:
    return mapped(result, lambda _: unrun([feeder], waiting))


class Feeders:
    """Modules that may be left out of a held step, with stand-ins for what each call of them in a forward returns."""

    def __init__(self, results: Mapping[nn.Module, Sequence[Any]]) -> None:
        self._results = {module: [_standing_for(r, module) for r in calls] for module, calls in results.items()}
        self._giving = {module: _giving(self._results, module) for module in results}

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._results)

    def but(self, origins: Collection[Origin]) -> Feeders:
        """All of them but these."""
        return Feeders({module: calls for module, calls in self._results.items() if module not in origins})

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, they do not run."""
        with _replaced(self._giving):
            yield

    @cached_property
    def postponed(self) -> Postponed:
        """The same for forwards that may want them after all."""
        return Postponed(self._results)


class Postponed:
    """What feeders were called with in a forward, before it is known whether anyone wants their results."""

    def __init__(self, results: Mapping[nn.Module, Sequence[Any]]) -> None:
        self._waiting: list[Later] = []
        self._modules = {module: _Postponing(module, calls, self._waiting) for module, calls in results.items()}

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, they run when they are asked for, and from then on at once; afterwards nothing is kept."""
        try:
            with _replaced(self._modules):
                yield
        finally:
            self._waiting.clear()
            for module in self._modules.values():
                module.begin()

    def run(self) -> None:
        """Make the calls, in the order in which they came."""
        for module in self._modules.values():
            module.want()
        for forward, args, kwargs, given in self._waiting:
            for standing, tensor in zip(iter_tensors(given), iter_tensors(forward(*args, **kwargs)), strict=True):
                standing.become(tensor)  # type: ignore[attr-defined]


class _Postponing:
    """The forward of a module whose calls wait."""

    def __init__(self, module: nn.Module, results: Sequence[Any], waiting: list[Later]) -> None:
        self._module, self._waiting = module, waiting
        self._given = [_standing_for(result, module, waiting) for result in results]
        self._called, self._wanted = 0, False

    def begin(self) -> None:
        """Wait, from the next call on."""
        self._called, self._wanted = 0, False

    def want(self) -> None:
        """Run, from the next call on; what stands for the results of calls will be these results."""
        self._wanted = True
        for call in range(self._called):
            self._given[call] = _standing_for(self._given[call], self._module, self._waiting)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._wanted:
            return self._run(*args, **kwargs)
        if self._called == len(self._given):
            raise TouchedError(frozenset([self._module]))
        given = self._given[self._called]
        self._called += 1
        self._waiting.append((self._run, args, kwargs, given))
        return given

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        return type(self._module).forward(self._module, *args, **kwargs)


def candidates(transformer: nn.Module, forward: Callable[[], Any]) -> Feeders:
    """The direct children that could be feeders, by one forward: all they return is tensors, in one form."""
    seen: dict[nn.Module, list[Any]] = {child: [] for child in transformer.children() if _leaves_no_trace(child)}
    with _replaced({module: _remembering(module.forward, results) for module, results in seen.items()}):
        forward()
    return Feeders({module: results for module, results in seen.items() if _in_one_form(results)})


def _leaves_no_trace(child: nn.Module) -> bool:
    """Whether nobody but the transformer notices that a child runs: nothing is hooked to it or put over it."""
    return not any(_is_overheard(module) for module in child.modules())


def _is_overheard(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    over = ("forward", "_hf_hook", "_diffusers_hook")
    return any(hooks) or module._compiled_call_impl is not None or any(name in vars(module) for name in over)


def _in_one_form(results: Sequence[Any]) -> bool:
    """Whether calls return the same arrangement of plain tensors: a number among them could be another next time."""
    forms = {_form(result) for result in results}
    return len(forms) == 1 and "foreign" not in str(forms)


def _form(result: Any) -> str:
    if isinstance(result, (list, tuple)):
        return f"({' '.join(map(_form, result))})"
    return "tensor" if type(result) is torch.Tensor else "foreign"


def _giving(results: Mapping[nn.Module, Sequence[Any]], module: nn.Module) -> Forward:
    return lambda *args, **kwargs: results[module][0]  # nobody can tell what stands for one call from another's


def _remembering(forward: Forward, results: list[Any]) -> Forward:
    def remembering(*args: Any, **kwargs: Any) -> Any:
        results.append(forward(*args, **kwargs))
        return results[-1]

    return remembering


@contextmanager
def _replaced(forwards: Mapping[nn.Module, Forward]) -> Iterator[None]:
    """Give modules other forwards for a while; those that someone listens to by now keep their own."""
    unheard = [module for module in forwards if not _is_overheard(module)]
    for module in unheard:
        vars(module)["forward"] = forwards[module]
    try:
        yield
    finally:
        for module in unheard:
            del vars(module)["forward"]
