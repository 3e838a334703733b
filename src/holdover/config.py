"""Settings as frozen dataclasses: declared once with `setting`, checked on construction, convertible to and from JSON.

This module knows nothing about torch, models or methods. pydantic checks the values; it is imported when the
first config is constructed, so that `import holdover` and `holdover --help` do not load it.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import typing
from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from typing_extensions import TypeVar

from .errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from pydantic import TypeAdapter

_OUT_OF_RANGE = {"greater_than", "greater_than_equal", "less_than_equal", "finite_number", "literal_error"}


def setting(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    choices: tuple[Any, ...] | None = None,
    doc: str = "",
) -> Any:
    """Declare a config field with its default, its allowed values and one line of documentation."""
    allowed = {"ge": ge, "gt": gt, "le": le, "choices": choices}
    return dataclasses.field(default=default, metadata={"allowed": allowed, "doc": doc})


def allowed_values(field: dataclasses.Field[Any]) -> str:
    """The allowed values of a field in words: `at least 0 and at most 1`; empty if it has no limits."""
    allowed = field.metadata.get("allowed", {})
    if allowed.get("choices"):
        return "one of " + ", ".join(repr(c) for c in allowed["choices"])
    words = {"ge": "at least", "gt": "more than", "le": "at most"}
    bounds = [f"{text} {allowed[key]:g}" for key, text in words.items() if allowed.get(key) is not None]
    return " and ".join(bounds)


def describe_setting(field: dataclasses.Field[Any]) -> str:
    """What a setting does, its allowed values and its default, in one line."""
    limits = [allowed_values(field), f"default {field.default!r}"]
    return f"{field.metadata.get('doc', '')} ({'; '.join(filter(None, limits))})".strip()


def check_names(config: str, keys: Iterable[str], known: Collection[str]) -> None:
    """Raise ConfigError for a key that is not among the settings of a config class; names the nearest one."""
    for key in (key for key in keys if key not in known):
        hint = did_you_mean(key, known) or (f" Known settings: {', '.join(known)}." if known else " It has none.")
        raise ConfigError(f"{config} has no setting {key!r}.{hint}")


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


@dataclasses.dataclass(frozen=True)
class Config:
    """Base class of all configs. Values are checked on construction; an invalid one raises ConfigError.

    Lists, arrays and tensors become tuples, mappings become tuples of (key, value) pairs, and an int becomes a float
    where one is declared. Nothing else is converted: a bool is not a number, "1" is not 1.
    """

    method: ClassVar[str] = ""  # name in `holdover.enable`
    color: ClassVar[str] = "grey"  # color of its series in reports: a name in the page's style sheet
    constants: ClassVar[str] = ""  # the setting that replaces the constants of a profile; empty where it uses none
    vllm_omni: ClassVar[str] = ""  # name of its cache backend in vLLM-Omni; empty where it is not offered

    def __init_subclass__(cls) -> None:
        """Append every setting to the docstring, inherited ones first, for `help` and editors."""
        bases = [base for base in reversed(cls.__bases__) if issubclass(base, Config)]
        inherited = {field.name: field for base in bases for field in dataclasses.fields(base)}
        fields = inherited | {name: f for name, f in vars(cls).items() if isinstance(f, dataclasses.Field)}
        if cls.__doc__ and fields:
            lines = "".join(f"\n        {name}: {describe_setting(field)}" for name, field in fields.items())
            cls.__doc__ = f"{cls.__doc__.rstrip()}\n\n    Settings:{lines}\n    "

    @property
    def batchable(self) -> bool:
        """Whether every decision depends on the step alone, so that requests may share a generation."""
        return False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _validated(type(self), field, getattr(self, field.name)))

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """The names of all settings."""
        return tuple(f.name for f in dataclasses.fields(cls))

    @classmethod
    def settings(cls) -> tuple[dataclasses.Field[Any], ...]:
        """The declared settings, with default, allowed values and documentation."""
        return dataclasses.fields(cls)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Build from a mapping; an unknown key is an error that names the nearest valid one."""
        cls.check_keys(values)
        return cls(**values)

    @classmethod
    def check_keys(cls, keys: Iterable[str]) -> None:
        """Raise ConfigError for a key that is not a setting; names the nearest valid one."""
        check_names(cls.__name__, keys, cls.field_names())

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Build from a JSON object; malformed text is an error, it never yields the defaults."""
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f'This is not JSON: {error}. Write an object like {{"rel_l1_thresh": 0.2}}.') from None
        if not isinstance(values, dict):
            raise ConfigError(f"Settings must be a JSON object, not {type(values).__name__}.")
        return cls.from_dict(values)

    def as_dict(self) -> dict[str, Any]:
        """The settings as plain JSON values; a profile is given by its name."""
        return {f.name: _plain(getattr(self, f.name)) for f in dataclasses.fields(self)}

    def replaced(self, **changes: Any) -> Self:
        """A copy with some settings changed; unknown names are errors."""
        self.check_keys(changes)
        return dataclasses.replace(self, **changes)


ConfigT = TypeVar("ConfigT", bound=Config, default=Any)  # of a backend; a bare `CacheBackend` has any config


def _validated(cls: type[Config], field: dataclasses.Field[Any], value: Any) -> Any:
    """A value in the type of its field, or a ConfigError that says which values are allowed."""
    from pydantic import ValidationError

    try:
        return _validators(cls)[field.name].validate_python(value)  # type: ignore[arg-type]  # classes are hashable
    except ValidationError as error:
        kinds = {entry["type"] for entry in error.errors()}
    if kinds <= _OUT_OF_RANGE:
        wanted, given = allowed_values(field), repr(value)
        if "finite_number" in kinds:
            wanted = f"a finite number of {wanted}" if wanted else "a finite number"
    else:
        annotated = typing.get_type_hints(cls)[field.name]
        wanted = str(annotated).replace("typing.", "") if typing.get_origin(annotated) else annotated.__name__
        given = f"{value!r} ({type(value).__name__})"
    choices = field.metadata.get("allowed", {}).get("choices") or ()
    hint = did_you_mean(value, [choice for choice in choices if choice is not None])
    raise ConfigError(f"{cls.__name__}.{field.name} must be {wanted}, not {given}.{hint}")


@functools.cache
def _validators(cls: type) -> dict[str, TypeAdapter[Any]]:
    """A strict pydantic validator for each field of a config class, built from its type and its allowed values."""
    from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

    validators: dict[str, TypeAdapter[Any]] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        allowed = dict(field.metadata.get("allowed", {}))
        choices = allowed.pop("choices", None)
        hint: Any = Literal[choices] if choices else hints[field.name]
        options = (hint,) if typing.get_origin(hint) is tuple else typing.get_args(hint)
        is_sequence = any(typing.get_origin(option) is tuple for option in options)
        if is_sequence:  # a long list is refused at its first wrong item; the config class checks the range of items
            fast = Field(fail_fast=True)
            options = tuple(Annotated[o, fast] if typing.get_origin(o) is tuple else o for o in options)
            hint = Annotated[typing.Union[options], BeforeValidator(_as_tuples)]  # noqa: UP007
        limits = Field(**{key: limit for key, limit in allowed.items() if limit is not None})
        config = ConfigDict(strict=True, arbitrary_types_allowed=True, allow_inf_nan=is_sequence)
        validators[field.name] = TypeAdapter(Annotated[hint, limits], config=config)
    return validators


def _as_tuples(value: Any, depth: int = 3) -> Any:
    """Lists, arrays, tensors and mappings as hashable tuples; what is nested deeper than any setting stays as it is."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        value = tuple(value.items())
    if depth == 0 or not isinstance(value, (list, tuple)):
        return value
    return tuple(item if type(item) in (float, int, str) else _as_tuples(item, depth - 1) for item in value)


def _plain(value: Any) -> Any:
    """A setting as a JSON value: tuples become lists, tuples of (name, value) pairs objects, a profile its name."""
    if isinstance(value, tuple):
        if value and all(isinstance(v, tuple) and len(v) == 2 and isinstance(v[0], str) for v in value):
            return {name: _plain(rest) for name, rest in value}
        return [_plain(v) for v in value]
    return getattr(value, "name", value)
