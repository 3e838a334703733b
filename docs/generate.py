"""Writes what the documentation takes from the code: tables of settings, models and names.

`python docs/generate.py` writes them, `--check` only says which are stale. A test does the same.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from holdover.base import CacheBackend
from holdover.config import Config, allowed_values
from holdover.models.family import Family
from holdover.models.registry import families_declared
from holdover.profiles import MagCacheProfile, MethodProfile, TeaCacheProfile, shipped
from holdover.selector import config_class
from holdover.stats import GenerationStats, Stats
from holdover.support import Support, declared, supported
from holdover.teacache.method import polynomial_of

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
NOTICE = "<!-- Written by docs/generate.py from the code: change it there. -->"

REFERENCE = {
    "holdover": "What most programs need.",
    "holdover.teacache": "TeaCache and its parts.",
    "holdover.magcache": "MagCache and its parts.",
    "holdover.cache_dit_backend": "The methods of the cache-dit library, and adapters for models.",
    "holdover.plan": "The planned cache.",
    "holdover.compare": "Methods beside uncached pictures and beside fewer steps.",
    "holdover.metrics": "How far two pictures are apart.",
    "holdover.report": "A comparison as one HTML file.",
    "holdover.profiles": "Measured constants of models: find, load and save them.",
}
WITHOUT_DOCSTRING = {
    "__version__": "The version, as text.",
    "Method": "The names of the methods that keep profiles.",
    "METRICS": "Every metric by name: its title, its unit, and which end is the good one.",
    "PSNR_CAP": "The most a PSNR counts for beside smaller ones, in decibels.",
    "Candidate": "A `MethodCandidate`, `FewerSteps` or `Custom`.",
    "CUSTOM_DIT_ENABLERS": "From the name of a pipeline's or transformer's class to the function that enables it.",
    "RefreshCacheContextFunc": "A function `(pipeline, num_inference_steps, verbose)` that begins a generation.",
    "logger": "Where the backend says what it put on a pipeline.",
}


def main(arguments: Sequence[str]) -> int:
    """Write the pages, or with `--check` only look."""
    stale = [path for path, text in pages().items() if not path.exists() or path.read_text("utf-8") != text]
    for path in stale:
        sys.stdout.write(f"{'stale' if '--check' in arguments else 'written'}: {path.relative_to(ROOT)}\n")
        if "--check" not in arguments:
            path.write_text(pages()[path], encoding="utf-8")
    return 1 if stale and "--check" in arguments else 0


def pages() -> dict[Path, str]:
    """Every file with generated text in it, as it should be."""
    docs = ROOT / "docs"
    methods = {"teacache": "tea_cache", "magcache": "mag_cache", "cache-dit": "cache_dit"}
    by_method = {docs / "methods" / f"{page}.md": settings(method) for page, method in methods.items()}
    return {
        docs / "models.md": models_page(),
        docs / "reference.md": reference_page(),
        **{page: with_parts(page, settings=table) for page, table in by_method.items()},
        docs / "methods" / "plan.md": with_parts(
            docs / "methods" / "plan.md",
            settings=settings("plan"),
            quality=quality(),
            lead=lead(),
            quality_28=quality(steps=28),
            lead_28=lead(28),
            elsewhere=elsewhere(),
        ),
        docs / "scale.md": with_parts(
            docs / "scale.md", **{part: scale(part) for part in ("machine", "replicas", "cards")}
        ),
        docs / "performance.md": with_parts(
            docs / "performance.md",
            speed=speed(),
            residuals=residuals(),
            held_step=speed("clocks"),
            processor=speed("processor", "speed_cpu.json"),
            host=host(),
        ),
        ROOT / "README.md": with_parts(
            ROOT / "README.md", models=short_models(), quality=quality(SHORT), speed=speed("in_short")
        ),
    }


def with_parts(path: Path, **parts: str) -> str:
    """A page written by hand with its generated parts replaced."""
    text = path.read_text("utf-8")
    for name, part in parts.items():
        begin, end = f"<!-- generated: {name} -->", "<!-- end -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        if len(pattern.findall(text)) != 1:
            raise SystemExit(f"{path.relative_to(ROOT)} needs {begin} ... {end} exactly once.")
        text = pattern.sub(lambda _, b=begin, p=part, e=end: f"{b}\n\n{p}\n\n{e}", text)
    return text


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def code(words: Iterable[Any]) -> str:
    """Names, set as code."""
    return ", ".join(f"`{word}`" for word in words)


# Speed.


def speed(part: str = "markdown", results: str = "speed.json") -> str:
    """The tables of the speed benchmark from a result file: all of them, `in_short`, or a table of their own."""
    text: str = getattr(_benchmark("speed.table"), part)(RESULTS / results)
    return text


def residuals() -> str:
    """What it costs to hold residuals in eight bits or on the host: memory and time on FLUX, quality on the box."""
    tried = figures_of("quality")["parts"]["residuals"]["rows"]
    of_place = {row["settings"]["hold_in"]: row for row in tried if row["method"].startswith("mag_cache")}
    rows = [
        [f"`{place}`", *cells, f"{of_place[place]['psnr']['mean']:.2f}", f"{of_place[place]['psnr']['p10']:.2f}"]
        for place, cells in _benchmark("speed.table").residuals(RESULTS / "speed.json").items()
    ]
    head = ("`hold_in`", "held", "held step, GPU ms", "seconds of 50 steps", "PSNR, mean", "10th percentile")
    return table(head, rows)


def host() -> str:
    """What a step costs the host, by method."""
    measured = figures_of("host")
    rows = [("no cache", _us(measured["plain_us"]), ""), ("the model without its blocks", "", _us(measured["live_us"]))]
    rows += [(name, _us(m["computed_us"]), _us(m["held_us"])) for name, m in measured["methods"].items()]
    where = f"{measured['cpu']}, one thread, torch {measured['versions']['torch']}, {measured['date'][:10]}"
    return f"{table(('host microseconds a step', 'computed', 'held'), rows)}\n\n{where}."


def _us(value: float) -> str:
    return f"{value:,.0f}"


def scale(part: str) -> str:
    """A part of docs/scale.md from the results of several benchmarks."""
    text: str = getattr(_benchmark("scale"), part)()
    return text


@cache
def figures_of(benchmark: str) -> dict[str, Any]:
    """The result file of a benchmark, read once for all its tables."""
    figures: dict[str, Any] = json.loads((RESULTS / f"{benchmark}.json").read_text("utf-8"))
    return figures


def _benchmark(module: str) -> Any:
    """A module of the benchmarks, which lie beside the package."""
    if str(ROOT) not in sys.path:
        sys.path.append(str(ROOT))
    return importlib.import_module(f"benchmarks.{module}")


# Quality.

SHOWN = {50: (6, 8, 10, 12, 15, 20, 25), 28: (6, 8, 10, 14)}
SHORT = (
    "plan, guard off",
    "cache_dit DBCache + TaylorSeer 1",
    "diffusers TaylorSeer",
    "mag_cache",
    "tea_cache",
    "fewer steps",
)


def quality(methods: Sequence[str] = (), steps: int = 50) -> str:
    """PSNR, mean and 10th percentile, by computed steps, from the quality benchmark."""
    measured = figures_of("quality")
    cells = _kept(_benchmark("quality.verdict").rows_of(measured, steps))
    names = methods or sorted(cells, key=lambda name: (not name.startswith("plan"), name))
    rows = [(f"**{n}**" if n.startswith("plan,") else n, *(cells[n].get(k, "") for k in SHOWN[steps])) for n in names]
    made = f"{measured['environment']['device']}, {measured['date'][:10]}, {measured['scale']['prompts']} prompts"
    head = (f"computed of {steps} steps", *map(str, SHOWN[steps]))
    return f"{table(head, rows)}\n\nPSNR in dB to the uncached picture, mean / 10th percentile. {made}."


def _kept(rows: Iterable[dict[str, Any]]) -> dict[str, dict[int, str]]:
    """PSNR, mean and 10th percentile, by name and by computed steps."""
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        cells.setdefault(row["method"], {})[row["wanted"]] = f"{row['psnr']['mean']:.1f} / {row['psnr']['p10']:.1f}"
    return cells


def elsewhere() -> str:
    """The same of plans from few generations, and where a generation differs from those that were measured."""
    measured = figures_of("quality")
    shown, named = measured["scale"]["probed"], ("generations", "guidance", "other steps", "schedulers")
    cells = _kept(row for name in named for row in measured["parts"][name]["rows"])
    return table(
        ("calibrated", *(f"{count} computed" for count in shown)),
        ((name, *(kept[count] for count in shown)) for name, kept in cells.items()),
    )


def lead(steps: int = 50) -> str:
    """By how much a plan is ahead of the best other row, and how many times its steps that one needs for the same."""
    measured = figures_of("quality")
    judged = measured["verdict"][f"{steps} steps"][_benchmark("quality.verdict").PLAN]
    entries = [entry for entry in judged if entry["wanted"] in SHOWN[steps]]
    rows = [
        ("dB ahead of the best other row", *(_both(entry, lambda found: f"{found['lead']:.1f}") for entry in entries)),
        ("steps the best other needs for the same", *(_both(entry, _times) for entry in entries)),
    ]
    return table((f"computed of {steps} steps", *(str(entry["wanted"]) for entry in entries)), rows)


def _both(entry: dict[str, Any], told: Callable[[dict[str, Any]], str]) -> str:
    return " / ".join(told(entry[figure]) for figure in ("mean", "p10"))


def _times(found: dict[str, Any]) -> str:
    if found["ratio_is_at_least"]:
        return f"over {found['ratio']:.2f}x" if found["ratio"] > 1 else "more than measured"
    return f"{found['ratio']:.2f}x"


# Settings.


def settings(method: str) -> str:
    """The settings of one method."""
    config: type[Config] = config_class(method)
    rows = [
        (f"`{field.name}`", f"`{field.default!r}`", allowed_values(field), field.metadata.get("doc", ""))
        for field in config.settings()
    ]
    return table(("setting", "default", "allowed", "what it does"), rows)


# Models.


def families() -> list[Family]:
    """The shipped declarations, each once, by name."""
    found = {family.name: family for family in families_declared().values()}
    return sorted(found.values(), key=lambda family: family.name.lower())


def profiles_of(family: Family, method: Any) -> list[MethodProfile]:
    return [profile for profile in shipped(method) if profile.transformer_class in family.classes]


def signals(family: Family) -> str:
    marked = (f"`{s.name}`" + (" (timestep only)" if s.of_time is not None else "") for s in family.signals)
    return ", ".join(marked)


def short_models() -> str:
    """For the README: the families of which constants ship."""
    rows, others = [], {row.name for row in supported()}
    for family in families():
        tea, mag = profiles_of(family, "tea_cache"), profiles_of(family, "mag_cache")
        if tea or mag:
            rows.append((family.name, _count(tea, "measure coefficients"), _count(mag, "measure ratios")))
            others -= set(family.classes)
    rows.append((f"{len(others)} more classes of diffusers", "measure coefficients", "measure ratios"))
    rows.append(("a transformer of your own", "measure coefficients", "measure ratios"))
    return table(("model family", "`tea_cache`", "`mag_cache`"), rows)


def _count(profiles: Sequence[MethodProfile], otherwise: str) -> str:
    if not profiles:
        return otherwise
    return f"{len(profiles)} profile" + ("s" if len(profiles) > 1 else "")


def models_page() -> str:
    head = ("family", "classes", "signals, default first", "TeaCache", "MagCache", "declared beside the signal")
    rows = [
        (
            family.name,
            "<br>".join(f"`{name}`" for name in family.classes),
            signals(family),
            _count(profiles_of(family, "tea_cache"), ""),
            _count(profiles_of(family, "mag_cache"), ""),
            declared(family),
        )
        for family in families()
    ]
    tea, mag = shipped("tea_cache"), shipped("mag_cache")
    return f"""---
hide:
  - navigation
---

{NOTICE}

# Models

A model is found, not written: the [cut](architecture.md#the-cut) through a transformer is traced in its first forward.
What a trace cannot know is declared per family, and constants that must be measured are kept in profiles.

## Families

{len(rows)} families, {sum(len(f.classes) for f in families())} classes. A class that is not in this table is traced all
the same: its signal is `input`, what enters its first block. Where a profile column is empty, nothing ships and the
constants are measured with your pipeline: [coefficients](methods/teacache.md#measuring-coefficients) for TeaCache,
[ratios](methods/magcache.md#calibration) for MagCache.

{table(head, rows)}

## Every transformer class of diffusers

{verdict(supported())} A segment is an unbroken stretch of a stream: more segments than streams means that the model
does something of its own between blocks, which [runs live](architecture.md#segments) on a held step. `holdover models`
prints this table, `holdover models FluxTransformer2DModel` one class.

{table(CLASS_HEAD, (class_row(row) for row in supported()))}

## TeaCache profiles

A profile is chosen by the transformer's class, then by what tells variants of a class apart; `profile="..."` chooses
it by name. *Least* is the least the [clamped polynomial](methods/teacache.md#clamping) adds in one step: a threshold at
or below it never holds, and where it is **bold** that is so at the default of 0.2. *Thresholds* are those its source
advises; they have not been measured again here.

{table(TEA_HEAD, (tea_row(p) for p in tea))}

## MagCache profiles

*Advised* are the settings of its source: threshold, steps held in a row, retention. They are not applied by themselves.

{table(MAG_HEAD, (mag_row(p) for p in mag))}

## Notes on profiles

What the sources say or leave out, as it was noted when the numbers were taken over.

{notes((*tea, *mag))}
"""


CLASS_HEAD = ("class", "lists of blocks", "streams", "segments", "side outputs", "left out", "cache-dit")
TEA_HEAD = ("profile", "model", "chosen when", "signal", "computed at the start", "least", "thresholds", "source")
MAG_HEAD = ("profile", "model", "chosen when", "steps", "branches", "never held", "advised", "source")


def class_row(row: Support) -> Sequence[str]:
    lists = row.cut.split(";")[0]
    cached = row.cache_dit or row.cache_dit_refusal.replace(f" {row.name}", "")
    counts = str(len(row.streams)), str(row.segments), str(row.sides or "")
    return f"`{row.name}`", lists, *counts, ", ".join(row.left_out), cached


def verdict(rows: Sequence[Support]) -> str:
    """How many classes replay, and with which diffusers."""
    versions = {row.verified for row in rows if row.verified}
    replay, lean = sum(bool(row.verified) for row in rows), sum(bool(row.left_out) for row in rows)
    cached = sum(bool(row.cache_dit) for row in rows)
    return (
        f"Each was built as a tiny model with random weights. With diffusers {', '.join(sorted(versions))} a held step "
        f"replays a computed one in {replay} of {len(rows)}. In {lean} it leaves out modules that only feed blocks; no "
        f"bit changes by that. Under cache-dit {cached} replay; the others are refused, with the reason in the last "
        "column."
    )


def tea_row(profile: TeaCacheProfile) -> Sequence[str]:
    least = polynomial_of(profile.fit("")).minimum()
    shown = f"{least:.3g}"
    return (
        f"`{profile.name}`",
        profile.model,
        chosen(profile),
        f"`{profile.signal}`",
        str(profile.retained),
        f"**{shown}**" if least >= config_class("tea_cache")().rel_l1_thresh else shown,  # type: ignore[attr-defined]
        ", ".join(f"{t:g}" for t in profile.thresholds),
        source(profile),
    )


def mag_row(profile: MagCacheProfile) -> Sequence[str]:
    advised = (profile.defaults.threshold, profile.defaults.max_skip_steps, profile.defaults.retention_ratio)
    return (
        f"`{profile.name}`",
        profile.model,
        chosen(profile),
        str(profile.num_inference_steps),
        ", ".join(name or "any" for name, _ in profile.branches),
        ", ".join(map(str, profile.never_hold)),
        " / ".join("?" if value is None else f"{value:g}" for value in advised) if any(advised) else "",
        source(profile),
    )


def chosen(profile: MethodProfile) -> str:
    matches = [f"`{key}` is set" if value == "*" else f"`{key}` is `{value}`" for key, value in profile.match]
    pipelines = [f"in {code(profile.pipelines)}"] if profile.pipelines else []
    return "<br>".join([f"`{profile.transformer_class}`", *matches, *pipelines])


def source(profile: MethodProfile) -> str:
    """Where the numbers were taken from: a link to the very line where a commit is known."""
    facts = dict(profile.source)
    if "measured" in facts:
        return f"measured {facts['date']}, `{facts['recipe']}`"
    path, _, line = facts["path"].partition(":")
    if "commit" not in facts:
        return f"{facts['repo']}, `{facts['path']}`"
    address = f"https://github.com/{facts['repo']}/blob/{facts['commit']}/{path}" + (f"#L{line}" if line else "")
    return f"[{facts['repo']}]({address})"


def notes(profiles: Iterable[MethodProfile]) -> str:
    lines = []
    for profile in profiles:
        also = f" The same numbers are in {'; '.join(profile.also_in)}." if profile.also_in else ""
        lines.append(f"- `{profile.name}`: {profile.notes}{also}".replace("<=", "at most "))
    return "\n".join(lines)


# Names.


def reference_page() -> str:
    parts = [f"{NOTICE}\n\n# Reference\n\nEvery public name with one line; `help(name)` says more.\n"]
    for name, line in REFERENCE.items():
        module = importlib.import_module(name)
        rows = [(f"`{n}`", summary(getattr(module, n), n)) for n in sorted(module.__all__, key=str.lower)]
        parts.append(f"## {name}\n\n{line}\n\n{table(('name', 'what it is'), rows)}\n")
    for title, cls in (("A cache", CacheBackend), ("Its statistics", Stats), ("One generation", GenerationStats)):
        parts.append(
            f"## {title}: `{cls.__name__}`\n\n{summary(cls)}\n\n{table(('member', 'what it is'), members(cls))}\n"
        )
    parts.append(f"## Errors\n\n{inspect.getdoc(importlib.import_module('holdover.errors'))}\n")
    return "\n".join(parts)


def summary(thing: Any, name: str = "") -> str:
    """The first paragraph of a docstring, on one line."""
    own = inspect.isclass(thing) or inspect.isroutine(thing)
    text = (None if own else WITHOUT_DOCSTRING.get(name)) or inspect.getdoc(thing)
    if not text:
        raise SystemExit(f"{name or thing} has no docstring.")
    return " ".join(text.split("\n\n")[0].split())


def members(cls: type) -> list[Sequence[str]]:
    """The documented public members of a class, in the order they are written."""
    rows: list[Sequence[str]] = []
    for name, member in vars(cls).items():
        if name.startswith("_") or not (inspect.isfunction(member) or isinstance(member, property)):
            continue
        if inspect.getdoc(member):
            rows.append((f"`{name}()`" if inspect.isfunction(member) else f"`{name}`", summary(member)))
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
