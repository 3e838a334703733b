"""One comparison as frozen values: what is drawn, and with what. Knows no pipeline."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, did_you_mean
from .candidates import Candidate, Custom, FewerSteps, Method, parse_method

_OUTPUTS = ("pt", "latent")
_CLOCKS = ("wall", "cpu")
_SET_BY_US = ("prompt", "generator", "num_inference_steps", "guidance_scale", "output_type", "return_dict", "latents")


@dataclass(frozen=True)
class Comparison:
    """Every prompt with every seed, without a cache and under each candidate.

    `arguments` are further arguments of the pipeline, such as height, width and num_frames. `guidance` is its
    `guidance_scale`; None leaves the pipeline's own. `output` is "pt" for pictures or "latent" where nothing decodes
    them. `warmup` steps run before each candidate and are not timed, for the first generation checks the cut; before a
    custom candidate a whole generation runs. With 0 nothing does. `clock` is "wall", or "cpu" for the processor's time
    on one thread, which other work on the machine does not stretch. `baselines` are fewer steps of both orders at every
    number of steps that a candidate came to; without them only those run that are candidates themselves.
    """

    prompts: tuple[str, ...]
    candidates: tuple[Candidate, ...] = ()
    seeds: tuple[int, ...] = (0,)
    steps: int = 30
    guidance: float | None = None
    arguments: tuple[tuple[str, Any], ...] = ()
    batch_size: int = 1
    output: str = "pt"
    warmup: int = 2
    clock: str = "wall"
    baselines: bool = True

    def __post_init__(self) -> None:
        for name in ("prompts", "candidates", "seeds"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        object.__setattr__(self, "arguments", _pairs(self.arguments))
        _check(self)

    @property
    def images(self) -> tuple[tuple[str, int], ...]:
        """The prompt and the seed of every picture, in order."""
        return tuple((prompt, seed) for prompt in self.prompts for seed in self.seeds)

    def settings(self) -> dict[str, Any]:
        """All but what says which rows there are, as plain JSON values: rows belong together where these are equal."""
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("candidates", "baselines")]
        values = {name: getattr(self, name) for name in names} | {"arguments": dict(self.arguments)}
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


def from_mapping(values: Mapping[str, Any]) -> Comparison:
    """A comparison from the keys of a file; `methods` lists names with settings, `fewer_steps` lists numbers."""
    fields = [field.name for field in dataclasses.fields(Comparison) if field.name != "candidates"]
    check_keys(values, [*fields, "methods", "fewer_steps"], "A comparison")
    if "prompts" not in values:
        raise ConfigError("A comparison needs prompts: a list of at least one.")
    rest: dict[str, Any] = {key: value for key, value in values.items() if key not in ("methods", "fewer_steps")}
    for name in ("prompts", "seeds"):
        if name in rest:
            rest[name] = tuple(_listed(name, rest[name]))
    candidates: list[Candidate] = [_method(entry) for entry in _listed("methods", values.get("methods", []))]
    for steps in _listed("fewer_steps", values.get("fewer_steps", [])):
        _whole("fewer_steps", steps)
        candidates += [FewerSteps(steps), FewerSteps(steps, second_order=True)]
    return Comparison(**rest, candidates=tuple(candidates))


def check_keys(values: Mapping[str, Any], known: list[str], owner: str) -> None:
    """Refuse the first key that is not known, and name the nearest."""
    for key in values:
        if key not in known:
            hint = did_you_mean(key, known) or f" Known: {', '.join(known)}."
            raise ConfigError(f"{owner} has no {key!r}.{hint}")


def _method(entry: Any) -> Method:
    """`tea_cache`, `tea_cache:rel_l1_thresh=0.1`, or `{tea_cache: {rel_l1_thresh: 0.1}}`."""
    if isinstance(entry, str):
        return parse_method(entry)
    if isinstance(entry, Mapping) and len(entry) == 1:
        ((name, settings),) = entry.items()
        if settings is None or isinstance(settings, Mapping):
            return Method(name, tuple((settings or {}).items()))
    raise ConfigError(f"A method is written as name, name:key=value or {{name: {{key: value}}}}, not {entry!r}.")


def _pairs(arguments: Any) -> tuple[tuple[str, Any], ...]:
    """Arguments in the order of their names, from a mapping or from pairs."""
    try:
        return tuple(sorted(dict(arguments).items()))
    except (TypeError, ValueError):
        raise ConfigError(f"arguments must be a mapping of names to values, not {arguments!r}.") from None


def _listed(name: str, value: Any) -> list[Any]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{name} must be a list, not {value!r}.")
    return list(value)


def _check(spec: Comparison) -> None:
    if not spec.prompts or not all(isinstance(prompt, str) and prompt.strip() for prompt in spec.prompts):
        raise ConfigError("A comparison needs at least one prompt, and none may be empty.")
    if not spec.seeds:
        raise ConfigError("A comparison needs at least one seed.")
    for seed in spec.seeds:
        _whole("seeds", seed, least=0)
    for name, least in (("steps", 1), ("batch_size", 1), ("warmup", 0)):
        _whole(name, getattr(spec, name), least)
    if spec.guidance is not None and not _finite(spec.guidance):
        raise ConfigError(f"guidance must be a number from 0 up, not {spec.guidance!r}.")
    for name, choices in (("output", _OUTPUTS), ("clock", _CLOCKS)):
        if getattr(spec, name) not in choices:
            raise ConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(spec, name)!r}.")
    if not isinstance(spec.baselines, bool):
        raise ConfigError(f"baselines must be true or false, not {spec.baselines!r}.")
    for key, _ in spec.arguments:
        if key in _SET_BY_US:
            raise ConfigError(f"{key!r} is set by the comparison itself and cannot be an argument.")
    _check_distinct(spec.candidates)


def _check_distinct(candidates: tuple[Candidate, ...]) -> None:
    seen: set[str] = set()
    for candidate in candidates:
        if not isinstance(candidate, (Method, FewerSteps, Custom)):
            raise ConfigError(f"A candidate is a Method, FewerSteps or Custom, not {candidate!r}.")
        if candidate.label in seen:
            raise ConfigError(f"Two candidates are called {candidate.label!r}.")
        seen.add(candidate.label)


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _whole(name: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be a whole number from {least} up, not {value!r}.")
