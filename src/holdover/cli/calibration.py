"""The commands that measure a model: `holdover calibrate` and `tune`."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, Option

from ..errors import ConfigError, did_you_mean
from ..loading import CallSettings, require_packages
from .application import app, print_line
from .generation import run_and_report
from .options import check_range, check_writable, takes_model

if TYPE_CHECKING:
    from ..report import Prediction

_STORES = ("device", "cpu", "disk")


@app.command()
@takes_model
def calibrate(
    prompts: Annotated[Path | None, Option(help="A file with one prompt per line; default: built in.")] = None,
    num: Annotated[int | None, Option(help="Number of prompts; default: 4, 16 or 64, by effort.")] = None,
    steps: Annotated[int, Option(help="Denoising steps; plans for fewer steps are derived.")] = 50,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int, Option(help="Images per batch.")] = 1,
    seed: Annotated[int, Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    store: Annotated[str, Option(help="Where outputs are stored meanwhile: device, cpu or disk.")] = "device",
    effort: Annotated[
        str, Option(help="Trials on the model for better plans: quick (none), standard, thorough.")
    ] = "standard",
    budget: Annotated[
        list[str] | None, Option(help="Computed steps or a speed-up to try plans for; repeatable.")
    ] = None,
    out: Annotated[Path, Option(help="File of the profile.")] = Path("profile.safetensors"),
    *,
    model: CallSettings,
) -> None:
    """Measure the constants of all methods on a few uncached images, and write them to a profile.

    A calibration that was stopped continues with the same command: until it is done, its results are in a folder next
    to the profile.
    """
    from ..profiles.facts import EFFORTS
    from ..profiles.files import SUFFIX

    check_range(1, num=1 if num is None else num, steps=steps, batch_size=batch_size)
    check_range(0, seed=seed, guidance=guidance)
    if store not in _STORES:
        raise ConfigError(f"--store must be one of {', '.join(_STORES)}, not {store!r}.{did_you_mean(store, _STORES)}")
    if effort not in EFFORTS:
        names = ", ".join(EFFORTS)
        raise ConfigError(f"--effort must be one of {names}, not {effort!r}.{did_you_mean(effort, EFFORTS)}")
    if out.suffix != SUFFIX:
        raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
    if out.exists():
        raise ConfigError(f"{out} already exists; give another --out.")
    check_writable(out.parent)

    from .. import plan
    from ..compare.baselines import SPEED_UPS
    from ..loading import load_pipeline
    from ..plan.calls import built_in_prompts, prompts_from_file
    from ..plan.measure import DEFAULT_PROMPTS, expected_cost
    from ..plan.planner import search_profile

    given = prompts_from_file(prompts) if prompts else None
    pipe = load_pipeline(model)
    arguments = model.call_arguments(pipe)
    chosen = (given or built_in_prompts(pipe))[: num or DEFAULT_PROMPTS[effort]]
    budgets = [int(one) if one.isdigit() else one for one in budget] if budget else ["3x", "5x"]
    print_line(f"effort   {effort}: at most {expected_cost(len(chosen), steps, effort, budgets):.0f} generations")
    profile = plan.calibrate(
        pipe,
        chosen,
        steps,
        guidance_scale=guidance,
        batch_size=batch_size,
        seed=seed,
        store=store,
        name=out.stem,
        effort=effort,
        budgets=budgets,
        resume=(unfinished := out.with_suffix(".unfinished")),
        **arguments,
    )
    profile.save(out)
    shutil.rmtree(unfinished, ignore_errors=True)
    cost = dict(profile.facts.cost)
    print_line(f"cost     {cost['generations']:.0f} generations, {cost['seconds']:.0f} s")
    frontier, steps, offset = search_profile(profile).frontier, len(profile.facts.noise), profile.facts.psnr_offset
    for factor in SPEED_UPS:
        choice = frontier[max(min(frontier), int(steps / factor))]
        psnr = "" if offset is None else f", expected PSNR {choice.psnr(offset):.0f} dB (10th percentile)"
        print_line(f"{factor:g}x: {len(choice.computed)} of {steps} steps{psnr}")
    print_line(f"profile  {out}")


@app.command()
@takes_model
def tune(
    profile: Annotated[str, Argument(help="A profile that `holdover calibrate` wrote: a file, or hf://owner/name.")],
    target: Annotated[
        str | None, Option(help="psnr>=40, ssim>=0.98, ...; default: that of --quality, else psnr>=40.")
    ] = None,
    quality: Annotated[
        str | None, Option(help="lossless, high, balanced or draft: certify its target; with --target, set it first.")
    ] = None,
    prompts: Annotated[Path | None, Option(help="A file with one held-out prompt per line; default: built in.")] = None,
    num: Annotated[int, Option(help="Number of prompts.")] = 60,
    confidence: Annotated[float, Option(help="Confidence of the certificate.")] = 0.95,
    share: Annotated[float, Option(help="Fraction of the images that meets the target.")] = 0.95,
    batch_size: Annotated[int, Option(help="Images per batch.")] = 1,
    out: Annotated[Path | None, Option(help="File of the profile with its certificate; default: PROFILE.")] = None,
    report: Annotated[Path | None, Option(help="FILE.html, or a folder: compares plans with all methods.")] = None,
    report_prompts: Annotated[int, Option(help="Number of prompts of the report.")] = 4,
    *,
    model: CallSettings,
) -> None:
    """Find the fastest plan that meets a target on held-out prompts, and write its certificate into the profile.

    Prints the predicted and the measured quality of each plan. With `--report`, the predicted and the measured frontier
    are shown side by side, with every other method and fewer steps with both solvers on the same axes.
    """
    from ..profiles.files import SUFFIX
    from ..profiles.targets import Target, check_quality

    check_range(1, num=num, batch_size=batch_size, report_prompts=report_prompts)
    check_range(0.01, 0.9999, confidence=confidence, share=share)
    if target is not None:
        Target.parsed(target)
    if quality is not None:
        check_quality(quality)
    folder, page = _report_paths(report) if report is not None else (None, None)
    if profile.startswith("hf:") and out is None:
        raise ConfigError("--out is missing: the certificate is written to a file, not to the profile on the Hub.")
    if out is not None and out.suffix != SUFFIX:
        raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
    out = out or Path(profile)
    check_writable(out.parent)

    from .. import plan
    from ..compare import build_frontier_comparison
    from ..loading import load_pipeline
    from ..plan.calls import GENERATIONS, built_in_prompts, prompts_from_file
    from ..profiles import Profile
    from ..report import Prediction

    measured = Profile.load(profile)
    given = prompts_from_file(prompts) if prompts else None
    pipe = load_pipeline(model)
    arguments = model.call_arguments(pipe)
    chosen = (given or built_in_prompts(pipe)[max(GENERATIONS, measured.facts.prompts) :])[:num]
    options: dict[str, Any] = {"quality": quality, "share": share, "batch_size": batch_size}
    found = plan.tune(pipe, measured, chosen, target, confidence, **options, **arguments)
    found.profile.save(out)
    prediction = Prediction.of(found, found.target)
    _print_trials(prediction)
    best = next((one for one in found.tried if found.certificate and one.computed == found.certificate.computed), None)
    if best is not None and best.estimate is not None:
        print_line(best.estimate)
    if folder is not None:
        spec = build_frontier_comparison(Profile.load(out), out, chosen[:report_prompts], batch_size)
        arguments = dict(measured.facts.call) | model.arguments
        spec = replace(spec, arguments=tuple(arguments.items()), image=model.image, fps=model.fps)
        run_and_report(pipe, spec, folder, page, prediction)


def _report_paths(report: Path) -> tuple[Path, Path]:
    """The folder for results and images, and the page; refuses what cannot be written."""
    require_packages("The report", "report", "jinja2", "matplotlib")
    named = report.suffix.lower() in (".html", ".htm")
    folder, page = (report.with_suffix(""), report) if named else (report, report / "report.html")
    if page.is_dir():
        raise ConfigError(f"--report cannot be written: {page} is a folder.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report cannot be written: {folder} is a file.")
    for place in (folder, page.parent):
        check_writable(place)
    return folder, page


def _print_trials(prediction: Prediction) -> None:
    """Every plan that was tried, and the result."""
    from ..report.view import format_trials

    metric = prediction.target.metric
    print_line(f"{'PSNR in dB' if metric == 'psnr' else metric.upper()}, 10th percentile and worst:")
    print_line(f"{'computed':>10}  {'predicted':>9}  {'measured':>8}  {'worst':>6}  images")
    for trial, texts in zip(prediction.trials, format_trials(prediction), strict=True):
        cells = "  ".join(text.rjust(width) for text, width in zip(texts, (10, 9, 8, 6, 6), strict=True))
        print_line(f"{cells}  {'passed' if trial.passed else 'failed'}")
    print_line(prediction.words)
