"""The commands that generate images and videos: `holdover generate` and `compare`."""

from __future__ import annotations

import itertools
import json
import re
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

from rich.text import Text
from typer import Argument, Context, Option

from .. import __version__
from ..config import parse_settings
from ..errors import ConfigError, HoldoverError
from ..loading import CallSettings, require_packages
from ..zoo import MODELS
from .application import app, console, print_line
from .options import check_range, check_room, check_writable, takes_model

if TYPE_CHECKING:
    import torch

    from ..compare import Comparison, ProgressCallback, Results, Row
    from ..report import Prediction
    from ..stats import GenerationStats


_VIDEOS = (".mp4", ".gif", ".webp")  # as video.FORMATS, which imports torch
_OTHER_FILES = (  # endings that mean a file; with any other one, as in run-0.1, it is a folder
    *(".avi", ".mov", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ogv"),
    *(".png", ".apng", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".avif", ".heic"),
)


@app.command()
@takes_model
def generate(
    prompt: Annotated[str, Argument(help="What to generate: 'red apple, glossy 3d style'.")],
    cache: Annotated[
        str | None, Option(help="A caching method: see `holdover methods`; default: none, or plan with --quality.")
    ] = None,
    settings: Annotated[list[str] | None, Option("--set", help="A setting of the method: key=value.")] = None,
    quality: Annotated[
        str | None, Option(help="lossless, high, balanced or draft: --cache plan --set quality=QUALITY.")
    ] = None,
    steps: Annotated[int, Option(help="Denoising steps.")] = 30,
    seed: Annotated[int, Option(help="Seed of the first image; the next images have the next seeds.")] = 0,
    num: Annotated[int, Option(help="Number of images.")] = 1,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    out: Annotated[Path, Option(help="Folder for the images, or a video file: clip.mp4, clip.gif, clip.webp.")] = Path(
        "images"
    ),
    compare: Annotated[bool, Option("--compare", help="Generate uncached too; print speed-up and quality.")] = False,
    *,
    model: CallSettings,
) -> None:
    """Generate images and save them as PNG, or a video as MP4, GIF or WebP, with their settings in the file."""
    from ..compare.spec import Comparison, MethodCandidate
    from ..profiles.targets import check_quality
    from ..selector import check_settings

    check_range(1, num=num)
    is_video = out.suffix.lower() in _VIDEOS
    if out.suffix.lower() in _OTHER_FILES and not out.is_dir():
        formats = " or ".join(_VIDEOS)
        raise ConfigError(f"{out} is in no format that is written: give a {formats} file for a video, else a folder.")
    if is_video and num > 1:
        raise ConfigError(f"{out} is one video file: give a folder for --num {num}, or generate one.")
    if is_video and out.exists():
        raise ConfigError(f"{out} exists already; no file is replaced.")
    if out.suffix.lower() == ".mp4":
        require_packages("An MP4 file", "video", "av")
    if quality is not None:
        check_quality(quality)
        if cache not in (None, "plan"):
            raise ConfigError(f"--quality is a setting of plan: leave --cache {cache} or --quality out.")
        cache, settings = "plan", [*(settings or []), f"quality={quality}"]
    cache, given = cache or "none", parse_settings(settings or [])
    check_settings(cache, given)  # before torch is imported
    folder = out.parent if is_video else out
    check_writable(folder)
    prompt = expand_prompt(model.model, prompt)
    method, seeds = MethodCandidate(cache, tuple(given.items())), tuple(range(seed, seed + num))
    spec = Comparison(
        (prompt,),
        (method,),
        seeds,
        steps,
        guidance,
        tuple(model.arguments.items()),
        image=model.image,
        fps=model.fps,
        warmup=2 if compare else 0,
    )

    from ..api import enable
    from ..compare.results import prepare_folder
    from ..compare.runner import ReferenceMetrics, check_pipeline, find_rate, generate_batches, get_device, warm_up
    from ..loading import load_pipeline
    from ..metrics import as_images
    from ..plan.calls import makes_videos
    from ..video import VideoFile, stream_frames

    pipe = load_pipeline(model)
    check_pipeline(pipe, spec)
    if is_video and not makes_videos(pipe):
        raise ConfigError(f"{type(pipe).__name__} generates images, not videos: give a folder as --out.")
    fps = find_rate(pipe, spec)
    prepare_folder(folder)
    check_room(folder, num * count_values(pipe, spec))
    call = {"model": model.model, "prompt": prompt, "steps": steps, "guidance": guidance, "cache": cache}
    call = model.changed | call | {"settings": given} | ({"fps": fps} if makes_videos(pipe) else {})
    uncached, before, cached, after = list[Any](), list[float](), list[Any](), list[float]()
    if compare:
        pipe.set_progress_bar_config(desc="uncached", leave=False)
        warm_up(pipe, spec, steps)
        for output, took in generate_batches(pipe, spec, steps):
            uncached.append(output[0])
            before.append(took)
    pipe.set_progress_bar_config(desc=cache if cache != "none" else "generating", leave=False)
    with ExitStack() as stack:
        backend = stack.enter_context(enable(pipe, cache, **given))
        warm_up(pipe, spec, steps)
        file = stack.enter_context(VideoFile(out, fps, json.dumps(call | {"seed": seed}))) if is_video else None
        # Frames are written as they are decoded; a comparison needs them all.
        streamed = file is not None and not compare and stack.enter_context(stream_frames(pipe, file.add))
        for number, (output, took) in zip(seeds, generate_batches(pipe, spec, steps), strict=True):
            after.append(took)
            if compare:
                cached.append(output[0])
            if file is None:
                print_line(_write_image(as_images(output)[0], out, call | {"seed": number}))
            elif not streamed:
                for frame in as_images(output)[0]:
                    file.add(frame)
        generation = backend.stats().generations[-1]
    if is_video:
        print_line(out)
    print_line(", ".join([cache, *(f"{key}={value}" for key, value in given.items())]) + ": C computed, h held")
    _print_steps(generation)
    for note in generation.notes:
        print_line(note)
    noun = "video" if makes_videos(pipe) else "image"
    print_line(f"{fmean(after):.2f} s per {noun}")
    if compare:
        metrics = ReferenceMetrics(uncached, spec.output, get_device(pipe))
        quality = _describe_quality([metrics.measure(number, image) for number, image in enumerate(cached)])
        print_line(f"{fmean(before):.2f} s uncached: {fmean(before) / fmean(after):.2f}x, {quality}")


def _describe_quality(values: list[dict[str, float]]) -> str:
    """The worst value of each metric, and of a video the frame with it."""
    from ..metrics import METRICS

    worst = min(values, key=lambda entry: entry["psnr"])
    if worst["psnr"] == float("inf"):
        return "equal videos" if "worst_frame" in worst else "equal images"
    quality = f"worst PSNR {worst['psnr']:.1f} dB"
    for name, choose in (("ssim", min), ("lpips", max)):
        if name in worst:
            quality += f", {METRICS[name].title} {choose(entry[name] for entry in values):.4f}"
    return quality + (f", worst frame {int(worst['worst_frame']) + 1}" if "worst_frame" in worst else "")


def _write_image(image: torch.Tensor, folder: Path, settings: dict[str, Any]) -> Path:
    """Save an image, or a video as an animated PNG, with the settings that generate it again; replaces no file."""
    from PIL.PngImagePlugin import PngInfo

    from ..compare.results import to_pil
    from ..profiles.files import replace_file

    metadata = PngInfo()
    metadata.add_text("Software", f"holdover {__version__}")
    metadata.add_itxt("Description", settings["prompt"])
    metadata.add_itxt("holdover", json.dumps(settings))
    words = re.sub(r"[^a-z0-9]+", "-", settings["prompt"].lower()).strip("-")[:60] or "image"
    stem = f"{words}-seed{settings['seed']}" + ("" if settings["cache"] == "none" else f"-{settings['cache']}")
    names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in itertools.count(1))
    path = next(path for path in (folder / name for name in names) if not path.exists())
    first, *rest = [to_pil(frame) for frame in (image if image.ndim == 4 else image[None])]
    video: dict[str, Any] = {}
    if rest:
        video = {"save_all": True, "append_images": rest, "duration": round(1000 / settings["fps"])}
    with replace_file(path) as new:
        first.save(new, "PNG", pnginfo=metadata, **video)
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
@takes_model
def compare(
    context: Context,
    study: Annotated[Path | None, Argument(help="A YAML file whose keys are the names of the options.")] = None,
    prompts: Annotated[list[str] | None, Option("--prompt", help="A prompt; repeatable.")] = None,
    methods: Annotated[list[str] | None, Option("--method", help="name or name:key=value,...; repeatable.")] = None,
    seeds: Annotated[list[int] | None, Option("--seed", help="A seed; repeatable.")] = None,
    steps: Annotated[int | None, Option(help="Denoising steps; default: 30.")] = None,
    guidance: Annotated[float | None, Option(help="Guidance scale; default: the model's own.")] = None,
    batch_size: Annotated[int | None, Option(help="Images per batch; default: 1.")] = None,
    out: Annotated[Path, Option(help="Folder for results, images and report.")] = Path("comparison"),
    *,
    model: CallSettings,
) -> None:
    """Compare methods with uncached images or videos and with fewer steps; write results.json and report.html.

    A run that was interrupted resumes when it is started again.
    """
    from .. import selector
    from ..compare.spec import from_mapping

    require_packages("The report", "report", "jinja2", "matplotlib")
    read: dict[str, Any] = _read_yaml(study) if study is not None else {}
    sources = {name: context.get_parameter_source(name) for name in context.params}
    flags = {name for name, source in sources.items() if source is not None and source.name != "DEFAULT"}
    values = read | {name: value for name, value in context.params.items() if name in flags - {"study"}}
    of_model = {name: values.pop(name) for name in CallSettings.field_names() if name in values}
    model = model.replaced(**of_model)
    model.check_model()
    folder = Path(values.pop("out", out))
    check_writable(folder)
    if not values.get("methods"):
        values["methods"] = [method for method in selector.methods() if method != "none"]
    if isinstance(values.get("arguments", {}), dict):
        values["arguments"] = values.get("arguments", {}) | model.arguments
    values |= {name: value for name in ("image", "fps") if (value := getattr(model, name)) is not None}
    if isinstance(values.get("prompts"), list):
        values["prompts"] = [expand_prompt(model.model, str(prompt)) for prompt in values["prompts"]]
    spec = from_mapping(values)  # checked before the model is loaded

    from ..compare.runner import check_pipeline
    from ..loading import load_pipeline

    pipe = load_pipeline(model)
    check_pipeline(pipe, spec)
    run_and_report(pipe, spec, folder)


def run_and_report(
    pipe: Any, spec: Comparison, folder: Path, page: Path | None = None, prediction: Prediction | None = None
) -> None:
    """Run a comparison with progress on the terminal, and write its report into the folder, or to `page`."""
    from ..compare import compare as run_comparison
    from ..compare.results import prepare_folder
    from ..plan.calls import makes_videos
    from ..report import write_report

    prepare_folder(folder)
    rows = 1 + len(spec.candidates) * (3 if spec.baselines else 1)
    each = 0.2 if makes_videos(pipe) else 2  # bytes per value of an image or clip and its difference
    check_room(folder, len(spec.images) * count_values(pipe, spec) * (4 + each * rows))  # 4 for floats
    results = run_comparison(pipe, spec, folder, _terminal_progress(pipe))
    report = write_report(results, folder, "report.html" if page is None else page.absolute(), prediction)
    print_line(results)
    for what, path in (("report", report), ("results", folder / "results.json"), ("images", folder / "images")):
        print_line(f"{what:<9}{path}")


def count_values(pipe: Any, spec: Comparison) -> int:
    """The number of values of one image or video."""
    from ..loading import image_size
    from ..plan.calls import defaults_of

    width, height = image_size(pipe)
    arguments = {name: value for name, value in defaults_of(pipe).items() if isinstance(value, int)}
    arguments |= dict(spec.arguments)
    frames = int(arguments.get("num_frames", 1))
    return 3 * frames * int(arguments.get("width", width)) * int(arguments.get("height", height))


def _terminal_progress(pipe: Any) -> ProgressCallback:
    """A callback that labels the pipeline's progress bar and prints a line for each candidate that is done."""
    from ..compare import ProgressCallback

    started: set[str] = set()

    class TerminalProgress(ProgressCallback):
        def on_start(self, label: str, steps: int) -> None:
            started.add(label)
            pipe.set_progress_bar_config(desc=f"{label:<28}", leave=False)

        def on_finish(self, row: Row, results: Results) -> None:
            text = f"failed: {row.error}" if row.error is not None else f"{row.mean_seconds:6.2f} s per {results.noun}"
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


def expand_prompt(model: str, prompt: str) -> str:
    """The prompt, if it is not empty; for the emoji model with the name of its style expanded to its phrase."""
    if not prompt.strip():
        raise ConfigError("The prompt is empty; say what to generate, for example 'red apple, glossy 3d style'.")
    if model not in MODELS:
        return prompt
    from ..zoo.emoji import STYLES, caption

    subject, comma, style = (part.strip() for part in prompt.rpartition(","))
    return caption(subject, style) if comma and (style in STYLES or style.endswith("style")) else prompt
