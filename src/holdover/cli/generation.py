"""The commands that generate images: `holdover generate`, `compare`, `calibrate` and `tune`."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Context, Option

from .. import __version__
from ..errors import ConfigError, HoldoverError
from ..zoo import MODELS
from .application import ModelOption, app, console, load_pipeline, one_line_errors, print_line

if TYPE_CHECKING:
    import torch

    from ..compare import Comparison, ProgressCallback, Results, Row
    from ..report import Prediction
    from ..stats import GenerationStats


@app.command()
def generate(
    prompt: Annotated[str, Argument(help="What to generate: 'red apple, glossy 3d style'.")],
    model: ModelOption = "emoji",
    cache: Annotated[str, Option(help="A caching method: see `holdover methods`.")] = "none",
    settings: Annotated[list[str] | None, Option("--set", help="A setting of the method: key=value.")] = None,
    steps: Annotated[int, Option(help="Denoising steps.")] = 30,
    seed: Annotated[int, Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    num: Annotated[int, Option(help="Number of images.")] = 1,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    out: Annotated[Path, Option(help="Folder for the images.")] = Path("images"),
    compare: Annotated[bool, Option("--compare", help="Generate uncached too; print speed-up and PSNR.")] = False,
) -> None:
    """Generate images and save them as PNG, with their settings in the file."""
    with one_line_errors():
        from ..api import enable
        from ..compare import Comparison, MethodCandidate
        from ..compare.results import prepare_folder
        from ..compare.runner import check_pipeline, generate_images, warm_up
        from ..compare.spec import parse_settings
        from ..metrics import as_images, each, psnr

        check_positive(num=num)
        prompt, given = expand_prompt(model, prompt), parse_settings(settings or [])
        method, seeds = MethodCandidate(cache, tuple(given.items())), tuple(range(seed, seed + num))
        spec = Comparison((prompt,), (method,), seeds, steps, guidance, warmup=2 if compare else 0)
        prepare_folder(out)
        pipe = load_pipeline(model)
        check_pipeline(pipe, spec)
        if compare:
            pipe.set_progress_bar_config(desc="uncached", leave=False)
            warm_up(pipe, spec, steps)
            uncached, before = generate_images(pipe, spec, steps)
        pipe.set_progress_bar_config(desc=cache if cache != "none" else "generating", leave=False)
        with enable(pipe, cache, **given) as backend:
            warm_up(pipe, spec, steps)
            cached, after = generate_images(pipe, spec, steps)
            generation = backend.stats().generations[-1]
        call = {"model": model, "prompt": prompt, "steps": steps, "guidance": guidance, "cache": cache}
        for number, image in zip(seeds, as_images(cached), strict=True):
            print_line(_write_image(image, out, call | {"seed": number, "settings": given}))
        print_line(", ".join([cache, *(f"{key}={value}" for key, value in given.items())]) + ": C computed, h held")
        _print_steps(generation)
        print_line(f"{fmean(after):.2f} s per image")
        if compare:
            worst = min(each(psnr, as_images(uncached), as_images(cached)).tolist())
            quality = "equal images" if worst == float("inf") else f"worst PSNR {worst:.1f} dB"
            print_line(f"{fmean(before):.2f} s uncached: {fmean(before) / fmean(after):.2f}x, {quality}")


def _write_image(image: torch.Tensor, folder: Path, settings: dict[str, Any]) -> Path:
    """Save an image, or a video as an animated PNG, with the settings that generate it again; replaces no file."""
    from PIL.PngImagePlugin import PngInfo

    from ..compare.results import to_pil

    metadata = PngInfo()
    metadata.add_text("Software", f"holdover {__version__}")
    metadata.add_itxt("Description", settings["prompt"])
    metadata.add_itxt("holdover", json.dumps(settings))
    words = re.sub(r"[^a-z0-9]+", "-", settings["prompt"].lower()).strip("-")[:60] or "image"
    stem = f"{words}-seed{settings['seed']}" + ("" if settings["cache"] == "none" else f"-{settings['cache']}")
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in itertools.count(1))
    path = next(path for path in (folder / name for name in names) if not path.exists())
    first, *rest = [to_pil(frame) for frame in (image if image.ndim == 4 else image[None])]
    video: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": 1000 // 16} if rest else {}
    first.save(path, pnginfo=metadata, **video)
    return path


def _print_steps(generation: GenerationStats) -> None:
    """The computed and held steps, by branch."""
    width = max(map(len, generation.branches))
    for branch in generation.branches:
        strip = Text(f"  {branch:<{width}}  ")
        for letter in generation.trace(branch):
            strip.append(letter, "bold cyan" if letter == "C" else "dim")
        strip.append(f"  {generation.computed[branch]} computed, {generation.held[branch]} held")
        console.print(strip, soft_wrap=True)


@app.command()
def compare(
    context: Context,
    study: Annotated[Path | None, Argument(help="A YAML file whose keys are the names of the options.")] = None,
    prompts: Annotated[list[str] | None, Option("--prompt", help="A prompt; repeatable.")] = None,
    methods: Annotated[list[str] | None, Option("--method", help="name or name:key=value,...; repeatable.")] = None,
    seeds: Annotated[list[int] | None, Option("--seed", help="A seed; repeatable.")] = None,
    steps: Annotated[int | None, Option(help="Denoising steps; default: 30.")] = None,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int | None, Option(help="Images per batch; default: 1.")] = None,
    model: Annotated[str | None, Option(help="emoji, a folder, or the id of a checkpoint; default: emoji.")] = None,
    out: Annotated[Path | None, Option(help="Folder for results, images and report; default: comparison.")] = None,
) -> None:
    """Compare methods with uncached images and with fewer steps; write results.json and report.html.

    A run that was interrupted resumes when it is started again.
    """
    with one_line_errors():
        from .. import selector
        from ..compare import from_mapping

        values: dict[str, Any] = _read_yaml(study) if study is not None else {}
        flags = {name: value for name, value in context.params.items() if name != "study"}
        values |= {name: value for name, value in flags.items() if value not in (None, [], ())}  # those that are given
        name, folder = str(values.pop("model", "emoji")), Path(values.pop("out", "comparison"))
        if not values.get("methods"):
            values["methods"] = [method for method in selector.methods() if method != "none"]
        if isinstance(values.get("prompts"), list):
            values["prompts"] = [expand_prompt(name, str(prompt)) for prompt in values["prompts"]]
        spec = from_mapping(values)  # checked before the model is loaded
        run_and_report(load_pipeline(name), spec, folder)


def run_and_report(
    pipe: Any, spec: Comparison, folder: Path, page: Path | None = None, prediction: Prediction | None = None
) -> None:
    """Run a comparison with progress on the terminal, and write its report into the folder, or to `page`."""
    from ..compare import compare as run_comparison
    from ..report import write_report

    results = run_comparison(pipe, spec, folder, _terminal_progress(pipe))
    report = write_report(results, folder, "report.html" if page is None else page.absolute(), prediction)
    print_line(results)
    for what, path in (("report", report), ("results", folder / "results.json"), ("images", folder / "images")):
        print_line(f"{what:<9}{path}")


def _terminal_progress(pipe: Any) -> ProgressCallback:
    """A callback that labels the pipeline's progress bar and prints a line for each candidate that is done."""
    from ..compare import ProgressCallback

    started: set[str] = set()

    class TerminalProgress(ProgressCallback):
        def on_start(self, label: str, steps: int) -> None:
            started.add(label)
            pipe.set_progress_bar_config(desc=f"{label:<28}", leave=False)

        def on_finish(self, row: Row, results: Results) -> None:
            text = f"failed: {row.error}" if row.error is not None else f"{row.mean_seconds:6.2f} s per image"
            if row.error is None and row.kind != "reference":
                text += f"  {results.speedup(row):5.2f}x"
            print_line(f"{row.label:<28} {text}{'' if row.label in started else '  (from an earlier run)'}")

    return TerminalProgress()


def _read_yaml(path: Path) -> dict[str, Any]:
    """The keys of a YAML file."""
    try:
        import yaml
    except ImportError:
        raise HoldoverError("A YAML file needs pyyaml: pip install 'holdover[report]'.") from None
    try:
        values = yaml.safe_load(path.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        problem = f"{getattr(error, 'problem', error)} (line {mark.line + 1})." if mark else error
        raise ConfigError(f"{path} is not YAML: {problem}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must have keys such as prompts, methods and steps.")
    return values


@app.command()
def calibrate(
    model: ModelOption = "emoji",
    prompts: Annotated[Path | None, Option(help="A file with one prompt per line; default: built in.")] = None,
    num: Annotated[int, Option(help="Number of prompts.")] = 4,
    steps: Annotated[int, Option(help="Denoising steps; plans for fewer steps are derived.")] = 50,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int, Option(help="Images per batch.")] = 1,
    seed: Annotated[int, Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    store: Annotated[str, Option(help="Where outputs are stored meanwhile: device, cpu or disk.")] = "device",
    out: Annotated[Path, Option(help="File of the profile.")] = Path("profile.safetensors"),
) -> None:
    """Measure the constants of all methods on a few uncached images, and write them to a profile."""
    with one_line_errors():
        from .. import plan
        from ..compare.baselines import SPEED_UPS
        from ..plan.calls import built_in_prompts, prompts_from_file
        from ..plan.planner import search_profile
        from ..profiles.profile import SUFFIX

        if out.suffix != SUFFIX:
            raise ConfigError(f"--out must end in {SUFFIX}, not {out.name!r}.")
        if out.exists():
            raise ConfigError(f"{out} already exists; give another --out.")
        check_positive(num=num)
        given = prompts_from_file(prompts) if prompts else None
        pipe = load_pipeline(model)
        chosen = (given or built_in_prompts(pipe))[:num]
        profile = plan.calibrate(
            pipe, chosen, steps, guidance_scale=guidance, batch_size=batch_size, seed=seed, store=store, name=out.stem
        )
        profile.save(out)
        frontier, steps, offset = search_profile(profile).frontier, len(profile.facts.noise), profile.facts.psnr_offset
        for factor in SPEED_UPS:
            choice = frontier[max(min(frontier), int(steps / factor))]
            psnr = "" if offset is None else f", expected PSNR {choice.psnr(offset):.0f} dB (10th percentile)"
            print_line(f"{factor:g}x: {len(choice.computed)} of {steps} steps{psnr}")
        print_line(f"profile  {out}")


@app.command()
def tune(
    profile: Annotated[Path, Argument(help="A profile that `holdover calibrate` wrote.")],
    target: Annotated[str, Option(help="psnr>=40, ssim>=0.98, ...")] = "psnr>=40",
    model: ModelOption = "emoji",
    prompts: Annotated[Path | None, Option(help="A file with one held-out prompt per line; default: built in.")] = None,
    num: Annotated[int, Option(help="Number of prompts.")] = 60,
    confidence: Annotated[float, Option(help="Confidence of the certificate.")] = 0.95,
    share: Annotated[float, Option(help="Fraction of the images that meets the target.")] = 0.95,
    batch_size: Annotated[int, Option(help="Images per batch.")] = 1,
    report: Annotated[Path | None, Option(help="FILE.html, or a folder: compares plans with all methods.")] = None,
    report_prompts: Annotated[int, Option(help="Number of prompts of the report.")] = 4,
) -> None:
    """Find the fastest plan that meets a target on held-out prompts, and write its certificate into the profile.

    Prints the predicted and the measured quality of each plan. With `--report`, the predicted and the measured frontier
    are shown side by side, with every other method and fewer steps with both solvers on the same axes.
    """
    with one_line_errors():
        from .. import plan
        from ..compare import build_frontier_comparison
        from ..plan.calls import built_in_prompts, prompts_from_file
        from ..plan.config import Target
        from ..profiles import Profile
        from ..report import Prediction

        Target.parsed(target)
        check_positive(num=num, report_prompts=report_prompts)
        folder, page = _report_paths(report) if report is not None else (None, None)
        measured = Profile.load(profile)
        given = prompts_from_file(prompts) if prompts else None
        pipe = load_pipeline(model)
        chosen = (given or built_in_prompts(pipe)[measured.facts.prompts :])[:num]
        found = plan.tune(pipe, measured, chosen, target, confidence, share=share, batch_size=batch_size)
        found.profile.save(profile)
        prediction = Prediction.of(found, target)
        _print_trials(prediction)
        if folder is not None:
            spec = build_frontier_comparison(Profile.load(profile), profile, chosen[:report_prompts], batch_size)
            run_and_report(pipe, spec, folder, page, prediction)


def _report_paths(report: Path) -> tuple[Path, Path]:
    """The folder for results and images, and the page; refuses paths that cannot be written."""
    named = report.suffix.lower() in (".html", ".htm")
    folder, page = (report.with_suffix(""), report) if named else (report, report / "report.html")
    if page.is_dir():
        raise ConfigError(f"--report cannot be written: {page} is a folder.")
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"--report cannot be written: {folder} is a file.")
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


def check_positive(**values: int) -> None:
    """Refuse numbers below 1; the names are those of the flags."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"--{name.replace('_', '-')} must be 1 or more, not {value}.")


def expand_prompt(model: str, prompt: str) -> str:
    """The prompt, if it is not empty; for the emoji model with the name of its style expanded to its phrase."""
    if not prompt.strip():
        raise ConfigError("The prompt is empty; say what to generate, for example 'red apple, glossy 3d style'.")
    if model not in MODELS:
        return prompt
    from ..zoo.emoji import STYLES, caption

    subject, comma, style = (part.strip() for part in prompt.rpartition(","))
    return caption(subject, style) if comma and (style in STYLES or style.endswith("style")) else prompt
