"""`holdover tune`: the fastest plan that is good enough, and the predicted beside the measured frontier."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError
from .failing import one_line_errors
from .loading import load_pipeline

if TYPE_CHECKING:
    from ..report import Prediction
    from ..report.prediction import Trial

console = Console()
_HEAD = f"{'computed':>10}  {'predicted':>9}  {'measured':>8}  {'worst':>6}  pictures"


def tune(
    profile: Annotated[Path, typer.Argument(help="What `holdover calibrate` wrote.")],
    target: Annotated[str, typer.Option(help="psnr>=40, ssim>=0.98, ...")] = "psnr>=40",
    model: Annotated[str, typer.Option(help="emoji, a folder, or a checkpoint's id.")] = "emoji",
    prompts: Annotated[Path | None, typer.Option(help="Held-back prompts, one a line; else built in.")] = None,
    num: Annotated[int, typer.Option(help="How many of the prompts.")] = 60,
    confidence: Annotated[float, typer.Option(help="How sure the certificate is.")] = 0.95,
    share: Annotated[float, typer.Option(help="The part of pictures that meets the target.")] = 0.95,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time.")] = 1,
    report: Annotated[
        Path | None, typer.Option(help="A page FILE.html, or a folder, with every other method beside plans.")
    ] = None,
    report_prompts: Annotated[int, typer.Option(help="How many of the prompts the report draws.")] = 4,
) -> None:
    """Find the fastest plan that keeps a target on held-back prompts, and write its certificate into the profile.

    What each plan was predicted to keep stands beside what it kept. With `--report` the predicted and the measured
    frontier are drawn side by side, with every other method and fewer steps of both orders on the same axes.
    """
    with one_line_errors():
        from ..plan import tune as tuned
        from ..plan.calls import built_in_prompts, prompts_from_file
        from ..plan.config import Target
        from ..profiles import Profile

        Target.parsed(target)
        _check(num, report, report_prompts)
        measured = Profile.load(profile)
        given = None if prompts is None else prompts_from_file(prompts)
        pipe = load_pipeline(model)
        chosen = (built_in_prompts(pipe)[measured.facts.prompts :] if given is None else given)[:num]
        found = tuned(pipe, measured, chosen, target, confidence, share=share, batch_size=batch_size)
        found.profile.save(profile)
        from ..report import Prediction

        prediction = Prediction.of(found, target)
        _print(prediction)
        if report is not None:
            _report(pipe, profile, chosen[:report_prompts], batch_size, report, prediction)


def _check(num: int, report: Path | None, report_prompts: int) -> None:
    """Find out now rather than after an hour what cannot be done."""
    for name, value in (("--num", num), ("--report-prompts", report_prompts)):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, not {value}.")
    if report is None:
        return
    folder, page = _places(report)
    if page.is_dir() or (folder.exists() and not folder.is_dir()):
        wrong = page if page.is_dir() else folder
        raise ConfigError(f"--report cannot be written: {wrong} is a {'folder' if wrong.is_dir() else 'file'}.")


def _places(report: Path) -> tuple[Path, Path]:
    """The folder for figures and pictures, and the page: beside a page that is named, or inside a folder."""
    named = report.suffix.lower() in (".html", ".htm")
    return (report.with_suffix(""), report) if named else (report, report / "report.html")


def _print(prediction: Prediction) -> None:
    """Every plan that was tried, and what was found."""
    unit = "dB" if prediction.target.metric == "psnr" else prediction.target.metric.upper()
    console.print(f"{unit} that nine pictures of ten keep, and the worst:", highlight=False)
    console.print(_HEAD, highlight=False)
    for trial in prediction.trials:
        console.print(_line(trial, prediction), highlight=False)
    console.print(prediction.words, highlight=False, soft_wrap=True)


def _line(trial: Trial, prediction: Prediction) -> str:
    from ..report.words import figure

    metric, computed = prediction.target.metric, f"{trial.computed} of {prediction.steps}"
    expected = "" if trial.expected is None else figure("psnr", trial.expected)
    kept, worst = figure(metric, trial.kept), figure(metric, trial.worst)
    word = "passed" if trial.passed else "failed"
    return f"{computed:>10}  {expected:>9}  {kept:>8}  {worst:>6}  {trial.pictures:>8}  {word}"


def _report(
    pipe: Any, profile: Path, prompts: list[str], batch_size: int, report: Path, prediction: Prediction
) -> None:
    from ..compare.frontier import frontier
    from ..profiles import Profile
    from .compare import run_and_report

    folder, page = _places(report)
    spec = frontier(Profile.load(profile), profile, prompts, batch_size)
    run_and_report(pipe, spec, folder, page, prediction)
