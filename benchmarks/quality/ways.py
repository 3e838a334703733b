"""Ways of drawing: each is put around the pipeline and yields what counts the computed steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import holdover
from holdover.compare.baselines import to_second_order
from holdover.profiles import Profile

Count = Callable[[], float]


@dataclass(frozen=True, eq=False)
class Way:
    """A method with its settings; `around(pipe)` yields a function: computed steps since it was last asked."""

    method: str
    around: Callable[[Any], AbstractContextManager[Count]]
    settings: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None

    @property
    def key(self) -> str:
        """The same for the same way."""
        return f"{self.method} {json.dumps(self.settings, sort_keys=True)}"


def uncached() -> Way:
    """Every step computed."""
    return Way("uncached", _whole_steps)


def cached(method: str, name: str, **settings: Any) -> Way:
    """One of holdover's methods under a title."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        with holdover.enable(pipe, name, **settings) as cache:
            yield lambda: fmean(cache.stats().generations[-1].computed.values())

    return Way(method, around, _plain(settings))


def hooked(method: str, settings: dict[str, Any], config: Callable[[], Any]) -> Way:
    """One of diffusers' own caches, by the config that it is enabled with."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        pipe.transformer.enable_cache(config())
        try:
            with counted(pipe) as count:
                yield count
        finally:
            pipe.transformer.disable_cache()

    return Way(method, around, settings)


def fewer(steps: int, order: int) -> Way:
    """No cache, only fewer steps, with a solver of first or second order."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Count]:
        own = pipe.scheduler
        pipe.scheduler = own if order == 1 else to_second_order(own)
        try:
            yield lambda: steps
        finally:
            pipe.scheduler = own

    return Way("fewer steps" if order == 1 else "fewer steps, second order", around, {"steps": steps}, steps)


@contextmanager
def counted(pipe: Any) -> Iterator[Count]:
    """Count forwards of the last block from inside it, which no hook on a block can pretend; by branch."""
    calls = 0

    def add(*_: Any) -> None:
        nonlocal calls
        calls += 1

    def count() -> float:
        nonlocal calls
        found, calls = calls, 0
        return found / (2 if pipe.do_classifier_free_guidance else 1)

    handle = pipe.transformer.single_transformer_blocks[-1].attn.to_q.register_forward_hook(add)
    try:
        yield count
    finally:
        handle.remove()


@contextmanager
def _whole_steps(pipe: Any) -> Iterator[Count]:
    yield lambda: float(pipe.num_timesteps)


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The settings as JSON; a profile is its name."""
    named = {key: value.name if isinstance(value, Profile) else value for key, value in settings.items()}
    plain: dict[str, Any] = json.loads(json.dumps({k: v for k, v in named.items() if k != "profile" or _short(v)}))
    return plain


def _short(profile: Any) -> bool:
    """Whether a profile is given by name: the path of a file says nothing."""
    return isinstance(profile, str) and not profile.endswith(".safetensors")
