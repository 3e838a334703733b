"""The supported transformers: the stack of blocks of each, what its family declares, which constants ship."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .errors import HoldoverError, did_you_mean
from .models.registry import DEFAULT_FAMILY, Family, handle_all_steps, list_families
from .profiles import shipped


@dataclass(frozen=True)
class Support:
    """How one transformer class of diffusers is supported."""

    name: str
    stack: str
    streams: tuple[str, ...]
    segments: int
    side_outputs: int
    signals: tuple[str, ...]
    coefficients: tuple[str, ...]
    ratios: tuple[str, ...]
    verified: str
    notes: str
    cache_dit: str
    cache_dit_refusal: str

    def explain(self) -> str:
        """A description in words: the stack, its streams and segments, signals and constants."""
        reason = "one for each stream: nothing changes it between the blocks"
        if self.segments > len(self.streams):
            reason = (
                "more than streams: the model changes a stream between blocks, which is computed on a held step too"
            )
        sides = f"{self.side_outputs} outputs are not passed on to later blocks; a held step repeats the last one"
        rows = [
            ("stack", self.stack),
            *(("stream", stream) for stream in self.streams),
            ("segments", f"{self.segments}, {reason}"),
            ("sides", sides if self.side_outputs else ""),
            ("TeaCache", f"signal {', '.join(self.signals)}; {_list_profiles('coefficients', self.coefficients)}"),
            ("MagCache", _list_profiles("ratios", self.ratios)),
            ("cache-dit", self.cache_dit or f"refused: {self.cache_dit_refusal}"),
            ("declared", self.notes),
            ("verified", f"a held step reproduces a computed one with diffusers {self.verified}"),
        ]
        return "\n".join([self.name, *(f"  {label:<9} {text}" for label, text in rows if text)])


def _list_profiles(what: str, names: tuple[str, ...]) -> str:
    return f"{what} of {', '.join(names)}" if names else f"no {what} ship: measure them"


@cache
def _load_table() -> Any:
    return json.loads(Path(__file__).with_name("models").joinpath("support.json").read_text())


def supported() -> tuple[Support, ...]:
    """Every tested transformer class, in alphabetical order."""
    return tuple(support_of(name) for name in sorted(_load_table()["classes"]))


def support_of(name: str) -> Support:
    """How one class is supported; the error for an unlisted class says how to check it."""
    known = _load_table()["classes"]
    if name not in known:
        raise HoldoverError(
            f"{name} is not in the table.{did_you_mean(name, known)} A class that is not listed is traced all the "
            "same: holdover.check(transformer, **inputs) shows the result."
        )
    row, family = known[name], list_families().get(name, DEFAULT_FAMILY)
    return Support(
        name=name,
        stack=row["stack"],
        streams=tuple(row["streams"]),
        segments=row.get("segments", 1),
        side_outputs=row.get("side_outputs", 0),
        signals=tuple(s.name for s in family.signals) or ("input",),
        coefficients=tuple(p.name for p in shipped("tea_cache") if p.transformer_class == name),
        ratios=tuple(p.name for p in shipped("mag_cache") if p.transformer_class == name),
        verified=_load_table()["diffusers"] if row["replays"] else "",
        notes=declared(family),
        cache_dit=row["cache_dit"].get("lists", ""),
        cache_dit_refusal=row["cache_dit"].get("refused", ""),
    )


def declared(family: Family) -> str:
    """What a family declares that tracing cannot find, in words."""
    facts = {
        f"the signal is read at {family.head}": family.head is not None,
        "passes that write the model's own cache are never held": family.must_compute is not None,
        "two experts, each with its own steps": family.range_of is not handle_all_steps,
        "the model takes 1 - t as its timestep": family.time_runs_up,
        f"branches are identified by {', '.join(family.conditioning)}": bool(family.conditioning),
        family.notes: bool(family.notes),
    }
    return "; ".join(fact for fact, holds in facts.items() if holds)
