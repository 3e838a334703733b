"""`holdover calibrate` and `holdover tune`: measure a model once, then find the fastest plan that is good enough."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from .failing import one_line_errors
from .loading import load_pipeline

if TYPE_CHECKING:
    from ..compare import Comparison
    from ..profiles import Profile
    from ..tuning import Tuned

console = Console()
_BUDGETS = (6, 5, 4, 3, 2.5, 2)  # of the frontier that is drawn, as speed-ups
_PEERS = {
    "tea_cache": [{"rel_l1_thresh": threshold} for threshold in (0.05, 0.1, 0.15, 0.2)],
    "mag_cache": [{"mag_threshold": threshold} for threshold in (0.06, 0.12, 0.24)],
    "cache_dit": [
        {"residual_diff_threshold": threshold, "enable_taylorseer": taylor}
        for threshold in (0.12, 0.24)
        for taylor in (False, True)
    ],
}


def calibrate(
    model: Annotated[str, typer.Option(help="emoji, a folder, or a checkpoint's id.")] = "emoji",
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt a line; a built-in list without.")] = None,
    num: Annotated[int, typer.Option(help="How many of the prompts.")] = 4,
    steps: Annotated[int, typer.Option(help="Denoising steps; plans for fewer are derived.")] = 50,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the model's own without it.")] = None,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the first picture; the others follow it.")] = 0,
    store: Annotated[str, typer.Option(help="Where outputs wait: device, cpu or disk.")] = "device",
    out: Annotated[Path, typer.Option(help="The profile that is written.")] = Path("profile.safetensors"),
) -> None:
    """Measure everything every method needs, on a few uncached pictures, and write a profile."""
    with one_line_errors():
        from ..calibration import calibrate as measured
        from ..calibration.prompts import built_in, from_file
        from ..errors import ConfigError

        _check_profile_path(out)
        if num < 1:
            raise ConfigError(f"--num must be 1 or more, not {num}.")
        given = None if prompts is None else from_file(prompts)
        pipe = load_pipeline(model)
        chosen = (built_in(pipe) if given is None else given)[:num]
        profile = measured(
            pipe, chosen, steps, guidance_scale=guidance, batch_size=batch_size, seed=seed, store=store, name=out.stem
        )
        profile.save(out)
        _print_frontier(profile)
        console.print(f"profile  {out}", highlight=False, soft_wrap=True)


def tune(
    profile: Annotated[Path, typer.Argument(help="What `holdover calibrate` wrote.")],
    target: Annotated[str, typer.Option(help="psnr>=40, ssim>=0.98, ...")] = "psnr>=40",
    model: Annotated[str, typer.Option(help="emoji, a folder, or a checkpoint's id.")] = "emoji",
    prompts: Annotated[Path | None, typer.Option(help="Held-back prompts, one a line; else built in.")] = None,
    num: Annotated[int, typer.Option(help="How many of the prompts.")] = 60,
    confidence: Annotated[float, typer.Option(help="How sure the certificate is.")] = 0.95,
    share: Annotated[float, typer.Option(help="The part of pictures that meets the target.")] = 0.95,
    batch_size: Annotated[int, typer.Option(help="Pictures at a time.")] = 1,
    report: Annotated[Path | None, typer.Option(help="Folder for a report beside the other methods.")] = None,
    report_prompts: Annotated[int, typer.Option(help="How many of the prompts the report draws.")] = 4,
) -> None:
    """Find the fastest plan that keeps a target on held-back prompts, and write its certificate into the profile.

    With `--report` the expected and the measured quality of plans are drawn beside every other method and beside fewer
    steps.
    """
    with one_line_errors():
        from ..calibration.prompts import built_in, from_file
        from ..plan.target import Target
        from ..profiles import Profile
        from ..tuning import tune as tuned

        Target.parsed(target)
        measured = Profile.load(profile)
        given = None if prompts is None else from_file(prompts)
        pipe = load_pipeline(model)
        chosen = (built_in(pipe)[measured.facts.prompts :] if given is None else given)[:num]
        found = tuned(pipe, measured, chosen, target, confidence, share=share, batch_size=batch_size)
        found.profile.save(profile)
        _print_tried(found)
        if report is not None:
            _report(pipe, found.profile, profile, chosen[:report_prompts], report)


def _check_profile_path(out: Path) -> None:
    from ..errors import ConfigError
    from ..profiles.measured import SUFFIX

    if out.suffix != SUFFIX:
        raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
    if out.exists():
        raise ConfigError(f"{out} is there already; give another --out.")


def _print_frontier(profile: Profile) -> None:
    """What plans are expected to keep."""
    from ..tuning.setting import planner_for

    frontier, steps = planner_for(profile).frontier, len(profile.facts.noise)
    offset = profile.facts.psnr_offset
    for factor in _BUDGETS:
        choice = frontier[max(1, int(steps / factor))]
        expected = "" if offset is None else f", expected to keep {choice.psnr(offset):.0f} dB in nine pictures of ten"
        console.print(f"{factor:g}x: {len(choice.computed)} of {steps} steps{expected}", highlight=False)


def _print_tried(found: Tuned) -> None:
    for tried in found.tried:
        worst, expected = min(tried.values), "" if tried.expected is None else f", expected {tried.expected:.1f}"
        word = "passed" if tried.passed else "failed"
        console.print(f"{len(tried.computed):3d} steps: worst {worst:.1f}{expected}: {word}", highlight=False)
    console.print(str(found), highlight=False, soft_wrap=True)


def _report(pipe: Any, profile: Profile, path: Path, prompts: list[str], folder: Path) -> None:
    """Draw the frontier of plans beside every other method."""
    from ..tuning.setting import planner_for
    from .compare import run_and_report

    spec = _frontier_spec(profile, path, prompts)
    offset, frontier = profile.facts.psnr_offset, planner_for(profile).frontier
    expected = {
        f"plan {budget}": frontier[budget].psnr(offset)
        for budget in _budgets(profile)
        if offset is not None and frontier[budget].cost > 0
    }
    run_and_report(pipe, spec, folder, expected)


def _budgets(profile: Profile) -> list[int]:
    return sorted({max(2, int(len(profile.facts.noise) / factor)) for factor in _BUDGETS})


def _frontier_spec(profile: Profile, path: Path, prompts: list[str]) -> Comparison:
    from ..compare import Comparison, Method

    plans = [Method("plan", (("budget", b), ("profile", str(path))), f"plan {b}") for b in _budgets(profile)]
    peers = [Method(name, tuple(settings.items())) for name, many in _PEERS.items() for settings in many]
    return Comparison(tuple(prompts), (*plans, *peers), steps=len(profile.facts.noise), guidance=profile.facts.guidance)
