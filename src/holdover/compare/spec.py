"""What a comparison generates, and with what: the candidates and the comparison itself. Knows no pipeline."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, Field, PlainValidator, TypeAdapter, ValidationError

from ..base import CacheBackend
from ..config import Config
from ..errors import ConfigError, did_you_mean
from ..selector import own_config

Strips = Mapping[str, str]
"""By branch, one letter per forward of a generation: `C` computed, `h` held."""
StripSource = CacheBackend | Callable[[], Strips] | None

# Candidates.


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
        self.config()

    def config(self) -> Config:
        """The config of the method; unknown names and values out of range raise a ConfigError."""
        return own_config(self.name, dict(self.settings))

    @property
    def label(self) -> str:
        """Its name in tables, such as `mag_cache 0.06 / 3`."""
        values = " / ".join(_format_setting(key, value) for key, value in self._json_settings().items())
        return self.title or f"{self.name} {values}".strip()

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        series = {"series": self.series} if self.series else {}
        return {"kind": "method", "label": self.label, "name": self.name, "settings": self._json_settings()} | series

    def _json_settings(self) -> dict[str, Any]:
        """The given settings after a round trip through JSON, so that what is read equals what was written."""
        values = self.config().as_dict()
        plain: dict[str, Any] = json.loads(json.dumps({key: values[key] for key, _ in self.settings}))
        return plain


@dataclass(frozen=True)
class FewerSteps:
    """No cache but fewer steps, with the pipeline's scheduler or with a second-order solver."""

    steps: int
    second_order: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.steps, bool) or not isinstance(self.steps, int) or self.steps < 1:
            raise ConfigError(f"fewer_steps must be a whole number of at least 1, not {self.steps!r}.")

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.steps} steps, second order" if self.second_order else f"{self.steps} steps"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        kind = "second_order" if self.second_order else "fewer_steps"
        return {"kind": kind, "label": self.label, "steps": self.steps}


@dataclass(frozen=True)
class Custom:
    """Any other candidate: `context(pipe)` returns a context manager, and images are generated inside it.

    What the context manager yields reports the computed steps: a holdover cache, a function that returns a strip for
    each branch (`{"cond": "ChhC"}`) of the latest generation, or None where they are unknown. The label identifies the
    candidate in result files.
    """

    label: str
    context: Callable[[Any], AbstractContextManager[StripSource]] = field(compare=False)
    series: str = ""

    def __post_init__(self) -> None:
        if not self.label.strip():
            raise ConfigError("A custom candidate needs a label.")

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
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


def parse_settings(entries: Iterable[str]) -> dict[str, Any]:
    """`["key=value", ...]` as settings; a value that is no JSON is taken as a string."""
    settings: dict[str, Any] = {}
    for entry in entries:
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not equals or not key:
            raise ConfigError(f"A setting is written key=value, not {entry!r}.")
        if key in settings:
            raise ConfigError(f"The setting {key!r} is given twice.")
        try:
            settings[key] = json.loads(value)
        except json.JSONDecodeError:
            settings[key] = value
    return settings


def _format_setting(key: str, value: Any) -> str:
    """A setting in a label: its value, the name of a switch, or the length of a list."""
    if isinstance(value, bool):
        return key if value else f"no {key}"
    if isinstance(value, (list, dict)):
        return f"{key} of {len(value)}"
    return f"{value:g}" if isinstance(value, float) else str(value)


# The comparison.

_RESERVED = ("prompt", "generator", "num_inference_steps", "guidance_scale", "output_type", "return_dict", "latents")


def _check_prompts(prompts: tuple[str, ...]) -> tuple[str, ...]:
    if not prompts or not all(prompt.strip() for prompt in prompts):
        raise ConfigError("A comparison needs at least one prompt, and none may be empty.")
    return prompts


def _check_candidates(candidates: Iterable[Any]) -> tuple[Candidate, ...]:
    candidates, labels = tuple(candidates), set()
    for candidate in candidates:
        if not isinstance(candidate, Candidate):
            raise ConfigError(f"A candidate is a MethodCandidate, FewerSteps or Custom, not {candidate!r}.")
        if candidate.label in labels:
            raise ConfigError(f"Two candidates are called {candidate.label!r}.")
        labels.add(candidate.label)
    return candidates


def _sort_arguments(arguments: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments ordered by name, from a mapping or from pairs."""
    try:
        pairs = tuple(sorted(dict(arguments).items()))
    except (TypeError, ValueError):
        raise ConfigError(f"arguments must be a mapping of names to values, not {arguments!r}.") from None
    for key, _ in pairs:
        if key in _RESERVED:
            raise ConfigError(f"{key!r} is set by the comparison itself and cannot be an argument.")
    return pairs


Count = Annotated[int, Field(strict=True, ge=1)]
CountOrZero = Annotated[int, Field(strict=True, ge=0)]


@dataclass(frozen=True)
class Comparison:
    """Every prompt with every seed, without a cache and with each candidate.

    `arguments` are more arguments of the pipeline, such as height, width and num_frames. `guidance` is its
    `guidance_scale`; None keeps its default. `output` is "pt" for images, or "latent" to skip decoding. `warmup` is the
    number of untimed steps before each candidate, because the first generation verifies the cut; a custom candidate is
    warmed up with a whole generation, and with 0 nothing is. `clock` is "wall", or "cpu" for the CPU time of one
    thread, which is independent of the load on the machine. `baselines` adds fewer steps, with both solvers, at every
    number of steps that a candidate computed; without it only those run that are candidates themselves.
    """

    prompts: Annotated[tuple[Annotated[str, Field(strict=True)], ...], AfterValidator(_check_prompts)]
    candidates: Annotated[tuple[Candidate, ...], PlainValidator(_check_candidates)] = ()
    seeds: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] = (0,)
    steps: Count = 30
    guidance: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] | None = None
    arguments: Annotated[tuple[tuple[str, Any], ...], PlainValidator(_sort_arguments)] = ()
    batch_size: Count = 1
    output: Literal["pt", "latent"] = "pt"
    warmup: CountOrZero = 2
    clock: Literal["wall", "cpu"] = "wall"
    baselines: Annotated[bool, Field(strict=True)] = True

    def __post_init__(self) -> None:
        for name, adapter in _adapters().items():
            try:
                object.__setattr__(self, name, adapter.validate_python(getattr(self, name)))
            except ValidationError as error:
                raise _config_error(name, error) from None

    @property
    def images(self) -> tuple[tuple[str, int], ...]:
        """The prompt and the seed of every image, in order."""
        return tuple((prompt, seed) for prompt in self.prompts for seed in self.seeds)

    def settings(self) -> dict[str, Any]:
        """Everything but the choice of rows, as plain JSON values: rows with equal settings can share a table."""
        names = [field.name for field in fields(self) if field.name not in ("candidates", "baselines")]
        values = {name: getattr(self, name) for name in names} | {"arguments": dict(self.arguments)}
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


def from_mapping(values: Mapping[str, Any]) -> Comparison:
    """A comparison from the keys of a file; `methods` lists methods with settings, `fewer_steps` lists numbers."""
    known = [field.name for field in fields(Comparison) if field.name != "candidates"] + ["methods", "fewer_steps"]
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            raise ConfigError(f"A comparison has no {key!r}.{hint}")
    if "prompts" not in values:
        raise ConfigError("A comparison needs prompts: a list of at least one.")
    for name in ("prompts", "seeds", "methods", "fewer_steps"):
        if not isinstance(values.get(name, []), (list, tuple)):
            raise ConfigError(f"{name} must be a list, not {values[name]!r}.")
    candidates: list[Candidate] = [_parse_entry(entry) for entry in values.get("methods", [])]
    for steps in values.get("fewer_steps", []):
        candidates += [FewerSteps(steps), FewerSteps(steps, second_order=True)]
    rest: dict[str, Any] = {key: value for key, value in values.items() if key not in ("methods", "fewer_steps")}
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


@cache
def _adapters() -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(Comparison, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name]) for field in fields(Comparison)}


def _config_error(name: str, error: ValidationError) -> ConfigError:
    """The first problem of a field in one line: `steps must be greater than or equal to 1, not 0.`"""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Exception):
        return ConfigError(str(cause))
    wanted = first["msg"].partition(" should ")[2].replace("tuple", "list").removesuffix(" after validation, not 0")
    return ConfigError(f"{name} must {wanted}, not {first['input']!r}.")
