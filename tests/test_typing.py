"""`holdover.enable` is typed: editors know the settings of each method, and mypy refuses wrong names and types."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest

import holdover
from holdover import api, keywords
from holdover.config import Config
from holdover.selector import check_settings, config_class, describe_settings, methods

RIGHT = """
cache = holdover.enable(pipe, "tea_cache", rel_l1_thresh=0.3, coefficients=[1.0, 0.0], read="late")
holdover.enable(pipe, "mag_cache", mag_ratios={"cond": [1.0, 0.9]}, mag_max_skip_steps=3)
holdover.enable(pipe, "mag_cache", mag_ratios=(1.0, 0.9), mag_threshold=1)
holdover.enable(pipe, "plan", profile="none", schedule=range(4))
holdover.enable(pipe, TeaCacheConfig(), rel_l1_thresh=0.2)
holdover.enable(pipe, name)
holdover.enable(pipe, name, **settings)
holdover.enable(pipe, "plan", **settings)
"""
WRONG = (
    'holdover.enable(pipe, "tea_cache", rel_l1_tresh=0.3)',
    'holdover.enable(pipe, "tea_cache", rel_l1_thresh="0.3")',
    'holdover.enable(pipe, "tea_cache", read="soon")',
    'holdover.enable(pipe, "plan", rel_l1_thresh=0.3)',
    'holdover.enable(pipe, "plan", schedule=3)',
    'holdover.enable(pipe, "cache_dit", scm_steps_policy="often")',
    'holdover.enable(pipe, "none", budget=3)',
    "holdover.enable(pipe, name, budget=3)",
    "holdover.enable(pipe, TeaCacheConfig(), budget=3)",
)
HEAD = """
from typing import Any

import holdover.api as holdover
from holdover.teacache.config import TeaCacheConfig

pipe: Any = None
name: str = "plan"
settings: dict[str, Any] = {}
"""


def test_mypy_accepts_right_settings_and_refuses_wrong_ones(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    lines = (HEAD + RIGHT).splitlines()
    first = len(lines) + 1
    snippet = tmp_path / "snippet.py"
    snippet.write_text("\n".join([*lines, *WRONG]) + "\n")
    modules = [api, keywords, *(sys.modules[config_class(method).__module__] for method in methods())]
    settings = (cls.__module__ for cls in (Config, *Config.__subclasses__()))
    modules += [sys.modules[name] for name in settings if name.startswith("holdover.")]
    modules += [sys.modules[module.__name__.rpartition(".")[0]] for module in modules]  # their packages
    files = sorted({inspect.getfile(module) for module in modules})
    options = ["--follow-imports=skip", "--ignore-missing-imports", f"--cache-dir={tmp_path}", "--config-file="]
    source = str(Path(holdover.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *options, str(snippet), *files],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={"MYPYPATH": source, "PATH": ""},
    )
    refused = {int(line) for line in re.findall(r"^\S*snippet\.py:(\d+): error: ", done.stdout, re.MULTILINE)}
    assert sorted(refused) == list(range(first, first + len(WRONG))), done.stdout + done.stderr
    assert 'did you mean "rel_l1_thresh"?' in done.stdout


@pytest.mark.parametrize("method", methods())
def test_the_keywords_of_each_method_are_its_settings(method: str) -> None:
    config = config_class(method)
    typed = getattr(keywords, config.__name__.removesuffix("Config") + "Keywords")
    assert tuple(typed.__annotations__) == config.field_names()
    assert typed.__total__ is False
    assert keywords.SETTINGS[method][0] == config.__name__
    assert tuple(describe_settings(method)) == config.field_names()
    check_settings(method, config.field_names())


def test_every_method_has_a_signature_of_its_own() -> None:
    signatures = [typing.get_overloads(api.enable), inspect.getsource(api)]
    assert len(signatures[0]) == len(methods()) + 1
    for method in methods():
        assert f'Literal["{method}"]' in signatures[1]


@pytest.mark.parametrize("method", methods())
def test_docstrings_show_every_setting_with_its_default_and_its_range(method: str) -> None:
    config = config_class(method)
    for field in dataclasses.fields(config):
        assert re.search(rf"^ +{field.name}: .*default {re.escape(repr(field.default))}\)$", config.__doc__ or "", re.M)
    if method == "mag_cache":
        limits = "mag_retention_ratio: fraction of the first steps that is always computed (at least 0 and at most 1; "
        assert limits in (config.__doc__ or "")
