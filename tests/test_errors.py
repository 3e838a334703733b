"""The exception classes, their tree, and the suggestion for a wrong name."""

from __future__ import annotations

import inspect
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import holdover
from holdover import errors
from holdover.errors import did_you_mean

CLASSES = {
    name: value for name, value in inspect.getmembers(errors, inspect.isclass) if value.__module__ == "holdover.errors"
}

BASES = {
    "HoldoverError": (Exception,),
    "ConfigError": (errors.HoldoverError, ValueError),
    "ProfileError": (errors.HoldoverError, ValueError),
    "EnableError": (errors.HoldoverError,),
    "UnsupportedModelError": (errors.EnableError,),
    "UntraceableError": (errors.UnsupportedModelError,),
    "NotEnabledError": (errors.HoldoverError,),
    "WriteError": (errors.HoldoverError,),
    "HoldoverWarning": (UserWarning,),
}


def test_the_table_has_every_class() -> None:
    assert BASES.keys() == CLASSES.keys()


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_bases(name: str) -> None:
    assert CLASSES[name].__bases__ == BASES[name]
    assert CLASSES[name].__doc__


@pytest.mark.parametrize("name", sorted(CLASSES))
def test_every_class_is_public(name: str) -> None:
    assert getattr(holdover, name) is CLASSES[name]


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    lines = re.findall(r"^([│├└─ ]*)(\w+)", errors.__doc__.split("```")[1], re.MULTILINE)
    depths = {name: len(indent) // 4 for indent, name in lines}
    roots = (Exception, UserWarning)
    real = {
        name: len([b for b in cls.__mro__ if b.__module__ == "holdover.errors"]) - 1 for name, cls in CLASSES.items()
    }
    assert depths == real
    assert all(issubclass(cls, roots) for cls in CLASSES.values())
    saying_value = set(re.findall(r"(\w+) .*\(also a ValueError\)", errors.__doc__))
    assert saying_value == {name for name, cls in CLASSES.items() if issubclass(cls, ValueError)}


names = st.text("abcdefgh_", min_size=1, max_size=12)


@settings(deadline=None)
@given(known=st.lists(names, min_size=1, max_size=6, unique=True), data=st.data())
def test_a_known_name_suggests_itself(known: list[str], data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(known))
    assert did_you_mean(name, known) == f" Did you mean {name!r}?"


@settings(deadline=None)
@given(name=st.text(max_size=12), known=st.lists(names, max_size=6))
def test_a_suggestion_is_one_of_the_known_names_or_nothing(name: str, known: list[str]) -> None:
    assert did_you_mean(name, known) in {"", *(f" Did you mean {k!r}?" for k in known)}


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("mag_treshold", "mag_threshold"),
        ("thresh", "mag_threshold"),
        ("sginal", "signal"),
        ("profiles", "profile"),
        ("MAG", None),
    ],
)
def test_suggestions(name: str, meant: str | None) -> None:
    known = ("mag_threshold", "profile", "signal")
    assert did_you_mean(name, known) == (f" Did you mean {meant!r}?" if meant else "")


@pytest.mark.parametrize("known", [(), ("a", "b")])
def test_nothing_near_is_no_suggestion(known: tuple[str, ...]) -> None:
    assert did_you_mean("something_else", known) == ""
    assert did_you_mean("", known) == ""
