"""The supported transformers: where the blocks of each are cut, what its family declares, which constants ship."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from .errors import HoldoverError, did_you_mean
from .models.registry import Family, handle_all_steps, list_families
from .profiles import shipped


@dataclass(frozen=True)
class Support:
    """How one transformer class of diffusers is supported."""

    name: str
    cut: str
    streams: tuple[str, ...]
    segments: int
    sides: int
    left_out: tuple[str, ...]
    signals: tuple[str, ...]
    coefficients: tuple[str, ...]
    ratios: tuple[str, ...]
    verified: str
    notes: str
    cache_dit: str
    cache_dit_refusal: str

    def explain(self) -> str:
        """A description in words: where the blocks are cut and why, signals and constants."""
        lines = [self.name, f"  cut       {self.cut}"]
        lines += [f"  stream    {stream}" for stream in self.streams]
        if self.segments <= len(self.streams):
            reason = "one for each stream: nothing changes it between the blocks"
        else:
            reason = (
                "more than streams: the model changes a stream between blocks, which is computed on a held step too"
            )
        lines.append(f"  segments  {self.segments}, {reason}")
        if self.sides:
            lines.append(
                f"  sides     {self.sides} outputs are not passed on to later blocks; a held step repeats the last one"
            )
        if self.left_out:
            lines.append(f"  left out  {', '.join(self.left_out)}: they only feed blocks and do not run on a held step")
        lines.append(f"  TeaCache  signal {', '.join(self.signals)}; {_named('coefficients', self.coefficients)}")
        lines.append(f"  MagCache  {_named('ratios', self.ratios)}")
        lines.append(f"  cache-dit {self.cache_dit or f'refused: {self.cache_dit_refusal}'}")
        if self.notes:
            lines.append(f"  declared  {self.notes}")
        lines.append(f"  verified  a held step reproduces a computed one with diffusers {self.verified}")
        return "\n".join(lines)


def _named(what: str, names: tuple[str, ...]) -> str:
    return f"{what} of {', '.join(names)}" if names else f"no {what} ship: measure them"


@cache
def _measured() -> dict[str, Any]:
    text = resources.files("holdover.models").joinpath("support.json").read_text()
    table: dict[str, Any] = json.loads(text)
    return table


def supported() -> tuple[Support, ...]:
    """Every tested transformer class, in alphabetical order."""
    return tuple(_row(name) for name in sorted(_measured()["classes"]))


def support_of(name: str) -> Support:
    """How one class is supported; the error for an unlisted class says how to check it."""
    known = _measured()["classes"]
    if name in known:
        return _row(name)
    raise HoldoverError(
        f"{name} is not in the table.{did_you_mean(name, known)} A class that is not listed is traced all the same: "
        "holdover.check(transformer, **inputs) shows the result."
    )


def _row(name: str) -> Support:
    measured, family = _measured()["classes"][name], list_families().get(name)
    signals = tuple(s.name for s in family.signals) if family is not None else ()
    return Support(
        name=name,
        cut=measured["cut"],
        streams=tuple(measured["streams"]),
        segments=measured.get("segments", 1),
        sides=measured.get("sides", 0),
        left_out=tuple(measured.get("left_out", ())),
        signals=signals or ("input",),
        coefficients=tuple(p.name for p in shipped("tea_cache") if p.transformer_class == name),
        ratios=tuple(p.name for p in shipped("mag_cache") if p.transformer_class == name),
        verified=_measured()["diffusers"] if measured["replays"] else "",
        notes=declared(family) if family is not None else "",
        cache_dit=measured["cache_dit"].get("lists", ""),
        cache_dit_refusal=measured["cache_dit"].get("refused", ""),
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
