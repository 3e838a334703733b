"""The result file as Markdown tables and as a plot of what grows; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

HEAD = (
    "method",
    "computed + held",
    "seconds",
    "over eager",
    "over same mode",
    "over ideal",
    "held step, GPU ms",
    "held step, host ms",
    "waits in 10 steps",
    "held",
    "memory",
)
MODES = {
    "eager": "eager",
    "compiled": "compiled blocks",
    "whole": "compiled as a whole",
    "float8": "float8, compiled blocks",
}
BOX_MODES = ("eager", "compiled", "reduce-overhead")
NONE_YET = "Nothing is measured yet: `python -m benchmarks.speed` writes `benchmarks/results/speed.json`."
NONE_ON_PROCESSOR = (
    "Nothing is measured yet: `python -m benchmarks.speed --cpu` writes `benchmarks/results/speed_cpu.json`."
)
NO_CALLS_YET = "No whole call is measured yet: `python -m benchmarks.speed --only call` adds them."
PARTS = ("text encoders", "denoising", "VAE", "rest")  # of a whole call
HELD_IN = ", held in "
RESIDUAL = "mag_cache 0.24/5/0.1"  # represents the methods that hold residuals
FIRST_IMAGE = {"import": "import", "load": "load", "30 steps without a cache": "draw"}

Row = dict[str, Any]


def markdown(path: Path) -> str:
    """All tables of a result file, or a sentence that there is none."""
    if not path.exists():
        return NONE_YET
    figures = json.loads(path.read_text("utf-8"))
    rows: list[Row] = figures["rows"]
    parts = [*models(rows), growth(rows), box(rows), calls(rows), trained(rows), where(figures["runs"], rows)]
    return "\n\n".join(part for part in parts if part)


def in_short(path: Path, model: str = "flux") -> str:
    """The chief rows of one model: seconds, and how many times faster than the uncached eager run."""
    if not path.exists():
        return NONE_YET
    figures = json.loads(path.read_text("utf-8"))
    rows = [row for row in figures["rows"] if (row["section"], row["model"]) == ("table", model)]
    by_name: dict[str, dict[str, Row]] = {}
    for row in sorted((row for row in rows if row["label"] != "identical" and HELD_IN not in row["label"]), key=_rank):
        by_name.setdefault(f"{row['by']} {row['label']}".strip(), {})[row["mode"]] = row
    shown = [
        [name, _steps(of_mode), *(_seconds(of_mode.get(mode)) for mode in MODES)] for name, of_mode in by_name.items()
    ]
    modes = [mode for i, mode in enumerate(MODES) if any(line[2 + i] for line in shown)]
    lines = [line[: 2 + len(modes)] for line in shown]
    head = (f"{rows[0]['title']}, {rows[0]['shape']}, {rows[0]['steps']} steps", "computed", *(MODES[m] for m in modes))
    runs = where(figures["runs"], rows).removeprefix("- ").replace("\n- ", "; ")
    return f"{markdown_table(head, lines)}\n\n{runs}"


def _steps(of_mode: dict[str, Row]) -> str:
    row = next(iter(of_mode.values()))
    return str(row.get("computed", "")) + ("\\*" if row.get("forced") else "")


def _seconds(row: Row | None) -> str:
    if row is None:
        return ""
    if "raised" in row:
        return "raises"
    faster = row.get("speedup", {}).get("eager")
    return f"{row['seconds']:.2f} s" + ("" if faster is None else f", {faster:.2f}x")


def models(rows: Sequence[Row]) -> list[str]:
    """One table for each model and mode."""
    parts = []
    of_table = [row for row in rows if row["section"] == "table"]
    for model, mode in product(dict.fromkeys(row["model"] for row in of_table), MODES):
        chosen = [row for row in of_table if (row["model"], row["mode"]) == (model, mode)]
        if not chosen:
            continue
        plain = next((row for row in chosen if row["label"] == "no cache"), {})
        shown = [line(row, plain) for row in sorted(chosen, key=_rank) if row["label"] != "identical"]
        head = f"**{chosen[0]['title']}**, {chosen[0]['shape']}, {chosen[0]['steps']} steps, {MODES[mode]}"
        parts += [head + identical(chosen), markdown_table(HEAD, shown)]
    if any(row.get("forced") for row in of_table):
        parts.append("\\* the schedule is forced, because decisions on random weights mean nothing.")
    return parts


def _rank(row: Row) -> int:
    return ("", "holdover", "diffusers", "cache-dit").index(row["by"])


def identical(rows: Sequence[Row]) -> str:
    """Which methods gave the uncached latents when they computed every step."""
    found: dict[str, bool | str] = next((row["identical"] for row in rows if row["label"] == "identical"), {})
    same = [name for name, equal in found.items() if equal is True]
    other = [name for name in found if name not in same]
    notes = [f"bit for bit when every step is computed: {', '.join(same)}"] if same else []
    notes += [f"**not** so: {', '.join(other)}"] if other else []
    return "".join(f"; {each}" for each in notes)


def line(row: Row, plain: Row) -> list[str]:
    name = f"{row['by']} {row['label']}".strip() + ("\\*" if row.get("forced") else "")
    if "raised" in row:
        return [name, f"raises {row['raised']}", *[""] * (len(HEAD) - 2)]
    return [
        name,
        f"{row['computed']} + {row['held']}" if row["by"] else str(row["steps"]),
        f"{row['seconds']:.2f}",
        _times(row.get("speedup", {}).get("eager")),
        _times(row.get("speedup", {}).get(row["mode"])),
        _figure(row.get("over_ideal"), "+.1%"),
        _figure(row["gpu_forward_ms"]["held"], ".3f"),
        _figure(row["host_ms"]["held"], ".2f"),
        _waits(row, plain),
        _figure(_megabytes(row.get("held_bytes")), ".0f MB"),
        _figure(_megabytes(row.get("bytes_over_uncached")), "+.0f MB"),
    ]


def _figure(value: float | None, form: str) -> str:
    number, _, unit = form.partition(" ")
    return "" if value is None else f"{value:{number}}" + (f" {unit}" if unit else "")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _waits(row: Row, plain: Row) -> str:
    """Host waits beyond those of the uncached loop."""
    own, usual = row.get("waits"), plain.get("waits")
    if not own or not usual or row is plain:
        return ""
    return str(sum(own[kind] - usual[kind] for kind in ("operations", "events")))


def _megabytes(count: int | None) -> float | None:
    return None if count is None else count / 1e6


def residuals(path: Path, model: str = "flux", mode: str = "eager") -> dict[str, list[str]]:
    """By storage format: megabytes held, milliseconds of a held step and seconds of MagCache on one model."""
    rows = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    found = {}
    for row in rows:
        label, _, place = row["label"].partition(HELD_IN)
        of_table = (row["section"], row["model"], row["mode"], row["by"]) == ("table", model, mode, "holdover")
        if of_table and label == RESIDUAL and "raised" not in row:
            held = _figure(_megabytes(row.get("held_bytes")), ".1f MB")
            found[place or "device"] = [held, f"{row['gpu_forward_ms']['held']:.3f}", f"{row['seconds']:.2f}"]
    return found


def clocks(path: Path, model: str = "flux") -> str:
    """Clock and power of the card while residuals were held."""
    if not path.exists():
        return NONE_YET
    figures = json.loads(path.read_text("utf-8"))
    of_model = [r for r in figures["rows"] if (r["section"], r["model"], r["by"]) == ("table", model, "holdover")]
    held = [row for row in of_model if row["label"] == RESIDUAL and row.get("clocks")]
    if not held:
        return NONE_YET
    shown = [[row["mode"], f"{row['gpu_forward_ms']['held']:.3f}", *_ran_at(row["clocks"])] for row in held]
    run = figures["runs"][held[0]["run"]]
    caption = f"{RESIDUAL} on {held[0]['title']}, {run['card']}, {run['date'][:10]}."
    return f"{markdown_table(('blocks', 'held step, GPU ms', 'clock', 'power'), shown)}\n\n{caption}"


def _ran_at(at: Row) -> list[str]:
    limit = ", at the limit" if at["power_limited"] else ""
    return [f"{at['sm_mhz']} of {at['max_sm_mhz']} MHz", f"{at['power_w']:.0f} W{limit}"]


def growth(rows: Sequence[Row]) -> str:
    """What a step costs beyond the ideal as images, batches and step counts grow."""
    shown = [
        [row["mode"], row["shape"], str(row["batch"]), str(row["steps"]), row["label"], *_grown(row)]
        for row in rows
        if row["section"] == "growth"
    ]
    head = ("grows", "pixels", "batch", "steps", "method", "computed step, ms", "beyond the ideal, ms per step")
    return f"**What grows, FLUX.1-dev, eager**\n\n{markdown_table(head, shown)}" if shown else ""


def _grown(row: Row) -> list[str]:
    if "raised" in row:
        return [f"raises {row['raised']}", ""]
    return [f"{row['gpu_ms']['computed']:.1f}", f"{row['overhead_ms_per_step']:.3f}"]


def box(rows: Sequence[Row]) -> str:
    """The built-in model on the card, eager first."""
    of_box = sorted((row for row in rows if row["section"] == "box"), key=lambda row: BOX_MODES.index(row["mode"]))
    shown = [[row["shape"], row["mode"], row["label"], *_boxed(row)] for row in of_box]
    head = ("device", "mode", "method", "seconds per image", "over eager, no cache")
    return f"**The built-in model, one image of 50 steps**\n\n{markdown_table(head, shown)}" if shown else ""


def float8(path: Path) -> str:
    """FLUX.1-dev's denoising loop in float8 with compiled blocks."""
    if not path.exists():
        return NONE_YET
    figures = json.loads(path.read_text("utf-8"))
    rows = [r for r in figures["rows"] if (r["section"], r["model"], r["mode"]) == ("table", "flux", "float8")]
    return f"{models(rows)[1]}\n\n{where(figures['runs'], rows)}" if rows else NONE_YET


def whole_calls(path: Path) -> str:
    """The table of whole calls with its provenance."""
    if not path.exists():
        return NONE_YET
    figures = json.loads(path.read_text("utf-8"))
    of_call = [row for row in figures["rows"] if row["section"] == "call"]
    return f"{calls(of_call)}\n\n{where(figures['runs'], of_call)}" if of_call else NO_CALLS_YET


def calls(rows: Sequence[Row]) -> str:
    """Whole calls of FluxPipeline, from prompt to image, and the parts of their time."""
    of_call = sorted((row for row in rows if row["section"] == "call"), key=lambda row: list(MODES).index(row["mode"]))
    if not of_call:
        return ""
    plain = next((row for row in of_call if (row["mode"], row["label"]) == ("eager", "no cache")), {})
    shown = [[MODES[row["mode"]], row["label"], *_called(row, plain)] for row in of_call]
    head = ("transformer", "method", "seconds", "over eager", *(f"{part}, ms" for part in PARTS), "over expected")
    title = (
        f"**A whole call, {of_call[0].get('title', 'FLUX.1-dev')}**, {of_call[0]['shape']}, {of_call[0]['steps']} steps"
    )
    return f"{title}\n\n{markdown_table(head, shown)}"


def _called(row: Row, plain: Row) -> list[str]:
    if "raised" in row:
        return [f"raises {row['raised']}", *[""] * (2 + len(PARTS))]
    faster = "" if row is plain or "wall_s" not in plain else _times(plain["wall_s"] / row["wall_s"])
    parts = [f"{row['parts'][part] * 1e3:.0f}" for part in PARTS]
    return [f"{row['wall_s']:.2f}", faster, *parts, f"{row['wall_s'] / row['expected_s'] - 1:+.1%}"]


def trained(rows: Sequence[Row]) -> str:
    """One iteration of training a plan through the model."""
    of_training = [row for row in rows if row["section"] == "training"]
    if not of_training:
        return ""
    shown = [
        [row["shape"], f"raises {row['raised']}", "", ""]
        if "raised" in row
        else [
            row["shape"],
            _figure(row["seconds"], ".2f"),
            _figure(row["peak_gigabytes"], ".1f"),
            _figure(row["model_calls"], ".0f"),
        ]
        for row in of_training
    ]
    head = ("image", "seconds", "peak memory, GB", "model calls")
    title = f"**One iteration of training, {of_training[0]['title']}**, {of_training[0]['label']}, batch 1"
    return f"{title}\n\n{markdown_table(head, shown)}"


def processor(path: Path) -> str:
    """The built-in model on two cores: turns of one process, and the time to a first image in a new process."""
    if not path.exists():
        return NONE_ON_PROCESSOR
    found = json.loads(path.read_text("utf-8"))
    turns, ratio, first = found["turns"], found["ratio"], found["first_picture"]
    head = (
        "turn",
        "no cache, s",
        f"plan, K = {found['budget']} of {found['steps']}, s",
        "times faster",
        "plan made, s",
    )
    shown = [
        [str(index), f"{t['uncached_s']:.2f}", f"{t['plan_s']:.2f}", _times(t["uncached_s"] / t["plan_s"]), _made(t)]
        for index, t in enumerate(turns, start=1)
    ]
    parts = ", ".join(f"{name} {first[part]:.1f} s" for name, part in FIRST_IMAGE.items())
    total = sum(first[part] for part in FIRST_IMAGE.values())
    faster = f"{ratio['median']:.2f} times faster in the median of the turns, {ratio['least']:.2f} in the least."
    first_image = f"The first image of a new process takes {total:.1f} s: {parts}."
    where_from = f"- {_machine(found | {'card': None})}, {found['threads']} threads"
    return f"{markdown_table(head, shown)}\n\n{faster} {first_image}\n\n{where_from}"


def _made(turn: Row) -> str:
    """Seconds of the first image, during which the plan is made."""
    return f"{turn['plan_first_s']:.2f}"


def _boxed(row: Row) -> list[str]:
    if "raised" in row:
        return [f"raises {row['raised']}", ""]
    is_base = (row["mode"], row["label"]) == ("eager", "no cache")
    return [f"{row['wall_s']:.3f}", "" if is_base else _times(row.get("speedup"))]


def where(runs: Sequence[Row], rows: Iterable[Row]) -> str:
    """The machines and versions of the rows."""
    used = sorted({row["run"] for row in rows})
    machines = dict.fromkeys(_machine(runs[index]) for index in used)
    return "\n".join(f"- {each}" for each in machines)


def _machine(run: Row) -> str:
    versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
    return f"{run['date'][:10]}, {run['card'] or run['cpu']}, Python {run['python']}, {versions}"


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in each) + " |" for each in lines)


# The plot


TITLES = {"resolution": "side of the image, pixels", "batch": "batch at 1024x1024", "steps": "steps at 1024x1024"}


def plot(path: Path, into: Path) -> Path:
    """Plot the growth rows of a result file; needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [row for row in json.loads(path.read_text("utf-8"))["rows"] if row["section"] == "growth"]
    rows = [row for row in rows if "raised" not in row]
    axes_shown = [axis for axis in TITLES if any(row["mode"] == axis for row in rows)]
    if not axes_shown:
        raise SystemExit(f"{path} has no growth rows: run `python -m benchmarks.speed --only growth` first.")
    figure, panels = pyplot.subplots(
        2, len(axes_shown), figsize=(4 * len(axes_shown), 5), squeeze=False, sharex="col", sharey="row"
    )
    for column, axis in enumerate(axes_shown):
        of_axis = [row for row in rows if row["mode"] == axis]
        _panel(panels[0][column], of_axis, lambda row: row["gpu_ms"]["computed"])
        _panel(panels[1][column], of_axis, lambda row: row["overhead_ms_per_step"])
        panels[0][column].set_yscale("log")
        panels[1][column].set_xlabel(TITLES[axis])
    panels[0][0].set_ylabel("a computed step, ms")
    panels[1][0].set_ylabel("beyond the ideal, ms per step")
    panels[0][-1].legend(frameon=False, fontsize=8)
    figure.tight_layout()
    into.mkdir(parents=True, exist_ok=True)
    written = into / "growth.svg"
    with matplotlib.rc_context({"svg.hashsalt": written.stem}):  # the same rows, the same file
        figure.savefig(written, metadata={"Date": None})
    return written


def _panel(panel: Any, rows: Sequence[dict[str, Any]], height: Callable[[dict[str, Any]], float]) -> None:
    """One line per method over what grows."""
    for label in dict.fromkeys(row["label"] for row in rows):
        points = sorted((place(row), height(row)) for row in rows if row["label"] == label)
        panel.plot(*zip(*points, strict=True), marker="o", label=label)
    places = sorted({place(row) for row in rows})
    panel.set_xscale("log", base=2)
    panel.set_xticks(places, [str(p) for p in places])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def place(row: dict[str, Any]) -> int:
    """The position of a row on its axis."""
    return int(row["shape"].split("x")[0]) if row["mode"] == "resolution" else int(row[row["mode"]])
