"""`holdover calibrate`: measure a model once, for every method."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from .failing import one_line_errors
from .loading import load_pipeline

if TYPE_CHECKING:
    from ..profiles import Profile

console = Console()
_BUDGETS = (6, 5, 4, 3, 2.5, 2)  # of the frontier that is printed, as speed-ups


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
        from ..errors import ConfigError
        from ..plan import calibrate as measured
        from ..plan.calls import built_in_prompts, prompts_from_file

        _check_profile_path(out)
        if num < 1:
            raise ConfigError(f"--num must be 1 or more, not {num}.")
        given = None if prompts is None else prompts_from_file(prompts)
        pipe = load_pipeline(model)
        chosen = (built_in_prompts(pipe) if given is None else given)[:num]
        profile = measured(
            pipe, chosen, steps, guidance_scale=guidance, batch_size=batch_size, seed=seed, store=store, name=out.stem
        )
        profile.save(out)
        _print_frontier(profile)
        console.print(f"profile  {out}", highlight=False, soft_wrap=True)


def _check_profile_path(out: Path) -> None:
    from ..errors import ConfigError
    from ..profiles.profile import SUFFIX

    if out.suffix != SUFFIX:
        raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
    if out.exists():
        raise ConfigError(f"{out} is there already; give another --out.")


def _print_frontier(profile: Profile) -> None:
    """What plans are expected to keep."""
    from ..plan.planner import search_profile

    frontier, steps = search_profile(profile).frontier, len(profile.facts.noise)
    offset = profile.facts.psnr_offset
    for factor in _BUDGETS:
        choice = frontier[max(min(frontier), int(steps / factor))]
        expected = "" if offset is None else f", expected to keep {choice.psnr(offset):.0f} dB in nine pictures of ten"
        console.print(f"{factor:g}x: {len(choice.computed)} of {steps} steps{expected}", highlight=False)
