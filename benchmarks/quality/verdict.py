"""What the figures say: the lead of plans, the tables as Markdown, and the frontier as a plot. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bench import Scale

# The verdict


PLAN = "plan"
STANDARD = "plan, standard"  # the default effort of a calibration
THOROUGH = "plan, thorough"
FIGURES = ("mean", "p10")
_CAP = 100.0
Point = tuple[float, float]


def rows_of(figures: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """The rows of the main table for a number of steps."""
    parts = [part for name, part in figures["parts"].items() if name.endswith(f", of {steps}")]
    return [row for part in parts for row in part.get("rows", ()) if row["steps"] == steps]


def steps_of(figures: dict[str, Any]) -> list[int]:
    """The numbers of steps that have rows, the largest first."""
    parts = figures["parts"].items()
    return sorted(
        {row["steps"] for name, part in parts if ", of " in name for row in part.get("rows", ())}, reverse=True
    )


def ours(row: dict[str, Any]) -> bool:
    """Whether a row is a plan."""
    return str(row["method"]).startswith("plan")


def judge(figures: dict[str, Any], scale: Scale) -> dict[str, Any]:
    """For each budget: the lead of a plan over the best other row that computes no more, and the ratio of steps."""
    found = {}
    for steps, budgets in ((scale.steps, scale.budgets), (scale.fewer_steps, scale.fewer_budgets)):
        rows = rows_of(figures, steps)
        others = [row for row in rows if not ours(row)]
        found[f"{steps} steps"] = {
            title: [_judge_row(row, others) for row in rows if row["method"] == title and row["wanted"] in budgets]
            for title in (PLAN, STANDARD, THOROUGH)
        }
    return found | {"in_short": _in_short(found[f"{scale.steps} steps"], scale.judged)}


def _judge_row(row: dict[str, Any], others: Sequence[dict[str, Any]]) -> dict[str, Any]:
    entry: dict[str, Any] = {"wanted": row["wanted"], "computed": row["computed"]}
    for figure in FIGURES:
        own = _value(row, figure)
        rival = best(others, row["computed"], figure)
        later = best(others, row["computed"] + 1, figure)
        entry[figure] = {
            "psnr": own,
            "best_other": None if rival is None else {"method": rival["method"], "psnr": _value(rival, figure)},
            "lead": None if rival is None else round(own - _value(rival, figure), 2),
            "lead_if_others_compute_one_more": None if later is None else round(own - _value(later, figure), 2),
            **_ratio(row["computed"], own, frontier(others, figure)),
        }
    return entry


def best(rows: Iterable[dict[str, Any]], most: float, figure: str) -> dict[str, Any] | None:
    """The row of highest PSNR among those that compute no more than `most` steps."""
    return max((r for r in rows if r["computed"] <= most), key=lambda r: _value(r, figure), default=None)


def frontier(rows: Iterable[dict[str, Any]], figure: str) -> list[Point]:
    """Computed steps and PSNR of the rows that no other row with as many steps or fewer beats."""
    found: list[Point] = []
    for computed, value in sorted(((float(row["computed"]), _value(row, figure)) for row in rows), key=_best_first):
        if not found or value > found[-1][1]:
            found.append((computed, value))
    return found


def _best_first(point: Point) -> Point:
    return point[0], -point[1]


def _ratio(computed: float, psnr: float, others: Sequence[Point]) -> dict[str, Any]:
    """How many times as many steps the others compute for the same PSNR; a bound if no row reaches it."""
    if not others:
        return {}
    if psnr > others[-1][1]:
        return {"ratio": round(others[-1][0] / computed, 2), "ratio_is_at_least": True}
    if psnr <= others[0][1]:
        return {"ratio": round(others[0][0] / computed, 2), "ratio_is_at_least": False}
    (k0, q0), (k1, q1) = next(pair for pair in pairwise(others) if pair[1][1] >= psnr)
    return {"ratio": round((k0 + (psnr - q0) / (q1 - q0) * (k1 - k0)) / computed, 2), "ratio_is_at_least": False}


def _in_short(found: dict[str, list[dict[str, Any]]], between: tuple[int, int]) -> dict[str, Any]:
    """The least lead and the least ratio of each kind of plan over the judged budgets."""
    judged = {title: [e for e in rows if between[0] <= e["wanted"] <= between[1]] for title, rows in found.items()}
    least = {title: {figure: _least(rows, figure) for figure in FIGURES} for title, rows in judged.items()}
    return {"between": list(between), **least}


def _least(entries: Sequence[dict[str, Any]], figure: str) -> dict[str, float | None]:
    leads = [e[figure]["lead"] for e in entries if e[figure]["lead"] is not None]
    ratios = [e[figure]["ratio"] for e in entries if "ratio" in e[figure]]
    return {"least_lead": min(leads, default=None), "least_ratio": min(ratios, default=None)}


def _value(row: dict[str, Any], figure: str) -> float:
    value = row["psnr"][figure]
    return _CAP if value is None else float(value)


# Markdown


_METRICS = {"psnr": 1, "ssim": 4, "lpips": 4}  # with digits
_VALUES = ("mean", "10th percentile", "worst")
_HEAD = ("", "asked", "computed", *(f"{m.upper()} {v}" if v == "mean" else v for m in _METRICS for v in _VALUES))
_NOTE = (
    "PSNR in dB, SSIM and LPIPS against the uncached images of the same seeds. Computed: steps on which all blocks "
    "ran, the mean over branches. Methods with thresholds have the best settings "
    "found for at most that many steps. First-block "
    "methods run their first blocks at held steps too, and diffusers' TaylorSeer runs all but attention: not counted."
)


def markdown(figures: dict[str, Any]) -> str:
    """The whole result as text."""
    where, scale = figures["environment"], figures["scale"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    head = f"{where['device']}, {where['dtype']}, {scale['prompts']} prompts; {versions}; {figures['date']}."
    lines = ["# Quality", "", head, "", _NOTE, "", *_verdict_lines(figures["verdict"]), ""]
    known = {row["steps"] for part in figures["parts"].values() for row in part.get("rows", ())}
    for steps in (scale["steps"], scale["fewer_steps"], *sorted(known - {scale["steps"], scale["fewer_steps"]})):
        if rows := rows_of(figures, steps):
            lines += [f"## {steps} steps", "", *table(rows), ""]
    for name in ("generations", "guidance", "other steps", "schedulers"):
        lines += [f"## Calibration: {name}", "", *table(figures["parts"].get(name, {}).get("rows", ())), ""]
    for name in ("cost", "training", "certificates", "expected quality", "late steps", "foreign weights"):
        lines += [f"## {name.capitalize()}", "", *_bullets(figures["parts"].get(name, {})), ""]
    failed = [f"{name}: {part['error']}" for name, part in figures["parts"].items() if "error" in part]
    return "\n".join([*lines, *(["## Failed", "", *(f"- {line}" for line in failed), ""] if failed else [])])


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows of figures, by number of computed steps within each method."""
    lines = [_line(_HEAD), _line(["---", *["--:"] * (len(_HEAD) - 1)])]
    for row in rows:
        shown = {metric: row.get(metric, {}) for metric in _METRICS}
        values = [_cell(shown[m], key, n) for m, n in _METRICS.items() for key in ("mean", "p10", "worst")]
        lines.append(_line([row["method"], row["wanted"], f"{row['computed']:g}", *values]))
    return lines


def by_budget(figures: dict[str, Any]) -> list[str]:
    """For each number of steps and each budget, all methods by mean PSNR."""
    lines = []
    for steps in steps_of(figures):
        rows = rows_of(figures, steps)
        for wanted in sorted({row["wanted"] for row in rows}):
            of_budget = sorted((r for r in rows if r["wanted"] == wanted), key=lambda r: -_value(r, "mean"))
            metrics = [metric for metric in _METRICS if any(metric in row for row in of_budget)]
            timed = any("cpu_seconds" in row for row in of_budget)
            figure_names = (f"{m.upper()} {v}" for m in metrics for v in ("mean", "10th percentile"))
            head = ("method", "computed", *figure_names, *(["CPU seconds"] if timed else []), "settings tried")
            lines += [f"### {wanted} of {steps} steps", "", _line(head), _line(["---", *["--:"] * (len(head) - 1)])]
            for row in of_budget:
                shown = [row.get(metric, {}) for metric in metrics]
                cells = [_cell(s, key, _METRICS[m]) for m, s in zip(metrics, shown, strict=True) for key in FIGURES]
                seconds = [f"{row['cpu_seconds']:.2f}" if "cpu_seconds" in row else ""] if timed else []
                lines.append(
                    _line([row["method"], f"{row['computed']:g}", *cells, *seconds, row.get("settings_tried", 1)])
                )
            lines.append("")
    return lines[:-1]


def _cell(shown: dict[str, float | None], key: str, digits: int) -> str:
    return _figure(shown[key], digits) if key in shown else ""


def _verdict_lines(verdict: dict[str, Any]) -> list[str]:
    """The lead of plans."""
    head = [
        "computed",
        *(f"{what}, {figure}" for figure in FIGURES for what in ("plan", "best other", "lead", "ratio")),
    ]
    lines = []
    for steps, titles in verdict.items():
        for title, entries in titles.items() if steps != "in_short" else ():
            if entries:
                lines += [f"**{title}, {steps}**", "", _line(head), _line(["--:"] * len(head))]
                lines += [_line([e["computed"], *_verdict_cells(e)]) for e in entries]
                lines.append("")
    return [*lines, *_least_lines(**verdict["in_short"])]


def _least_lines(between: Sequence[int], **titles: Any) -> list[str]:
    """The least lead and ratio of each kind of plan."""
    lines = [f"Least lead and least ratio of steps from {between[0]} to {between[1]} computed steps:", ""]
    for title, short in titles.items():
        told = (f"{name} {short[name]['least_lead']} dB, {short[name]['least_ratio']} times" for name in FIGURES)
        lines.append(f"- {title}: {'; '.join(told)}")
    return lines


def _verdict_cells(entry: dict[str, Any]) -> list[str]:
    cells = []
    for figure in FIGURES:
        found = entry[figure]
        other = found["best_other"]
        rival = "" if other is None else f"{other['psnr']:.1f} ({other['method']})"
        bound = "at least " if found.get("ratio_is_at_least") else ""
        cells += [f"{found['psnr']:.1f}", rival, _figure(found["lead"], 1), f"{bound}{found.get('ratio', '')}"]
    return cells


def _bullets(values: Any, indent: str = "") -> list[str]:
    """Nested figures as a list."""
    lines: list[str] = []
    for entry in values if isinstance(values, list) else [values]:
        for key, value in entry.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                lines += [f"{indent}- {key}:", *_numbered_bullets(value, f"{indent}  ")]
            elif isinstance(value, dict):
                lines.append(f"{indent}- {key}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
            else:
                lines.append(f"{indent}- {key}: {value}")
    return lines


def _numbered_bullets(entries: Sequence[dict[str, Any]], indent: str) -> list[str]:
    return [line for n, entry in enumerate(entries, 1) for line in (f"{indent}- {n}", *_bullets(entry, f"{indent}  "))]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _figure(value: float | None, digits: int) -> str:
    return "equal" if value is None else f"{value:.{digits}f}"


# Plot, with matplotlib


_PANELS = (  # what is on the two axes, and the title
    ("computed", "psnr", "mean", "PSNR, mean over the images"),
    ("computed", "psnr", "p10", "PSNR, 10th percentile"),
    ("computed", "lpips", "mean", "LPIPS, mean (lower is better)"),
    ("cpu_seconds", "psnr", "mean", "PSNR, mean, over measured time"),
    ("computed", "lpips", "p10", "LPIPS, 10th percentile (lower is better)"),
    ("cpu_seconds", "lpips", "mean", "LPIPS, mean, over measured time"),
)
_OURS = ("#b3261e", "#e8710a", "#7b1fa2", "#c2185b", "#8d6e63")
_OTHERS = (
    "#9aa0a6",
    "#5f6368",
    "#202124",
    "#1a73e8",
    "#3949ab",
    "#4fc3f7",
    "#188038",
    "#7cb342",
    "#00838f",
    "#a142f4",
    "#b39ddb",
)
_MARKS = "osD^vP*Xhd<>"
_STYLE: Any = {"svg.fonttype": "none", "font.size": 10, "axes.spines.top": False, "axes.spines.right": False}


def plot(figures: dict[str, Any], folder: Path, name: str) -> list[Path]:
    """Write one SVG for each number of steps that has rows; needs matplotlib."""
    import matplotlib
    from matplotlib.figure import Figure

    written = []
    for steps in (figures["scale"]["steps"], figures["scale"]["fewer_steps"]):
        rows = rows_of(figures, steps)
        panels = [panel for panel in _PANELS if any(panel[0] in row and panel[1] in row for row in rows)]
        if not panels:
            continue
        with matplotlib.rc_context(_STYLE | {"svg.hashsalt": name}):
            lines = -(-len(panels) // 2)
            figure = Figure(figsize=(14, 6 * lines), layout="constrained", facecolor="white")
            for axes, panel in zip(figure.subplots(lines, 2, squeeze=False).flat, panels, strict=False):
                _plot_frontier(axes, rows, panel, steps)
            handles, labels = figure.axes[0].get_legend_handles_labels()
            figure.legend(handles, labels, loc="outside right upper", frameon=False)
            for axes in figure.axes[len(panels) :]:
                axes.set_visible(False)
            written.append(folder / f"{name}_{steps}.svg")
            figure.savefig(written[-1], metadata={"Date": None})
    return written


def _plot_frontier(axes: Any, rows: list[dict[str, Any]], panel: tuple[str, str, str, str], steps: int) -> None:
    over, metric, quantity, title = panel
    methods = {row["method"]: ours(row) for row in rows}
    colors = {True: cycle(_OURS), False: cycle(_OTHERS)}
    for index, (method, own) in enumerate(methods.items()):
        color, mark = next(colors[own]), _MARKS[index % len(_MARKS)]
        points = {(r[over], r[metric][quantity]) for r in rows if r["method"] == method and over in r and metric in r}
        found = sorted(point for point in points if point[1] is not None)
        style = {"lw": 2.4 if own else 1.3, "ls": "-" if own else "--", "color": color, "marker": mark}
        axes.plot([x for x, _ in found], [y for _, y in found], label=method, ms=8 if own else 5, **style)
    axes.set(title=title, xlabel=f"computed steps of {steps}" if over == "computed" else "seconds on one CPU thread")
    axes.set_ylabel("PSNR to the uncached images, dB" if metric == "psnr" else "LPIPS to the uncached images")
    if metric == "lpips":
        axes.set_yscale("log")
    axes.grid(alpha=0.25)
