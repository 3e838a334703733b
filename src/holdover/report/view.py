"""What the page shows, in words and ready to be put into its template."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..compare import Results, Row
from ..metrics import METRICS
from . import words
from .colours import NAMES, colours, series_of
from .embed import data_uri
from .plot import plot
from .prediction import Prediction, Trial
from .side_by_side import side_by_side

SHOWN = 8


@dataclass(frozen=True)
class Tile:
    """One picture with what stands under it."""

    source: str
    difference: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Cell:
    """One figure of the table: as it is shown, and as it is sorted."""

    text: str
    key: float

    @property
    def sort(self) -> str:
        """The key as the page's script reads it."""
        return "Infinity" if math.isinf(self.key) else repr(float(self.key))


@dataclass(frozen=True)
class Strip:
    """The steps of one branch."""

    branch: str
    letters: str

    @property
    def words(self) -> str:
        """The same for those who cannot see it."""
        return f"{self.branch}: {self.letters.count('C')} computed, {self.letters.count('h')} held, {self.letters}"


@dataclass(frozen=True)
class Line:
    """One candidate everywhere on the page."""

    label: str
    kind: str
    colour: str
    detail: str
    speed: str
    facts: tuple[str, ...]
    tiles: tuple[Tile, ...]
    strips: tuple[Strip, ...]
    cells: tuple[Cell, ...]
    error: str | None


@dataclass(frozen=True)
class Beside:
    """The predicted and the measured frontier."""

    words: str
    metric: str
    wide: str
    narrow: str
    trials: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """All of it."""

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...]
    prompts: tuple[str, ...]
    count: int
    lines: tuple[Line, ...]
    columns: tuple[tuple[str, str], ...]
    legend: tuple[tuple[str, str], ...]
    wide: str
    narrow: str
    beside: Beside | None
    unavailable: tuple[tuple[str, str], ...]
    style: str
    script: str


def view(results: Results, folder: Path, prediction: Prediction | None) -> Page:
    """Everything the template needs."""
    palette = colours(results)
    metrics = [name for name in METRICS if any(name in row.values for row in results.rows)]
    rows = (results.reference, *results.rows)
    page = files("holdover.report") / "page"
    measured = any(row.error is None for row in results.rows)
    return Page(
        title=_title(results),
        lead=_lead(results),
        facts=_facts(results),
        prompts=tuple(f"{prompt}, seed {seed}" for prompt, seed in _images(results)[:SHOWN]),
        count=len(_images(results)),
        lines=tuple(_with_expected(_line(results, row, folder, metrics, palette), row, prediction) for row in rows),
        columns=_columns(metrics),
        legend=tuple((NAMES.get(name, name), colour) for name, colour in palette.items()),
        wide=plot(results, 8.6, 4.6, "wide") if measured else "",
        narrow=plot(results, 4.3, 4.8, "narrow") if measured else "",
        beside=_beside(results, prediction) if measured and prediction is not None else None,
        unavailable=tuple((METRICS[name].title, why) for name, why in results.unavailable.items()),
        style=(page / "report.css").read_text("utf-8"),
        script=(page / "report.js").read_text("utf-8"),
    )


def _beside(results: Results, prediction: Prediction) -> Beside:
    return Beside(
        prediction.words,
        METRICS[prediction.target.metric].title,
        side_by_side(results, prediction, 11.5, 5.6, "beside-wide"),
        side_by_side(results, prediction, 4.6, 8.6, "beside-narrow"),
        tuple(_trial(trial, prediction) for trial in prediction.trials),
    )


def _trial(trial: Trial, prediction: Prediction) -> tuple[str, ...]:
    metric = prediction.target.metric
    return (
        f"{trial.computed} of {prediction.steps}",
        "" if trial.expected is None else words.figure("psnr", trial.expected),
        words.figure(metric, trial.kept),
        words.figure(metric, trial.worst),
        str(trial.pictures),
        "certified" if trial.computed == prediction.certified else "passed" if trial.passed else "did not pass",
    )


def _with_expected(line: Line, row: Row, prediction: Prediction | None) -> Line:
    """A plan that was asked for by its budget has what was expected of it among its facts."""
    budget = row.candidate.get("settings", {}).get("budget") if row.candidate.get("name") == "plan" else None
    expected = None if prediction is None or row.error is not None else prediction.at(budget)
    return line if expected is None else replace(line, facts=(*line.facts, f"{expected:.1f} dB expected"))


def _images(results: Results) -> list[tuple[str, int]]:
    settings = results.settings
    return [(prompt, seed) for prompt in settings["prompts"] for seed in settings["seeds"]]


def _title(results: Results) -> str:
    count = len(_images(results))
    pictures = "1 picture" if count == 1 else f"{count} pictures"
    return f"{pictures}, {results.settings['steps']} steps"


def _lead(results: Results) -> str:
    """The fastest and the nearest of the methods, in one sentence."""
    cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
    if not cached:
        return "No method has been measured."
    fastest = max(cached, key=results.speedup)
    nearest = max(cached, key=lambda row: row.summary("psnr").mean)
    lead = f"Fastest is {fastest.label}: {_speed_and_distance(results, fastest)}."
    return (
        lead if nearest is fastest else f"{lead} Nearest is {nearest.label}: {_speed_and_distance(results, nearest)}."
    )


def _speed_and_distance(results: Results, row: Row) -> str:
    """How fast, how near, and how near as many steps are without a cache."""
    mean = row.summary("psnr").mean
    near = "equal to uncached" if math.isinf(mean) else f"{mean:.1f} dB from uncached"
    instead = next((r for r in results.rows if r.kind == "fewer_steps" and _as_many_steps(r, row)), None)
    beside = "" if instead is None else f" ({instead.label} instead: {words.decibels(instead.summary('psnr').mean)})"
    return f"{results.speedup(row):.2f} times as fast, {near}{beside}"


def _as_many_steps(baseline: Row, row: Row) -> bool:
    return baseline.error is None and row.computed_steps is not None and baseline.steps == round(row.computed_steps)


def _facts(results: Results) -> tuple[tuple[str, str], ...]:
    """What it was measured on and with."""
    here, settings = results.environment, results.settings
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    facts = {
        "Model": f"{here['model'] or here['pipeline']} ({here['pipeline']}, {here['transformer']}, {here['dtype']})",
        "Device": here["device"],
        "Steps": str(settings["steps"]),
        "Guidance": "the pipeline's own" if settings["guidance"] is None else f"{settings['guidance']:g}",
        "Seeds": ", ".join(map(str, settings["seeds"])),
        "Batch": str(settings["batch_size"]),
        "Arguments": ", ".join(f"{key}={value}" for key, value in settings["arguments"].items()),
        "Clock": "the processor's time, on one thread" if settings["clock"] == "cpu" else "the clock on the wall",
        "Versions": f"{versions}, Python {here['python']}",
        "Date": results.date[:10],
    }
    return tuple((name, text) for name, text in facts.items() if text)


def _line(results: Results, row: Row, folder: Path, metrics: list[str], palette: dict[str, str]) -> Line:
    settings = row.candidate.get("settings", {})
    return Line(
        label=row.label,
        kind=row.kind,
        colour=palette.get(series_of(row), "ink"),
        detail=", ".join(f"{key}={value}" for key, value in settings.items()),
        speed="" if row.error is not None else f"{results.speedup(row):.2f}\u00d7",
        facts=_row_facts(row),
        tiles=tuple(_tiles(row, results, folder)),
        strips=tuple(Strip(branch, letters) for branch, letters in row.strips.items()),
        cells=() if row.error is not None else _cells(results, row, metrics),
        error=row.error,
    )


def _row_facts(row: Row) -> tuple[str, ...]:
    """Beside the pictures: time, distance, steps."""
    if row.error is not None:
        return ()
    near = () if row.kind == "reference" else (decibel_range(row),)
    steps = row.computed_steps
    counted = () if steps is None else (f"{words.steps(steps)} of {row.steps} steps computed",)
    if row.kind != "method" and row.kind != "custom":
        counted = (f"{row.steps} steps",)
    return (f"{words.seconds(row.mean_seconds)} a picture", *near, *counted)


def decibel_range(row: Row) -> str:
    """`28.0 dB, worst 23.0`."""
    psnr = row.summary("psnr")
    return "equal to uncached" if math.isinf(psnr.worst) else f"{psnr.mean:.1f} dB, worst {psnr.worst:.1f}"


def _tiles(row: Row, results: Results, folder: Path) -> list[Tile]:
    tiles = []
    for index, (prompt, _) in enumerate(_images(results)[: min(SHOWN, len(row.pictures))]):
        difference = data_uri(folder / row.differences[index]) if row.differences else ""
        cost = words.decibels(row.values["psnr"][index]) if "psnr" in row.values else ""
        caption = f"{words.seconds(row.seconds[index])}{f' · {cost}' if cost else ''}"
        alt = f"{prompt}, {row.label}{f', {cost}' if cost else ''}"
        tiles.append(Tile(data_uri(folder / row.pictures[index]), difference, caption, alt))
    return tiles


def _columns(metrics: list[str]) -> tuple[tuple[str, str], ...]:
    """The heads of the table, and what they mean."""
    columns = [
        ("computed", "computed steps of one generation, the mean over the branches"),
        ("time", "seconds for one picture"),
        ("speed", "times faster than uncached"),
        ("PSNR", "mean, dB; more is nearer"),
        ("10 %", "10th percentile of PSNR, dB"),
        ("worst", "worst PSNR, dB"),
    ]
    columns += [(METRICS[name].title, "mean") for name in metrics if name != "psnr"]
    return (*columns, ("held", "bytes of residuals held at most"))


def _cells(results: Results, row: Row, metrics: list[str]) -> tuple[Cell, ...]:
    steps = row.computed_steps
    counted = Cell("?", math.inf) if steps is None else Cell(words.steps(steps), steps)
    speed = results.speedup(row)
    cells = [counted, Cell(words.seconds(row.mean_seconds), row.mean_seconds), Cell(f"{speed:.2f}\u00d7", speed)]
    cells += _distances(row, metrics)
    return (*cells, Cell(words.size(row.bytes_held), row.bytes_held))


def _distances(row: Row, metrics: list[str]) -> list[Cell]:
    if not row.values:
        return [Cell("", math.inf) for _ in range(len(metrics) + 2)]
    psnr = row.summary("psnr")
    cells = [Cell(words.figure("psnr", value), value) for value in (psnr.mean, psnr.p10, psnr.worst)]
    others: list[Any] = [(name, row.summary(name).mean) for name in metrics if name != "psnr"]
    return cells + [Cell(words.figure(name, value), value) for name, value in others]
