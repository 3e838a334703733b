"""Modules that only feed the blocks, like the embedders of positions and of text: a held step does without them.

Not run, such a module returns stand-ins for its tensors. The model's own forward hands them on to blocks that do not
run either. Whoever looks into one ends the forward, so nothing is ever made of a tensor that is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from ..models.arguments import tensors_in
from .outputs import mapped
from .standin import DivergedError

Forward = Callable[..., Any]
_swap: Callable[[torch.Tensor, torch.Tensor], None] = torch.utils.swap_tensors


class TouchedError(DivergedError):
    """The forward looked into what a module would have returned: it does not only feed the blocks."""

    def __init__(self, feeder: nn.Module) -> None:
        super().__init__()
        self.feeder = feeder


class Unrun(torch.Tensor):
    """Stands for a tensor that a module would have returned; can be carried about, and nothing else."""

    feeder: nn.Module

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        touched = next(t for t in tensors_in([args, kwargs]) if isinstance(t, Unrun))
        raise TouchedError(touched.feeder)

    def become(self, tensor: torch.Tensor) -> None:
        """Be that tensor from now on, for everyone who carries this one."""
        with torch._C.DisableTorchFunctionSubclass():
            _swap(self, tensor.detach())  # which wants a tensor that nobody else knows


def _unrun(feeder: nn.Module) -> Unrun:
    made: Unrun = torch.Tensor._make_subclass(Unrun, torch.empty(0))
    made.feeder = feeder
    return made


def _standing_for(result: Any, feeder: nn.Module) -> Any:
    return mapped(result, lambda _: _unrun(feeder))


class Feeders:
    """Modules that may be left out of a held step, with stand-ins for what each returns."""

    def __init__(self, results: Mapping[nn.Module, Any]) -> None:
        self._results = {module: _standing_for(result, module) for module, result in results.items()}
        self._giving = {module: self._giver(module) for module in results}

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._results)

    def __contains__(self, module: nn.Module) -> bool:
        return module in self._results

    def but(self, module: nn.Module) -> Feeders:
        """All of them but one."""
        return Feeders({m: result for m, result in self._results.items() if m is not module})

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Inside, they do not run."""
        with _replaced(self._giving):
            yield

    def postponed(self) -> Postponed:
        """The same for one forward that may want them after all."""
        return Postponed(self)

    def _giver(self, module: nn.Module) -> Forward:
        return lambda *args, **kwargs: self.give(module)

    def give(self, module: nn.Module) -> Any:
        """The stand-ins for what a module returns."""
        return self._results[module]

    def become(self, module: nn.Module, result: Any) -> None:
        """Let a module's stand-ins be what it has returned; the next ones are new."""
        given = self._results[module]
        self._results[module] = _standing_for(given, module)
        for standing, tensor in zip(tensors_in(given), tensors_in(result), strict=True):
            standing.become(tensor)  # type: ignore[attr-defined]


class Postponed:
    """What feeders were called with in one forward, before it is known whether anyone wants their results."""

    def __init__(self, feeders: Feeders) -> None:
        self._feeders = feeders
        self._forwards = {module: self._postponing(module) for module in feeders}
        self._calls: dict[nn.Module, tuple[Forward, Any, Any]] = {}
        self._wanted = False

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, they run when they are asked for, and from then on at once; afterwards nothing is kept."""
        try:
            with _replaced(self._forwards):
                yield
        finally:
            self._calls, self._forwards = {}, {}

    def run(self) -> None:
        """Make the calls, in the order in which they came."""
        self._wanted = True
        for module, (forward, args, kwargs) in self._calls.items():
            self._feeders.become(module, forward(*args, **kwargs))

    def _postponing(self, module: nn.Module) -> Forward:
        forward = module.forward

        def postponing(*args: Any, **kwargs: Any) -> Any:
            if self._wanted:
                return forward(*args, **kwargs)
            if module in self._calls:  # it was seen to be called once
                raise TouchedError(module)
            self._calls[module] = (forward, args, kwargs)
            return self._feeders.give(module)

        return postponing


def candidates(transformer: nn.Module, forward: Callable[[], Any]) -> Feeders:
    """The direct children that could be feeders, by one forward: each is called once and returns tensors only."""
    seen: dict[nn.Module, list[Any]] = {child: [] for child in transformer.children() if _leaves_no_trace(child)}
    with _replaced({module: _remembering(module.forward, results) for module, results in seen.items()}):
        forward()
    once = {module: results[0] for module, results in seen.items() if len(results) == 1}
    return Feeders({module: result for module, result in once.items() if _only_tensors(result)})


def _leaves_no_trace(child: nn.Module) -> bool:
    """Whether nobody but the transformer notices that a child runs: nothing is hooked to it or put over it."""
    return not any(_is_overheard(module) for module in child.modules())


def _is_overheard(module: nn.Module) -> bool:
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    over = ("forward", "_hf_hook", "_diffusers_hook")
    return any(hooks) or module._compiled_call_impl is not None or any(name in vars(module) for name in over)


def _only_tensors(result: Any) -> bool:
    """Whether it is plain tensors through and through: a number among them could be another one next time."""
    if isinstance(result, (list, tuple)):
        return all(_only_tensors(item) for item in result)
    return type(result) is torch.Tensor


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
