"""The commands that measure a model for its methods: `holdover calibrate` and `holdover tune`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from .application import ModelOption, app, check_positive, load_pipeline, one_line_errors, print_line

if TYPE_CHECKING:
    from ..profiles import Profile
    from ..report import Prediction

_SPEED_UPS = (6, 5, 4, 3, 2.5, 2)  # of the frontier that `calibrate` prints


@app.command()
def calibrate(
    model: ModelOption = "emoji",
    prompts: Annotated[Path | None, typer.Option(help="A file with one prompt per line; default: built in.")] = None,
    num: Annotated[int, typer.Option(help="Number of prompts.")] = 4,
    steps: Annotated[int, typer.Option(help="Denoising steps; plans for fewer steps are derived.")] = 50,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    store: Annotated[str, typer.Option(help="Where outputs are stored meanwhile: device, cpu or disk.")] = "device",
    out: Annotated[Path, typer.Option(help="File of the profile.")] = Path("profile.safetensors"),
) -> None:
    """Measure the constants of all methods on a few uncached images, and write them to a profile."""
    with one_line_errors():
        from .. import calibration
        from ..plan.calls import built_in_prompts, prompts_from_file
        from ..profiles.profile import SUFFIX

        if out.suffix != SUFFIX:
            raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
        if out.exists():
            raise ConfigError(f"{out} already exists; give another --out.")
        check_positive(num=num)
        given = None if prompts is None else prompts_from_file(prompts)
        pipe = load_pipeline(model)
        chosen = (built_in_prompts(pipe) if given is None else given)[:num]
        profile = calibration.calibrate(
            pipe, chosen, steps, guidance_scale=guidance, batch_size=batch_size, seed=seed, store=store, name=out.stem
        )
        profile.save(out)
        _print_frontier(profile)
        print_line(f"profile  {out}")


def _print_frontier(profile: Profile) -> None:
    """The PSNR that plans are expected to have at several speed-ups."""
    from ..plan.planner import search_profile

    frontier, steps, offset = search_profile(profile).frontier, len(profile.facts.noise), profile.facts.psnr_offset
    for factor in _SPEED_UPS:
        choice = frontier[max(min(frontier), int(steps / factor))]
        psnr = "" if offset is None else f", expected PSNR {choice.psnr(offset):.0f} dB (10th percentile)"
        print_line(f"{factor:g}x: {len(choice.computed)} of {steps} steps{psnr}")


@app.command()
def tune(
    profile: Annotated[Path, typer.Argument(help="A profile that `holdover calibrate` wrote.")],
    target: Annotated[str, typer.Option(help="psnr>=40, ssim>=0.98, ...")] = "psnr>=40",
    model: ModelOption = "emoji",
    prompts: Annotated[
        Path | None, typer.Option(help="A file with one held-out prompt per line; default: built in.")
    ] = None,
    num: Annotated[int, typer.Option(help="Number of prompts.")] = 60,
    confidence: Annotated[float, typer.Option(help="Confidence of the certificate.")] = 0.95,
    share: Annotated[float, typer.Option(help="Fraction of the images that meets the target.")] = 0.95,
    batch_size: Annotated[int, typer.Option(help="Images per batch.")] = 1,
    report: Annotated[
        Path | None, typer.Option(help="A page FILE.html, or a folder, that compares plans with all other methods.")
    ] = None,
    report_prompts: Annotated[int, typer.Option(help="Number of prompts of the report.")] = 4,
) -> None:
    """Find the fastest plan that meets a target on held-out prompts, and write its certificate into the profile.

    Prints the predicted and the measured quality of each plan. With `--report`, the predicted and the measured frontier
    are shown side by side, with every other method and fewer steps with both solvers on the same axes.
    """
    with one_line_errors():
        from .. import tuning
        from ..compare import build_frontier_comparison
        from ..plan.calls import built_in_prompts, prompts_from_file
        from ..plan.config import Target
        from ..profiles import Profile
        from ..report import Prediction
        from .generation import run_and_report

        Target.parsed(target)
        check_positive(num=num, report_prompts=report_prompts)
        folder, page = _report_paths(report) if report is not None else (None, None)
        measured = Profile.load(profile)
        given = None if prompts is None else prompts_from_file(prompts)
        pipe: Any = load_pipeline(model)
        chosen = (built_in_prompts(pipe)[measured.facts.prompts :] if given is None else given)[:num]
        found = tuning.tune(pipe, measured, chosen, target, confidence, share=share, batch_size=batch_size)
        found.profile.save(profile)
        prediction = Prediction.of(found, target)
        _print_trials(prediction)
        if folder is not None:
            spec = build_frontier_comparison(Profile.load(profile), profile, chosen[:report_prompts], batch_size)
            run_and_report(pipe, spec, folder, page, prediction)


def _report_paths(report: Path) -> tuple[Path, Path]:
    """The folder for results and images, and the page: next to a page that is named, or inside a folder.

    Refuses paths that cannot be written, before anything is generated.
    """
    named = report.suffix.lower() in (".html", ".htm")
    folder, page = (report.with_suffix(""), report) if named else (report, report / "report.html")
    if page.is_dir():
        raise ConfigError(f"--report cannot be written: {page} is a folder.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report cannot be written: {folder} is a file.")
    return folder, page


def _print_trials(prediction: Prediction) -> None:
    """Every plan that was tried, and the result."""
    from ..report.view import format_metric

    metric = prediction.target.metric
    unit = "PSNR in dB" if metric == "psnr" else metric.upper()
    print_line(f"{unit}, 10th percentile and worst:")
    print_line(f"{'computed':>10}  {'predicted':>9}  {'measured':>8}  {'worst':>6}  images")
    for trial in prediction.trials:
        computed = f"{trial.computed} of {prediction.steps}"
        expected = "" if trial.expected is None else format_metric("psnr", trial.expected)
        measured, worst = format_metric(metric, trial.p10), format_metric(metric, trial.worst)
        verdict = "passed" if trial.passed else "failed"
        print_line(f"{computed:>10}  {expected:>9}  {measured:>8}  {worst:>6}  {trial.images:>6}  {verdict}")
    print_line(prediction.words)
