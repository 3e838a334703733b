"""The report of a comparison as one HTML file: what the page shows, formatted for its template, and writing it."""

from __future__ import annotations

import base64
import io
import math
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from PIL import Image

from ..compare import Results, Row
from ..errors import HoldoverError
from ..metrics import METRICS
from .plots import BASELINES, assign_colors, get_series, plot_prediction, plot_speed
from .prediction import Prediction

MAX_IMAGES = 8
"""Images of a row that the page shows."""
_EMBEDDED, _UNCHANGED = 448, 160  # the largest side of an embedded image, and up to which side it is kept as it is


def write_report(
    results: Results, folder: Path | str, name: Path | str = "report.html", prediction: Prediction | None = None
) -> Path:
    """Write the report into the folder with the images of the comparison, or to an absolute `name`; return its path.

    With a `prediction`, the predicted frontier of plans is shown next to the measured one.
    """
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise HoldoverError(f"The report needs {error.name}: pip install 'holdover[report]'.") from None
    pages = Environment(
        loader=PackageLoader("holdover.report", "page"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    text = pages.get_template("report.html").render(page=build_page(results, Path(folder), prediction))
    path = Path(folder) / name
    temporary = path.with_name(path.name + ".new")
    temporary.write_text(text, "utf-8")
    temporary.replace(path)
    return path


# What the template shows.


@dataclass(frozen=True)
class Tile:
    """One image with its difference and its caption."""

    source: str
    difference: str
    caption: str
    alt: str


@dataclass(frozen=True)
class Cell:
    """One value of the table: the text, and the key it is sorted by."""

    text: str
    key: float

    @property
    def sort(self) -> str:
        """The key as a JavaScript number."""
        return "Infinity" if math.isinf(self.key) else repr(float(self.key))


@dataclass(frozen=True)
class Strip:
    """The computed and held steps of one branch."""

    branch: str
    letters: str

    @property
    def description(self) -> str:
        """The strip as text for screen readers."""
        return f"{self.branch}: {self.letters.count('C')} computed, {self.letters.count('h')} held, {self.letters}"


@dataclass(frozen=True)
class ReportRow:
    """One candidate in all sections of the page."""

    label: str
    kind: str
    color: str
    detail: str
    speed: str
    facts: tuple[str, ...]
    tiles: tuple[Tile, ...]
    strips: tuple[Strip, ...]
    cells: tuple[Cell, ...]
    error: str | None


@dataclass(frozen=True)
class PredictionSection:
    """The predicted and the measured frontier, and the table of trials."""

    words: str
    metric: str
    wide: str
    narrow: str
    trials: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Page:
    """The whole page."""

    title: str
    lead: str
    facts: tuple[tuple[str, str], ...]
    prompts: tuple[str, ...]
    count: int
    rows: tuple[ReportRow, ...]
    columns: tuple[tuple[str, str], ...]
    legend: tuple[tuple[str, str], ...]
    wide: str
    narrow: str
    prediction: PredictionSection | None
    unavailable: tuple[tuple[str, str], ...]
    style: str
    script: str


def build_page(results: Results, folder: Path, prediction: Prediction | None) -> Page:
    """Everything the template needs."""
    colors, images = assign_colors(results), _list_images(results)
    metrics = [name for name in METRICS if any(name in row.values for row in results.rows)]
    page = files("holdover.report") / "page"
    measured = any(row.error is None for row in results.rows)
    columns = [
        ("computed", "computed steps of one generation, the mean over the branches"),
        ("time", "seconds per image"),
        ("speed", "times faster than uncached"),
        ("PSNR", "mean, dB; higher is closer to uncached"),
        ("10 %", "10th percentile of PSNR, dB"),
        ("worst", "worst PSNR, dB"),
        *((METRICS[name].title, "mean") for name in metrics if name != "psnr"),
        ("held", "peak bytes of held residuals"),
    ]
    return Page(
        title=f"{len(images)} image{'' if len(images) == 1 else 's'}, {results.settings['steps']} steps",
        lead=_describe_best(results),
        facts=_describe_run(results),
        prompts=tuple(f"{prompt}, seed {seed}" for prompt, seed in images[:MAX_IMAGES]),
        count=len(images),
        rows=tuple(
            _build_row(results, row, folder, metrics, colors, prediction) for row in (results.reference, *results.rows)
        ),
        columns=tuple(columns),
        legend=tuple((BASELINES.get(name, name), color) for name, color in colors.items()),
        wide=plot_speed(results, 8.6, 4.6, "wide") if measured else "",
        narrow=plot_speed(results, 4.3, 4.8, "narrow") if measured else "",
        prediction=_build_prediction(results, prediction) if measured and prediction is not None else None,
        unavailable=tuple((METRICS[name].title, why) for name, why in results.unavailable.items()),
        style=(page / "report.css").read_text("utf-8"),
        script=(page / "report.js").read_text("utf-8"),
    )


def _list_images(results: Results) -> list[tuple[str, int]]:
    settings = results.settings
    return [(prompt, seed) for prompt in settings["prompts"] for seed in settings["seeds"]]


def _build_prediction(results: Results, prediction: Prediction) -> PredictionSection:
    metric, trials = prediction.target.metric, []
    for trial in prediction.trials:
        certified = trial.computed == prediction.certified
        trials.append(
            (
                f"{trial.computed} of {prediction.steps}",
                "" if trial.expected is None else format_metric("psnr", trial.expected),
                format_metric(metric, trial.p10),
                format_metric(metric, trial.worst),
                str(trial.images),
                "certified" if certified else "passed" if trial.passed else "did not pass",
            )
        )
    return PredictionSection(
        prediction.words,
        METRICS[metric].title,
        plot_prediction(results, prediction, 11.5, 5.6, "prediction-wide"),
        plot_prediction(results, prediction, 4.6, 8.6, "prediction-narrow"),
        tuple(trials),
    )


def _describe_best(results: Results) -> str:
    """The fastest method and the one closest to uncached, in one or two sentences."""
    cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
    if not cached:
        return "No method has been measured."

    def describe(row: Row) -> str:
        """Speed and PSNR, and the PSNR of as many steps without a cache."""
        mean, steps = row.summary("psnr").mean, row.computed_steps
        psnr = "equal to uncached" if math.isinf(mean) else f"{mean:.1f} dB from uncached"
        for other in results.rows:
            if other.kind == "fewer_steps" and other.error is None and steps and other.steps == round(steps):
                psnr += f" ({other.label} instead: {format_decibels(other.summary('psnr').mean)})"
                break
        return f"{row.label}: {results.speedup(row):.2f} times as fast, {psnr}."

    fastest = max(cached, key=results.speedup)
    closest = max(cached, key=lambda row: row.summary("psnr").mean)
    lead = f"Fastest is {describe(fastest)}"
    return lead if closest is fastest else f"{lead} Closest to uncached is {describe(closest)}"


def _describe_run(results: Results) -> tuple[tuple[str, str], ...]:
    """The model, the device and the settings."""
    here, settings = results.environment, results.settings
    versions = ", ".join(f"{name} {number}" for name, number in here["versions"].items())
    facts = {
        "Model": f"{here['model'] or here['pipeline']} ({here['pipeline']}, {here['transformer']}, {here['dtype']})",
        "Device": here["device"],
        "Steps": str(settings["steps"]),
        "Guidance": "the pipeline's default" if settings["guidance"] is None else f"{settings['guidance']:g}",
        "Seeds": ", ".join(map(str, settings["seeds"])),
        "Batch": str(settings["batch_size"]),
        "Arguments": ", ".join(f"{key}={value}" for key, value in settings["arguments"].items()),
        "Clock": "CPU time of one thread" if settings["clock"] == "cpu" else "wall time",
        "Versions": f"{versions}, Python {here['python']}",
        "Date": results.date[:10],
    }
    return tuple((name, text) for name, text in facts.items() if text)


def _build_row(
    results: Results,
    row: Row,
    folder: Path,
    metrics: list[str],
    colors: dict[str, str],
    prediction: Prediction | None,
) -> ReportRow:
    """One candidate; a plan with a budget has the PSNR that was expected of it among its facts."""
    failed, settings = row.error is not None, row.candidate.get("settings", {})
    facts = () if failed else _describe_row(row)
    budget = settings.get("budget") if row.candidate.get("name") == "plan" else None
    expected = None if prediction is None or failed else prediction.at(budget)
    return ReportRow(
        label=row.label,
        kind=row.kind,
        color=colors.get(get_series(row), "ink"),
        detail=", ".join(f"{key}={value}" for key, value in settings.items()),
        speed="" if failed else f"{results.speedup(row):.2f}\u00d7",
        facts=facts if expected is None else (*facts, f"{expected:.1f} dB expected"),
        tiles=tuple(_build_tiles(row, results, folder)),
        strips=tuple(Strip(branch, letters) for branch, letters in row.strips.items()),
        cells=() if failed else _build_cells(results, row, metrics),
        error=row.error,
    )


def _describe_row(row: Row) -> tuple[str, ...]:
    """Time, PSNR and steps, next to the images."""
    facts = [f"{format_seconds(row.mean_seconds)} per image"]
    if row.kind != "reference":
        psnr = row.summary("psnr")
        equal = math.isinf(psnr.worst)
        facts.append("equal to uncached" if equal else f"{psnr.mean:.1f} dB, worst {psnr.worst:.1f}")
    if row.kind not in ("method", "custom"):
        facts.append(f"{row.steps} steps")
    elif row.computed_steps is not None:
        facts.append(f"{format_steps(row.computed_steps)} of {row.steps} steps computed")
    return tuple(facts)


def _build_tiles(row: Row, results: Results, folder: Path) -> list[Tile]:
    tiles = []
    for index, (prompt, _) in enumerate(_list_images(results)[: min(MAX_IMAGES, len(row.images))]):
        difference = embed_image(folder / row.differences[index]) if row.differences else ""
        psnr = format_decibels(row.values["psnr"][index]) if "psnr" in row.values else ""
        caption = f"{format_seconds(row.seconds[index])}{f' · {psnr}' if psnr else ''}"
        alt = f"{prompt}, {row.label}{f', {psnr}' if psnr else ''}"
        tiles.append(Tile(embed_image(folder / row.images[index]), difference, caption, alt))
    return tiles


def _build_cells(results: Results, row: Row, metrics: list[str]) -> tuple[Cell, ...]:
    """The values of the table, in the order of its columns."""
    steps, speed = row.computed_steps, results.speedup(row)
    cells = [
        Cell("?", math.inf) if steps is None else Cell(format_steps(steps), steps),
        Cell(format_seconds(row.mean_seconds), row.mean_seconds),
        Cell(f"{speed:.2f}\u00d7", speed),
    ]
    if row.values:
        psnr = row.summary("psnr")
        cells += [Cell(format_metric("psnr", value), value) for value in (psnr.mean, psnr.p10, psnr.worst)]
        means: list[Any] = [(name, row.summary(name).mean) for name in metrics if name != "psnr"]
        cells += [Cell(format_metric(name, value), value) for name, value in means]
    else:
        cells += [Cell("", math.inf)] * (len(metrics) + 2)
    return (*cells, Cell(format_bytes(row.bytes_held), row.bytes_held))


# Formatting.


def embed_image(path: Path) -> str:
    """An image as a data URI: small ones unchanged, large ones reduced to the size of a screen."""
    with Image.open(path) as image:
        if max(image.size) <= _UNCHANGED:
            kind, content = "png", path.read_bytes()
        else:
            image.thumbnail((_EMBEDDED, _EMBEDDED), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "WEBP", quality=88, method=6)
            kind, content = "webp", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def format_metric(metric: str, value: float) -> str:
    """The value of a metric with its number of digits; `equal` where it is infinite."""
    return "equal" if math.isinf(value) else f"{value:.{METRICS[metric].digits}f}"


def format_decibels(value: float) -> str:
    """`28.0 dB`, or `equal`."""
    return "equal" if math.isinf(value) else f"{value:.1f} dB"


def format_seconds(value: float) -> str:
    """Three significant digits: `12.5 s`, `0.41 s`, `85 ms`."""
    if value < 0.1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.{0 if value >= 100 else 1 if value >= 10 else 2}f} s"


def format_steps(value: float) -> str:
    """`9`, or `11.5` where the branches or batches differ."""
    return f"{value:.1f}".removesuffix(".0")


def format_bytes(count: int) -> str:
    """`2.2 MB`."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.1f} {unit}"
    return f"{count} B" if count else ""
