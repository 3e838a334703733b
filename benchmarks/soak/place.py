"""One living pipeline: brought into the state of each record, and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import peft
import torch
from torch import nn

import holdover
from tiny.pipelines import PIPELINES, run

from .plan import Record, State

_ADAPTER = "soak"
_TARGETS = ["to_q", "to_v"]


class AbortError(RuntimeError):
    """Ends a generation early, on purpose."""


class Interrupt(KeyboardInterrupt):
    """The same as Ctrl-C would, and told apart from it."""


class Place:
    """A tiny pipeline and what is on it at the moment."""

    def __init__(self, name: str) -> None:
        self._entry = PIPELINES[name]
        self.pipe = self._entry.build()
        self.state = State()
        self.counts: Counter[str] = Counter()
        self._cache: holdover.CacheBackend | None = None
        self._prompts: Any = None

    def generate(self, record: Record) -> torch.Tensor | None:
        """Run one record; None where it was aborted."""
        self.bring_to(record.state, again=record.again)
        if record.refresh and self._cache is not None:
            self._cache.refresh(self.pipe, record.steps, verbose=False)
        try:
            with self._overridden(record), self._trap(record) as extra:
                return run(self.pipe, **self._inputs(record) | extra)
        except (AbortError, Interrupt):
            self.counts["aborted"] += 1
            return None

    @property
    def held(self) -> int:
        """How many forwards of the last generation were held."""
        last = None if self._cache is None else self._cache.stats().last
        return 0 if last is None else last.held_total

    def bring_to(self, state: State, again: bool = False) -> None:
        """Load, scale or unload, enable or disable, so that the pipeline is in that state."""
        if state.lora != self.state.lora:
            self._bring_lora_to(state.lora)
        if state.prompt_cache and not self.state.prompt_cache:
            self._prompts = holdover.install_prompt_embed_cache(self.pipe, max_size=2)
        if self.state.prompt_cache and not state.prompt_cache:
            self.counts["prompts found"] += self._prompts.hits
            holdover.uninstall_prompt_embed_cache(self.pipe)
        if state.cache != self.state.cache or again:
            self._disable()
            if state.cache is not None:
                self._cache = holdover.enable(self.pipe, state.cache["method"], **state.cache["settings"])
        self.state = state

    def _disable(self) -> None:
        if self._cache is None:
            return
        stats = self._cache.stats()
        self.counts.update(computed=stats.computed, held=stats.held, disabled=1)
        self._cache.disable()
        self._cache = None

    def _bring_lora_to(self, lora: dict[str, Any] | None) -> None:
        old = self.state.lora
        for name in ("transformer", "transformer_2"):
            model = getattr(self.pipe, name, None)
            if model is None:
                continue
            same = old is not None and lora is not None and (old["seed"], old["rank"]) == (lora["seed"], lora["rank"])
            if old is not None and lora is None:
                model.unload_lora()  # the layers are as they were
            elif old is not None and not same:
                model.delete_adapters(_ADAPTER)  # the layers stay wrapped
            if lora is not None and not same:
                config = peft.LoraConfig(r=lora["rank"], target_modules=_TARGETS)
                model.add_adapter(config, _ADAPTER)
                _fill(model, lora["seed"])
            if lora is not None:
                model.set_adapters([_ADAPTER], [lora["scale"]])
        self.counts["lora changes"] += 1

    def _overridden(self, record: Record) -> AbstractContextManager[None]:
        if self._cache is None or record.override is None:
            return nullcontext()
        self.counts["overrides"] += 1
        return self._cache.using(**record.override) if record.override else self._cache.off()

    def _inputs(self, record: Record) -> dict[str, Any]:
        call = self._entry.call(steps=record.steps, seed=record.seed, guidance=record.guidance, size=record.size)
        if "prompt" in call:
            call["prompt"] = record.prompt
        return {name: _repeated(name, value, record.batch) for name, value in call.items()}

    @contextmanager
    def _trap(self, record: Record) -> Iterator[dict[str, Any]]:
        """Set the record's abort; yields the arguments it needs."""
        if record.abort is None:
            yield {}
            return
        spring = _spring(record.abort)
        if record.abort["in"] == "callback":
            yield {"callback_on_step_end": lambda pipe, step, timestep, kwargs: spring() or kwargs}
            return
        blocks = [b for child in self.pipe.transformer.children() if isinstance(child, nn.ModuleList) for b in child]
        block = blocks[int(record.abort["block"] * len(blocks))]
        handle = block.register_forward_hook(lambda *_: spring())
        try:
            yield {}
        finally:
            handle.remove()


def _spring(abort: dict[str, Any]) -> Callable[[], None]:
    """Raises at its call number `at`."""
    calls = iter(range(1 << 30))
    error = Interrupt if abort["error"] == "KeyboardInterrupt" else AbortError

    def spring() -> None:
        if next(calls) == abort["at"]:
            raise error

    return spring


def _fill(model: nn.Module, seed: int) -> None:
    """Seeded weights for an adapter, large enough to be seen."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f".{_ADAPTER}." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)


def _repeated(name: str, value: Any, batch: int) -> Any:
    """Prompts for a batch, each a little different."""
    if batch == 1 or "prompt" not in name:
        return value
    if isinstance(value, torch.Tensor):
        return torch.cat([value * (1 + i / 10) if value.is_floating_point() else value for i in range(batch)])
    return [value] * batch if isinstance(value, str) else value
