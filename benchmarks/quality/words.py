"""The figures as Markdown. Pure Python."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .verdict import FIGURES, rows_of

_HEAD = ("", "asked", "computed", "PSNR mean", "10th percentile", "worst", "SSIM mean", "10th percentile", "worst")
_NOTE = (
    "PSNR in dB and SSIM against the uncached pictures of the same seeds. Computed: steps on which all blocks ran, the "
    "mean over branches. Methods with thresholds have the best settings found for at most that many steps. First-block "
    "methods run their first blocks at held steps too, and diffusers' TaylorSeer runs all but attention: not counted."
)


def markdown(figures: dict[str, Any]) -> str:
    """The whole result as text."""
    where, scale = figures["environment"], figures["scale"]
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items())
    head = f"{where['device']}, {where['dtype']}, {scale['prompts']} prompts; {versions}; {figures['date']}."
    lines = ["# Quality", "", head, "", _NOTE, "", *_short(figures["verdict"]), ""]
    for steps in (scale["steps"], scale["fewer_steps"]):
        lines += [f"## {steps} steps", "", *table(rows_of(figures, steps)), ""]
    for name in ("generations", "guidance", "other steps", "schedulers"):
        lines += [f"## Calibration: {name}", "", *table(figures["parts"].get(name, {}).get("rows", ())), ""]
    for name in ("cost", "certificates", "guard", "foreign weights"):
        lines += [f"## {name.capitalize()}", "", *_listed(figures["parts"].get(name, {})), ""]
    failed = [f"{name}: {part['error']}" for name, part in figures["parts"].items() if "error" in part]
    return "\n".join([*lines, *(["## Failed", "", *(f"- {line}" for line in failed), ""] if failed else [])])


def table(rows: Iterable[dict[str, Any]]) -> list[str]:
    """Rows of figures, by number of computed steps within each method."""
    lines = [_line(_HEAD), _line(["---", *["--:"] * (len(_HEAD) - 1)])]
    for row in rows:
        psnr = [_figure(row["psnr"][key], 1) for key in ("mean", "p10", "worst")]
        ssim = [_figure(row["ssim"][key], 4) for key in ("mean", "p10", "worst")]
        lines.append(_line([row["method"], row["wanted"], f"{row['computed']:g}", *psnr, *ssim]))
    return lines


def _short(verdict: dict[str, Any]) -> list[str]:
    """How far plans are ahead."""
    head = [
        "computed",
        *(f"{what}, {figure}" for figure in FIGURES for what in ("plan", "best other", "lead", "ratio")),
    ]
    lines = []
    for steps, titles in verdict.items():
        for title, entries in titles.items() if steps != "in_short" else ():
            if entries:
                lines += [f"**{title}, {steps}**", "", _line(head), _line(["--:"] * len(head))]
                lines += [_line([e["computed"], *_judged(e)]) for e in entries]
                lines.append("")
    return [*lines, *_least(**verdict["in_short"])]


def _least(between: Sequence[int], **titles: Any) -> list[str]:
    """The least lead and ratio of each kind of plan."""
    lines = [f"Least lead and least ratio of steps from {between[0]} to {between[1]} computed steps:", ""]
    for title, short in titles.items():
        told = (f"{name} {short[name]['least_lead']} dB, {short[name]['least_ratio']} times" for name in FIGURES)
        lines.append(f"- {title}: {'; '.join(told)}")
    return lines


def _judged(entry: dict[str, Any]) -> list[str]:
    cells = []
    for figure in FIGURES:
        found = entry[figure]
        other = found["best_other"]
        rival = "" if other is None else f"{other['psnr']:.1f} ({other['method']})"
        bound = "at least " if found.get("ratio_is_at_least") else ""
        cells += [f"{found['psnr']:.1f}", rival, _figure(found["lead"], 1), f"{bound}{found.get('ratio', '')}"]
    return cells


def _listed(values: Any, indent: str = "") -> list[str]:
    """Nested figures as a list."""
    lines: list[str] = []
    for entry in values if isinstance(values, list) else [values]:
        for key, value in entry.items():
            if isinstance(value, list) and value and isinstance(value[0], dict):
                lines += [f"{indent}- {key}:", *_separate(value, f"{indent}  ")]
            elif isinstance(value, dict):
                lines.append(f"{indent}- {key}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
            else:
                lines.append(f"{indent}- {key}: {value}")
    return lines


def _separate(entries: Sequence[dict[str, Any]], indent: str) -> list[str]:
    return [line for n, entry in enumerate(entries, 1) for line in (f"{indent}- {n}", *_listed(entry, f"{indent}  "))]


def _line(cells: Sequence[object]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _figure(value: float | None, digits: int) -> str:
    return "equal" if value is None else f"{value:.{digits}f}"
