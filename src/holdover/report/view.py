"""The report of a comparison as one HTML file: what the page shows, formatted for its template, and writing it."""

from __future__ import annotations

import base64
import io
import math
import statistics
import tempfile
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from PIL import Image

from ..compare import Results, Row
from ..errors import HoldoverError
from ..metrics import METRICS, as_images
from ..profiles.files import replace_file
from ..video import read_frames, write_video
from .plots import BASELINES, Prediction, assign_colors, get_series, plot_prediction, plot_speed

if TYPE_CHECKING:
    import torch

MAX_IMAGES, MAX_CLIPS = 8, 4  # of a row that the page shows
MAX_ROWS = 8  # of cached candidates; with more, one of each series is shown and the others are folded
_EMBEDDED, _UNCHANGED = 448, 160  # the largest side of an embedded image, and up to which side it is kept as it is
_EMBEDDED_CLIP = 320  # the largest side of an embedded clip


def write_report(
    results: Results, folder: Path | str, name: Path | str = "report.html", prediction: Prediction | None = None
) -> Path:
    """Write the report into the folder with the images of the comparison, or to an absolute `name`; return its path."""
    try:
        import matplotlib  # noqa: F401
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise HoldoverError(f"The report needs {error.name}: pip install 'holdover[report]'.") from None
    loader = PackageLoader("holdover.report", "page")
    pages = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    text = pages.get_template("report.html").render(page=build_page(results, Path(folder), prediction))
    path = Path(folder) / name
    with replace_file(path) as new:
        new.write_text(text, "utf-8")
    return path


def build_page(results: Results, folder: Path, prediction: Prediction | None) -> dict[str, Any]:
    """Everything the template shows, by the names it uses."""
    colors, images = assign_colors(results), list(product(results.settings["prompts"], results.settings["seeds"]))
    metrics = [name for name in METRICS if any(name in row.values for row in results.rows)]
    measured = any(row.error is None for row in results.rows)
    rows = [_build_row(results, row, folder, metrics, colors, prediction) for row in (results.reference, *results.rows)]
    noun, frames = results.noun, results.reference.frames
    return {
        "title": f"{len(images)} {noun}{'' if len(images) == 1 else 's'}, {results.settings['steps']} steps",
        "noun": noun,
        "frames": frames,
        "lead": _describe_best(results),
        "run": results,
        "prompts": [f"{prompt}, seed {seed}" for prompt, seed in images[: MAX_CLIPS if frames else MAX_IMAGES]],
        "count": len(images),
        "rows": rows,
        "groups": _group_rows(results, rows[1:]),
        "metrics": [
            (METRICS[name].title, "10 %" if METRICS[name].higher_is_better else "90 %") for name in metrics[1:]
        ],
        "legend": [(BASELINES.get(name, name), color) for name, color in colors.items()],
        "wide": plot_speed(results, 8.6, 4.6, "wide") if measured else "",
        "narrow": plot_speed(results, 4.3, 4.8, "narrow") if measured else "",
        "prediction": _build_prediction(results, prediction) if measured and prediction is not None else None,
        "unavailable": [(METRICS[name].title, why) for name, why in results.unavailable.items()],
    }


def _group_rows(results: Results, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows by series: of many, the one whose speed-up is closest to the median is shown, the others are folded."""
    measured = [row for row in results.rows if row.error is None]
    folds = sum(row.kind in ("method", "custom") for row in results.rows) > MAX_ROWS
    middle = statistics.median(results.speedup(row) for row in measured) if measured else 1.0
    groups: dict[str, list[int]] = {}
    for index, row in enumerate(results.rows):
        alone = not folds or row.error is not None
        groups.setdefault(f"{get_series(row)} {index}" if alone else get_series(row), []).append(index)
    found = []
    for indices in groups.values():
        shown = indices[0]
        if len(indices) > 1:
            shown = min(indices, key=lambda index: abs(results.speedup(results.rows[index]) - middle))
        series = get_series(results.rows[shown])
        more = [rows[index] for index in indices if index != shown]
        found.append({"shown": rows[shown], "more": more, "name": BASELINES.get(series, series)})
    return found


def _build_prediction(results: Results, prediction: Prediction) -> dict[str, Any]:
    """The plots of the predicted and the measured frontier, and the table of trials."""
    trials = []
    for trial, texts in zip(prediction.trials, format_trials(prediction), strict=True):
        certified = trial.computed == prediction.certified
        trials.append((*texts, "certified" if certified else "passed" if trial.passed else "did not pass"))
    return {
        "words": prediction.words,
        "metric": METRICS[prediction.target.metric].title,
        "wide": plot_prediction(results, prediction, 11.5, 5.6, "prediction-wide"),
        "narrow": plot_prediction(results, prediction, 4.6, 8.6, "prediction-narrow"),
        "trials": trials,
    }


def _describe_best(results: Results) -> str:
    """The fastest method and the one closest to uncached, in one or two sentences."""
    cached = [row for row in results.rows if row.kind in ("method", "custom") and row.error is None]
    if not cached:
        return "No method has been measured."

    def describe(row: Row) -> str:
        mean, steps = row.summary("psnr").mean, row.computed_steps
        psnr = "equal to uncached" if math.isinf(mean) else f"{mean:.1f} dB from uncached"
        fewer = [other for other in results.rows if other.kind == "fewer_steps" and other.error is None]
        instead = next((other for other in fewer if steps and other.steps == round(steps)), None)
        if instead is not None:
            psnr += f" ({instead.label} instead: {format_decibels(instead.summary('psnr').mean)})"
        return f"{row.label}: {results.speedup(row):.2f} times as fast, {psnr}."

    fastest, closest = max(cached, key=results.speedup), max(cached, key=lambda row: row.summary("psnr").mean)
    lead = f"Fastest is {describe(fastest)}"
    return lead if closest is fastest else f"{lead} Closest to uncached is {describe(closest)}"


def _build_row(
    results: Results, row: Row, folder: Path, metrics: list[str], colors: dict[str, str], prediction: Prediction | None
) -> dict[str, Any]:
    """One candidate in all sections; the facts of a plan with a budget include its expected PSNR."""
    failed, settings, facts = row.error is not None, row.candidate.get("settings", {}), []
    if not failed:
        facts.append(f"{format_seconds(row.mean_seconds)} per {results.noun}")
        if row.kind != "reference":
            psnr = row.summary("psnr")
            words = f"{psnr.mean:.1f} dB, worst {psnr.worst:.1f}"
            facts.append("equal to uncached" if math.isinf(psnr.worst) else words)
        if row.kind not in ("method", "custom"):
            facts.append(f"{row.steps} steps")
        elif row.computed_steps is not None:
            facts.append(f"{format_steps(row.computed_steps)} of {row.steps} steps computed")
        budget = settings.get("budget") if row.candidate.get("name") == "plan" else None
        expected = prediction.at(budget) if prediction is not None else None
        if expected is not None:
            facts.append(f"{expected:.1f} dB expected")
    return {
        "label": row.label,
        "kind": row.kind,
        "color": colors.get(get_series(row), "ink"),
        "detail": ", ".join(f"{key}={value}" for key, value in settings.items()),
        "speed": "" if failed else f"{results.speedup(row):.2f}\u00d7",
        "facts": facts,
        "tiles": _build_tiles(row, results, folder),
        "strips": row.strips,
        "cells": [] if failed else _build_cells(results, row, metrics),
        "error": row.error,
    }


def _build_tiles(row: Row, results: Results, folder: Path) -> list[dict[str, str]]:
    """The images of a row with their differences, captions and descriptions."""
    tiles, prompts = [], [prompt for prompt in results.settings["prompts"] for _ in results.settings["seeds"]]
    most = MAX_CLIPS if row.frames else MAX_IMAGES
    for index, prompt in enumerate(prompts[: min(most, len(row.images))]):
        psnr = format_decibels(row.values["psnr"][index]) if "psnr" in row.values else ""
        worst = f"worst frame {row.worst_frames[index] + 1}" if row.worst_frames and psnr != "equal" else ""
        tiles.append(
            {
                "source": embed_image(folder / row.images[index]),
                "difference": embed_image(folder / row.differences[index]) if row.differences else "",
                "caption": " · ".join(filter(None, (format_seconds(row.seconds[index]), psnr))),
                "worst": worst,
                "alt": ", ".join(filter(None, (prompt, row.label, psnr, worst))),
            }
        )
    return tiles


def _build_cells(results: Results, row: Row, metrics: list[str]) -> list[tuple[str, str]]:
    """The texts of the table in the order of its columns, each with the JavaScript number it is sorted by."""
    steps, speed = row.computed_steps, results.speedup(row)
    cells: list[tuple[str, float]] = [
        ("?", math.inf) if steps is None else (format_steps(steps), steps),
        (format_seconds(row.mean_seconds), row.mean_seconds),
        (f"{speed:.2f}\u00d7", speed),
    ]
    if row.values:
        psnr = row.summary("psnr")
        cells += [(format_metric("psnr", value), value) for value in (psnr.mean, psnr.p10, psnr.worst)]
        for name in metrics[1:]:
            found = row.summary(name)
            cells += [(format_metric(name, value), value) for value in (found.mean, found.p10)]
    else:
        cells += [("", math.inf)] * (2 * len(metrics) + 1)
    cells.append((format_bytes(row.bytes_held), row.bytes_held))
    return [(text, "Infinity" if math.isinf(key) else repr(float(key))) for text, key in cells]


# Formatting.


def embed_image(path: Path) -> str:
    """An image or clip as a data URI: small ones unchanged, large ones reduced to the size of a screen."""
    if path.suffix == ".mp4":
        return f"data:video/mp4;base64,{base64.b64encode(_read_clip(path)).decode('ascii')}"
    with Image.open(path) as image:
        if max(image.size) <= _UNCHANGED or path.suffix == ".webp":
            kind, content = path.suffix[1:], path.read_bytes()
        else:
            image.thumbnail((_EMBEDDED, _EMBEDDED), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "WEBP", quality=88, method=6)
            kind, content = "webp", buffer.getvalue()
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"


def _read_clip(path: Path) -> bytes:
    """The content of an MP4 file, or of a smaller one with the same frames."""
    import av

    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        rate, side = float(stream.average_rate or 16), max(stream.width, stream.height)
    if side <= _EMBEDDED_CLIP:
        return path.read_bytes()

    def reduce(frame: Image.Image) -> torch.Tensor:
        frame.thumbnail((_EMBEDDED_CLIP, _EMBEDDED_CLIP), Image.Resampling.LANCZOS)
        return as_images(frame)[0]

    with tempfile.TemporaryDirectory() as folder:
        write_video(Path(folder) / "clip.mp4", map(reduce, read_frames(path)), rate)
        return (Path(folder) / "clip.mp4").read_bytes()


def format_trials(prediction: Prediction) -> list[tuple[str, str, str, str, str]]:
    """For each trial: computed steps, expected PSNR, 10th percentile and worst value of the metric, and images."""
    metric, texts = prediction.target.metric, []
    for trial in prediction.trials:
        expected = "" if trial.expected is None else format_metric("psnr", trial.expected)
        measured, worst = format_metric(metric, trial.p10), format_metric(metric, trial.worst)
        texts.append((f"{trial.computed} of {prediction.steps}", expected, measured, worst, str(trial.images)))
    return texts


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
