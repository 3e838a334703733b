"""`holdover compare`: prompts, methods and settings against the uncached pictures of the same seeds."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..errors import ConfigError, HoldoverError
from .failing import one_line_errors
from .loading import checked_prompt, load_pipeline

if TYPE_CHECKING:
    from ..compare import Comparison
    from ..report import Prediction

console = Console()
DEFAULT_FOLDER = Path("comparison")
Many = list[str] | None


def compare(
    study: Annotated[Path | None, typer.Argument(help="A YAML file with the same names as the options.")] = None,
    prompts: Annotated[Many, typer.Option("--prompt", help="A prompt; may be given again.")] = None,
    methods: Annotated[Many, typer.Option("--method", help="name or name:key=value,...; may be given again.")] = None,
    seeds: Annotated[list[int] | None, typer.Option("--seed", help="A seed; may be given again.")] = None,
    steps: Annotated[int | None, typer.Option(help="Denoising steps (30).")] = None,
    guidance: Annotated[float | None, typer.Option(help="Guidance scale; the model's own without it.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Pictures at a time (1).")] = None,
    model: Annotated[str | None, typer.Option(help="emoji, a folder, or a checkpoint's id.")] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for results, pictures and report (comparison).")] = None,
) -> None:
    """Measure methods beside the uncached pictures and beside fewer steps; write results.json and report.html.

    A run that was stopped goes on where it was when it is started again.
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
        given = {name: value for name, value in flags.items() if value is not None}
        values = (_read(study) if study is not None else {}) | given
        name, folder = str(values.pop("model", "emoji")), Path(values.pop("out", DEFAULT_FOLDER))
        spec = _spec(values, name)
        run_and_report(load_pipeline(name), spec, folder)


def run_and_report(
    pipe: Any, spec: Comparison, folder: Path, page: Path | None = None, prediction: Prediction | None = None
) -> None:
    """Run a comparison with its progress on the terminal, and write its report into the folder, or as `page`.

    With a `prediction` the report has what was expected of plans beside what was measured.
    """
    from ..compare import compare as run
    from ..report import write_report
    from .progress import Progress

    results = run(pipe, spec, folder, Progress(pipe, console))
    report = write_report(results, folder, "report.html" if page is None else page.absolute(), prediction)
    console.print(str(results), highlight=False, soft_wrap=True)
    for what, path in (("report", report), ("figures", folder / "results.json"), ("pictures", folder / "pictures")):
        console.print(f"{what:<9}{path}", highlight=False, soft_wrap=True)


def _spec(values: Mapping[str, Any], model: str) -> Comparison:
    from ..compare import from_mapping
    from ..selector import methods

    values = dict(values)
    if not values.get("methods"):
        values["methods"] = [name for name in methods() if name != "none"]
    if isinstance(values.get("prompts"), list):
        values["prompts"] = [checked_prompt(model, str(prompt)) for prompt in values["prompts"]]
    return from_mapping(values)


def _read(path: Path) -> dict[str, Any]:
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
