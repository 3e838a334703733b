"""`holdover generate`: pictures from a prompt, with a cache or without."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from .. import __version__
from .failing import one_line_errors
from .loading import checked_prompt, load_pipeline

if TYPE_CHECKING:
    import torch

    from ..compare import Comparison, Method
    from ..compare.draw import Drawn
    from ..stats import GenerationStats

console = Console()


def generate(
    prompt: Annotated[str, typer.Argument(help="What to draw: 'red apple, glossy 3d style'.")],
    model: Annotated[str, typer.Option(help="emoji, a folder, or a checkpoint's id.")] = "emoji",
    cache: Annotated[str, typer.Option(help="A caching method: see `holdover methods`.")] = "none",
    settings: Annotated[list[str] | None, typer.Option("--set", help="A setting of the method: key=value.")] = None,
    steps: Annotated[int, typer.Option(help="Denoising steps.")] = 30,
    seed: Annotated[int, typer.Option(help="Seed of the first picture; the others follow it.")] = 0,
    num: Annotated[int, typer.Option(help="How many pictures.")] = 1,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the model's own without it.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for the pictures.")] = Path("pictures"),
    compare: Annotated[
        bool, typer.Option("--compare", help="Draw without the cache too, and say what it costs.")
    ] = False,
) -> None:
    """Draw pictures and save them as PNG, with their settings in the file."""
    with one_line_errors():
        from ..compare import Comparison, Method
        from ..compare.candidates import parse_settings
        from ..errors import ConfigError

        if num < 1:
            raise ConfigError(f"--num must be 1 or more, not {num}.")
        prompt = checked_prompt(model, prompt)
        method = Method(cache, tuple(parse_settings(settings or []).items()))
        seeds = tuple(range(seed, seed + num))
        spec = Comparison((prompt,), (method,), seeds, steps, guidance, warmup=2 if compare else 0)
        _writable(out)
        _generate(load_pipeline(model), spec, method, compare, Saved(out, model))


class Saved:
    """Writes pictures of one model into one folder; a file that is there is never replaced."""

    def __init__(self, folder: Path, model: str) -> None:
        self.folder, self.model = folder, model

    def __call__(self, image: torch.Tensor, index: int, spec: Comparison, method: Method) -> Path:
        """Save one picture, or one video as a moving PNG, with all that is needed to draw it again."""
        from PIL.PngImagePlugin import PngInfo

        from ..compare.folder import as_picture

        prompt, seed = spec.images[index]
        text = PngInfo()
        text.add_text("Software", f"holdover {__version__}")
        text.add_itxt("Description", prompt)
        text.add_itxt("holdover", json.dumps(self._facts(prompt, seed, spec, method)))
        path = self._free(_slug(prompt), seed, method.name)
        first, *rest = [as_picture(frame) for frame in (image if image.ndim == 4 else image[None])]
        moving: dict[str, Any] = {"save_all": True, "append_images": rest, "duration": 1000 // 16} if rest else {}
        first.save(path, pnginfo=text, **moving)
        return path

    def _facts(self, prompt: str, seed: int, spec: Comparison, method: Method) -> dict[str, Any]:
        drawn = {"model": self.model, "prompt": prompt, "seed": seed, "steps": spec.steps, "guidance": spec.guidance}
        return drawn | {"cache": method.name, "settings": dict(method.settings)}

    def _free(self, words: str, seed: int, method: str) -> Path:
        stem = f"{words}-seed{seed}" + ("" if method == "none" else f"-{method}")
        names = (f"{stem}{'' if number == 1 else f'-{number}'}.png" for number in range(1, 10_000))
        return next(path for path in (self.folder / name for name in names) if not path.exists())


def _generate(pipe: Any, spec: Comparison, method: Method, compared: bool, saved: Saved) -> None:
    from ..api import enable
    from ..compare.draw import check_arguments, draw, warm_up
    from ..metrics import as_images

    check_arguments(pipe, spec)
    generations: list[GenerationStats] = []
    plain = _plain(pipe, spec) if compared else None
    pipe.set_progress_bar_config(desc=method.name if method.name != "none" else "drawing", leave=False)
    with enable(pipe, method.name, **dict(method.settings)) as cache:
        warm_up(pipe, spec, spec.steps)
        drawn = draw(pipe, spec, spec.steps, lambda done: generations.extend(cache.stats().generations[-1:]))
    for index, image in enumerate(as_images(drawn.output)):
        console.print(f"{saved(image, index, spec, method)}", highlight=False, soft_wrap=True)
    _print_trace(method, generations[-1])
    _print_time(drawn, plain)


def _plain(pipe: Any, spec: Comparison) -> Drawn:
    from ..compare.draw import draw, warm_up

    pipe.set_progress_bar_config(desc="uncached", leave=False)
    warm_up(pipe, spec, spec.steps)
    return draw(pipe, spec, spec.steps, lambda done: None)


def _print_trace(method: Method, generation: GenerationStats) -> None:
    """The strip of the last picture: which steps were computed and which held, by branch."""
    shown = ", ".join(f"{key}={value}" for key, value in method.settings)
    console.print(f"{method.name}{f', {shown}' if shown else ''}: C computed, h held", highlight=False, soft_wrap=True)
    width = max(map(len, generation.branches))
    for branch in generation.branches:
        strip = Text(f"  {branch:<{width}}  ")
        for letter in generation.trace(branch):
            strip.append(letter, "bold cyan" if letter == "C" else "dim")
        strip.append(f"  {generation.computed[branch]} computed, {generation.held[branch]} held")
        console.print(strip, soft_wrap=True)


def _print_time(drawn: Drawn, plain: Drawn | None) -> None:
    """Seconds a picture, and what the cache saved and cost."""
    from statistics import fmean

    from ..metrics import as_images, each, psnr

    seconds = fmean(drawn.seconds)
    console.print(f"{seconds:.2f} s a picture", highlight=False)
    if plain is None:
        return
    before = fmean(plain.seconds)
    values = each(psnr, as_images(plain.output), as_images(drawn.output)).tolist()
    near = "equal to it" if min(values) == float("inf") else f"{min(values):.1f} dB from it at worst (PSNR)"
    console.print(f"{before:.2f} s uncached: {before / seconds:.2f}x, {near}", highlight=False)


def _slug(prompt: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", prompt.lower()).strip("-")[:60] or "picture"


def _writable(folder: Path) -> None:
    """Make the folder, and find out before drawing whether it can be written."""
    folder.mkdir(parents=True, exist_ok=True)
    probe = folder / ".writable"
    probe.touch()
    probe.unlink()
