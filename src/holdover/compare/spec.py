"""What a comparison generates, and with what: the candidates and the comparison itself. Knows no pipeline."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from ..base import CacheBackend
from ..config import parse_settings
from ..errors import ConfigError, did_you_mean
from ..selector import own_config

Strips = Mapping[str, str]  # by branch, one letter per forward of a generation: `C` computed, `h` held
StripSource = CacheBackend | Callable[[], Strips] | None


@dataclass(frozen=True)
class MethodCandidate:
    """A caching method by name, with the settings that differ from its defaults.

    `title` is its label in tables. Candidates of one `series`, by default the method's name, share a line in plots.
    """

    name: str
    settings: tuple[tuple[str, Any], ...] = ()
    title: str = ""
    series: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "settings", tuple(dict(self.settings).items()))
        self._json_settings()

    @property
    def label(self) -> str:
        """Its name in tables, such as `mag_cache 0.06 / 3`: values, names of switches and lengths of lists."""
        values = []
        for key, value in self._json_settings().items():
            if isinstance(value, bool):
                values.append(key if value else f"no {key}")
            elif isinstance(value, (list, dict)):
                values.append(f"{key} of {len(value)}")
            else:
                values.append(f"{value:g}" if isinstance(value, float) else str(value))
        return self.title or f"{self.name} {' / '.join(values)}".strip()

    def as_dict(self) -> dict[str, Any]:
        series = {"series": self.series} if self.series else {}
        return {"kind": "method", "label": self.label, "name": self.name, "settings": self._json_settings()} | series

    def _json_settings(self) -> dict[str, Any]:
        """The given settings, checked, after a round trip through JSON: what is read equals what was written."""
        values = own_config(self.name, dict(self.settings)).as_dict()
        return dict(json.loads(json.dumps({key: values[key] for key, _ in self.settings})))


@dataclass(frozen=True)
class FewerSteps:
    """No cache but fewer steps, with the pipeline's scheduler or with a second-order solver."""

    steps: int
    second_order: bool = False

    def __post_init__(self) -> None:
        _check_whole("fewer_steps", self.steps, 1)

    @property
    def label(self) -> str:
        return f"{self.steps} steps, second order" if self.second_order else f"{self.steps} steps"

    def as_dict(self) -> dict[str, Any]:
        kind = "second_order" if self.second_order else "fewer_steps"
        return {"kind": kind, "label": self.label, "steps": self.steps}


@dataclass(frozen=True)
class Custom:
    """Any other candidate: `context(pipe)` returns a context manager, and images are generated inside it.

    It yields what reports the computed steps: a holdover cache, a function that returns a strip for each branch
    (`{"cond": "ChhC"}`) of the latest generation, or None. The label identifies the candidate in result files.
    """

    label: str
    context: Callable[[Any], AbstractContextManager[StripSource]] = field(compare=False)
    series: str = ""

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ConfigError("A custom candidate needs a label.")

    def as_dict(self) -> dict[str, Any]:
        return {"kind": "custom", "label": self.label} | ({"series": self.series} if self.series else {})


Candidate = MethodCandidate | FewerSteps | Custom


def parse_method(text: str) -> MethodCandidate:
    """`tea_cache:rel_l1_thresh=0.15` as a candidate; several settings are comma-separated."""
    name, _, rest = text.partition(":")
    entries, depth = [""], 0
    for character in rest:  # split at commas outside of brackets: `a=1,b=[1,2]`
        depth += (character in "[{") - (character in "]}")
        if character == "," and depth == 0:
            entries.append("")
        else:
            entries[-1] += character
    return MethodCandidate(name.strip(), tuple(parse_settings(entry for entry in entries if entry.strip()).items()))


# The comparison.

_LARGEST_SEED = 2**64 - 1  # of torch.Generator
_RESERVED = ("prompt", "generator", "num_inference_steps", "guidance_scale", "output_type", "return_dict", "latents")


@dataclass(frozen=True)
class Comparison:
    """Every prompt with every seed, without a cache and with each candidate.

    `arguments` are more arguments of the pipeline, such as height, width and num_frames. `image` is the file of an
    image that every generation starts from; without height and width, a video gets its aspect ratio. `fps` is the rate
    of videos, also for pipelines that generate motion for a rate; None is the model's own. `guidance` is the pipeline's
    `guidance_scale`; None keeps its default. `output` is "pt" for images, or "latent" to skip decoding. `warmup` is the
    number of untimed steps before each candidate, because the first one verifies the cache; a custom candidate is
    warmed up with a whole generation, and with 0 nothing is. `clock` is "wall", or "cpu" for the CPU time of one
    thread, which is independent of the load on the machine. `baselines` adds fewer steps, with both solvers (one, if
    the pipeline's scheduler is no flow-matching Euler), at every number of steps that a candidate computed;
    without it only those run that are candidates themselves.
    """

    prompts: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    seeds: tuple[int, ...] = (0,)
    steps: int = 30
    guidance: float | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    image: str | None = None
    fps: float | None = None
    batch_size: int = 1
    output: Literal["pt", "latent"] = "pt"
    warmup: int = 2
    clock: Literal["wall", "cpu"] = "wall"
    baselines: bool = True

    def __post_init__(self) -> None:
        for name in ("prompts", "candidates", "seeds"):
            object.__setattr__(self, name, _check_list(name, getattr(self, name)))
        if not self.prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in self.prompts):
            raise ConfigError("A comparison needs at least one prompt; each is a text, and none may be empty.")
        labels = set()
        for candidate in self.candidates:
            if not isinstance(candidate, Candidate):
                raise ConfigError(f"A candidate is a MethodCandidate, FewerSteps or Custom, not {candidate!r}.")
            if candidate.label in labels:
                raise ConfigError(f"Two candidates are called {candidate.label!r}.")
            labels.add(candidate.label)
        if not self.seeds:
            raise ConfigError("seeds must have at least 1 item.")
        for seed in self.seeds:
            _check_whole("seeds", seed, 0, _LARGEST_SEED)
        for limit in (("steps", self.steps, 1), ("batch_size", self.batch_size, 1), ("warmup", self.warmup, 0)):
            _check_whole(*limit)
        number = isinstance(self.guidance, (int, float)) and not isinstance(self.guidance, bool)
        if self.guidance is not None and not (number and math.isfinite(self.guidance) and self.guidance >= 0):
            raise ConfigError(f"guidance must be a finite number of at least 0, not {self.guidance!r}.")
        if self.fps is not None and not (isinstance(self.fps, (int, float)) and 1 <= self.fps <= 240):
            raise ConfigError(f"fps must be a number from 1 to 240, not {self.fps!r}.")
        for name, value, a, b in (("output", self.output, "pt", "latent"), ("clock", self.clock, "wall", "cpu")):
            if value not in (a, b):
                raise ConfigError(f"{name} must be {a!r} or {b!r}, not {value!r}.")
        if not isinstance(self.baselines, bool):
            raise ConfigError(f"baselines must be true or false, not {self.baselines!r}.")
        try:
            object.__setattr__(self, "arguments", tuple(sorted(dict(self.arguments).items())))
        except (TypeError, ValueError):
            raise ConfigError(f"arguments must be a mapping of names to values, not {self.arguments!r}.") from None
        for key, _ in self.arguments:
            if key in _RESERVED:
                raise ConfigError(f"{key!r} is set by the comparison itself and cannot be an argument.")

    @property
    def images(self) -> tuple[tuple[str, int], ...]:
        """The prompt and the seed of every image, in order."""
        return tuple((prompt, seed) for prompt in self.prompts for seed in self.seeds)

    def settings(self) -> dict[str, Any]:
        """Everything but the choice of rows, as plain JSON values: rows with equal settings can share a table.

        The image is there with a hash of its file.
        """
        names = [field.name for field in fields(self) if field.name not in ("candidates", "baselines")]
        values = {name: getattr(self, name) for name in names} | {"arguments": dict(self.arguments)}
        if self.image is not None:
            path = Path(self.image).expanduser()
            values["image"] = f"{path.name}, sha256 {hashlib.sha256(path.read_bytes()).hexdigest()[:12]}"
        return dict(json.loads(json.dumps(values)))


def from_mapping(values: Mapping[str, Any]) -> Comparison:
    """A comparison from the keys of a file; `methods` lists methods with settings, `fewer_steps` lists numbers."""
    known = [field.name for field in fields(Comparison) if field.name != "candidates"] + ["methods", "fewer_steps"]
    for key in (key for key in values if key not in known):
        hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
        raise ConfigError(f"A comparison has no {key!r}.{hint}")
    if "prompts" not in values:
        raise ConfigError("A comparison needs prompts: a list of at least one.")
    rest = dict(values)
    candidates: list[Candidate] = [_parse_entry(entry) for entry in _check_list("methods", rest.pop("methods", ()))]
    for steps in _check_list("fewer_steps", rest.pop("fewer_steps", ())):
        candidates += [FewerSteps(steps), FewerSteps(steps, second_order=True)]
    return Comparison(**rest, candidates=tuple(candidates))


def _parse_entry(entry: Any) -> MethodCandidate:
    """`tea_cache`, `tea_cache:rel_l1_thresh=0.1`, or `{tea_cache: {rel_l1_thresh: 0.1}}`."""
    if isinstance(entry, str):
        return parse_method(entry)
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, settings),) = entry.items()
        if settings is None or isinstance(settings, Mapping):
            return MethodCandidate(name, tuple((settings or {}).items()))
    raise ConfigError(f"A method is written as name, name:key=value or {{name: {{key: value}}}}, not {entry!r}.")


def _check_list(name: str, value: Any) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} must be a list, not {value!r}.")
    return tuple(value)


def _check_whole(name: str, value: Any, least: int, most: int | None = None) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or value < least or (most is not None and value > most):
        limits = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} must be a whole number {limits}, not {value!r}.")
