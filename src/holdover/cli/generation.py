"""The commands that generate images: `holdover generate` and `holdover compare`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from .. import __version__
from ..errors import ConfigError, HoldoverError
from .application import (
    ModelOption,
    app,
    check_positive,
    console,
    expand_prompt,
    load_pipeline,
    one_line_errors,
    print_line,
)

if TYPE_CHECKING:
    import torch

    from ..compare import Comparison, MethodCandidate, ProgressCallback, Results, Row
    from ..compare.generation import TimedOutput
    from ..report import Prediction
    from ..stats import GenerationStats

# holdover generate.


@app.command()
def generate(
    prompt: Annotated[str, typer.Argument(help="What to generate: 'red apple, glossy 3d style'.")],
    model: ModelOption = "emoji",
    cache: Annotated[str, typer.Option(help="A caching method: see `holdover methods`.")] = "none",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the method: key=value.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    num: Annotated[int, typer.Option(help="Number of images.")] = 1,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default: the model's own.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the images.")] = Path("images"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Generate without the cache too, and print speed-up and PSNR.")
    ] = False,
) -> None:
    """Generate images and save them as PNG, with their settings in the file."""
    with one_line_errors():
        from ..compare import Comparison, MethodCandidate
        from ..compare.results import prepare_folder
        from ..compare.spec import parse_settings

        check_positive(num=num)
        prompt = expand_prompt(model, prompt)
        method = MethodCandidate(cache, tuple(parse_settings(settings or []).items()))
        seeds = tuple(range(seed, seed + num))
        spec = Comparison((prompt,), (method,), seeds, steps, guidance, warmup=2 if compare else 0)
        prepare_folder(out)
        _generate(load_pipeline(model), spec, method, compare, ImageWriter(out, model))


class ImageWriter:
    """Writes images of one model into a folder; existing files are never replaced."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def write(self, image: torch.Tensor, index: int, spec: Comparison, method: MethodCandidate) -> Path:
        """Save one image, or one video as an animated PNG, with all settings needed to generate it again."""
        from PIL.PngImagePlugin import PngInfo

        from ..compare.results import to_pil

        prompt, seed = spec.images[index]
        settings = {"model": self.model, "prompt": prompt, "seed": seed, "steps": spec.steps, "guidance": spec.guidance}
        settings |= {"cache": method.name, "settings": dict(method.settings)}
        metadata = PngInfo()
        metadata.add_text("Software", f"holdover {__version__}")
        metadata.add_itxt("Description", prompt)
        metadata.add_itxt("holdover", json.dumps(settings))
        words = re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "image"
        stem = f"{words}-seed{seed}" + ("" if method.name == "none" else f"-{method.name}")
        names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in range(1, 10_000))
        path = next(path for path in (self.folder / name for name in names) if not path.exists())
        first, *rest = [to_pil(frame) for frame in (image if image.ndim == 4 else image[None])]
        video: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": 1000 // 16} if rest else {}
        first.save(path, pnginfo=metadata, **video)
        return path


def _generate(pipe: Any, spec: Comparison, method: MethodCandidate, compared: bool, writer: ImageWriter) -> None:
    from ..api import enable
    from ..compare.generation import check_arguments, generate_images, warm_up
    from ..metrics import as_images

    check_arguments(pipe, spec)
    uncached = None
    if compared:
        pipe.set_progress_bar_config(desc="uncached", leave=False)
        warm_up(pipe, spec, spec.steps)
        uncached = generate_images(pipe, spec, spec.steps, lambda done: None)
    generations: list[GenerationStats] = []
    pipe.set_progress_bar_config(desc=method.name if method.name != "none" else "generating", leave=False)
    with enable(pipe, method.name, **dict(method.settings)) as cache:
        warm_up(pipe, spec, spec.steps)
        cached = generate_images(
            pipe, spec, spec.steps, lambda done: generations.extend(cache.stats().generations[-1:])
        )
    for index, image in enumerate(as_images(cached.output)):
        print_line(writer.write(image, index, spec, method))
    _print_steps(method, generations[-1])
    _print_time(cached, uncached)


def _print_steps(method: MethodCandidate, generation: GenerationStats) -> None:
    """The computed and held steps of the last image, by branch."""
    settings = ", ".join(f"{key}={value}" for key, value in method.settings)
    print_line(f"{method.name}{f', {settings}' if settings else ''}: C computed, h held")
    width = max(map(len, generation.branches))
    for branch in generation.branches:
        strip = Text(f"  {branch:<{width}}  ")
        for letter in generation.trace(branch):
            strip.append(letter, "bold cyan" if letter == "C" else "dim")
        strip.append(f"  {generation.computed[branch]} computed, {generation.held[branch]} held")
        console.print(strip, soft_wrap=True)


def _print_time(cached: TimedOutput, uncached: TimedOutput | None) -> None:
    """Seconds per image, and the speed-up and PSNR of the cache."""
    from ..metrics import as_images, each, psnr

    seconds = fmean(cached.seconds)
    print_line(f"{seconds:.2f} s per image")
    if uncached is None:
        return
    before = fmean(uncached.seconds)
    worst = min(each(psnr, as_images(uncached.output), as_images(cached.output)).tolist())
    quality = "equal images" if worst == float("inf") else f"worst PSNR {worst:.1f} dB"
    print_line(f"{before:.2f} s uncached: {before / seconds:.2f}x, {quality}")


# holdover compare.


@app.command()
def compare(
    study: Annotated[Path | None, typer.Argument(help="A YAML file whose keys are the names of the options.")] = None,
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="A prompt; repeatable.")] = None,
    methods: Annotated[
        list[str] | None, typer.Option("--method", help="name or name:key=value,...; repeatable.")
    ] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="A seed; repeatable.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps; default: 30.")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per batch; default: 1.")] = None,
    model: Annotated[
        str | None, typer.Option(help="emoji, a folder, or the id of a checkpoint; default: emoji.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for results, images and report; default: comparison.")
    ] = None,
) -> None:
    """Compare methods with uncached images and with fewer steps; write results.json and report.html.

    A run that was interrupted resumes when it is started again.
    """
    flags = {
        "prompts": prompts or None,
        "methods": methods or None,
        "seeds": seeds or None,
        "steps": steps,
        "guidance": guidance,
        "batch_size": batch_size,
        "model": model,
        "out": out,
    }
    with one_line_errors():
        from .. import selector
        from ..compare import from_mapping

        values: dict[str, Any] = _read_yaml(study) if study is not None else {}
        values |= {name: value for name, value in flags.items() if value is not None}
        name, folder = str(values.pop("model", "emoji")), Path(values.pop("out", "comparison"))
        if not values.get("methods"):
            values["methods"] = [method for method in selector.methods() if method != "none"]
        if isinstance(values.get("prompts"), list):
            values["prompts"] = [expand_prompt(name, str(prompt)) for prompt in values["prompts"]]
        spec = from_mapping(values)
        run_and_report(load_pipeline(name), spec, folder)


def run_and_report(
    pipe: Any, spec: Comparison, folder: Path, page: Path | None = None, prediction: Prediction | None = None
) -> None:
    """Run a comparison with progress on the terminal, and write its report into the folder, or to `page`.

    With a `prediction`, the report shows the PSNR that was expected of plans next to the measured one.
    """
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
            if row.error is not None:
                text = f"failed: {row.error}"
            else:
                speed = "" if row.kind == "reference" else f"  {results.speedup(row):5.2f}x"
                text = f"{row.mean_seconds:6.2f} s per image{speed}"
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
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else 1
        raise ConfigError(f"{path} is not YAML: {error.problem} (line {line}).") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise ConfigError(f"{path} must have keys such as prompts, methods and steps.")
    return values
