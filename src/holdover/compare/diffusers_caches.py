"""The caches of diffusers itself as candidates, with the steps they compute counted from outside."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..runtime.backend import transformers_of
from .candidates import Custom, Strips

_QUERY = re.compile(r".*\.attn1?\.to_q(kv)?")


def diffusers_cache(label: str, config: Callable[[], Any], series: str = "") -> Custom:
    """What `transformer.enable_cache(config())` does, on every transformer of a pipeline."""

    @contextmanager
    def around(pipe: Any) -> Iterator[Callable[[], Strips] | None]:
        transformers = list(transformers_of(pipe).values())
        with ExitStack() as stack:
            for transformer in transformers:
                stack.enter_context(_enabled(transformer, config()))
            yield stack.enter_context(_counted(pipe, transformers))

    return Custom(label, around, series)


@contextmanager
def _enabled(transformer: Any, config: Any) -> Iterator[None]:
    if not hasattr(transformer, "enable_cache"):
        raise ConfigError(f"diffusers has no caches for {type(transformer).__name__}.")
    try:
        transformer.enable_cache(config)
        yield
    finally:
        transformer._cache_config = config  # so that hooks of a cache that failed half-way come off, too
        transformer.disable_cache()


@contextmanager
def _counted(pipe: Any, transformers: list[nn.Module]) -> Iterator[Callable[[], Strips] | None]:
    """A forward counts as computed where the last block's attention ran: no hook on a block can pretend that."""
    probes = [_last_query(transformer) for transformer in transformers]
    letters: list[str] = []

    def begin(*_: Any) -> None:
        letters.append("h")

    def ran(*_: Any) -> None:
        letters[-1] = "C"

    def strips() -> Strips:
        strip = "".join(letters)
        letters.clear()
        return _by_branch(strip, int(pipe.num_timesteps))

    handles = [transformer.register_forward_pre_hook(begin) for transformer in transformers]
    handles += [probe.register_forward_hook(ran) for probe in probes if probe is not None]
    try:
        yield None if None in probes else strips
    finally:
        for handle in handles:
            handle.remove()


def _last_query(transformer: nn.Module) -> nn.Module | None:
    """The layer that makes the queries of the last block."""
    found = [module for name, module in transformer.named_modules() if _QUERY.fullmatch(name)]
    return found[-1] if found else None


def _by_branch(strip: str, steps: int) -> Strips:
    """Branches that take turns at every step, apart; one strip where they do not."""
    if not steps or len(strip) % steps or len(strip) == steps:
        return {"forwards": strip}
    count = len(strip) // steps
    return {f"forward {index + 1}": strip[index::count] for index in range(count)}
