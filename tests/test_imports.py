"""What is public, and what importing it costs and changes."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import pkgutil
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import holdover

HEAVY = {"torch", "diffusers", "cache_dit", "transformers", "accelerate", "numpy"}


def python(*arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stderr
    return done


# Public names


@pytest.mark.parametrize("name", holdover.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(holdover, name) is not None


def test_public_names_are_listed_once_and_sorted() -> None:
    assert holdover.__all__ == ["__version__", *sorted(set(holdover.__all__) - {"__version__"})]
    assert dir(holdover) == sorted(holdover.__all__)


def test_type_checkers_see_the_same_names() -> None:
    """The names are imported when they are first used; what a type checker reads must not lag behind."""
    tree = ast.parse(inspect.getsource(holdover))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname: f"{'.' * node.level}{node.module}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert sorted(seen) == sorted(set(holdover.__all__) - {"__version__"})
    for name, module in seen.items():
        assert getattr(importlib.import_module(module, "holdover"), name) is getattr(holdover, name)


def test_star_import_gives_the_public_names() -> None:
    names: dict[str, Any] = {}
    exec("from holdover import *", names)
    assert names.keys() - {"__builtins__"} == set(holdover.__all__)


@pytest.mark.parametrize("name", ["enabel", "torch", "_engine"])
def test_other_names_do_not(name: str) -> None:
    with pytest.raises(AttributeError, match=f"module 'holdover' has no attribute '{name}'"):
        getattr(holdover, name)


MODULES = [module.name for module in pkgutil.walk_packages(holdover.__path__, "holdover.")]


@pytest.mark.parametrize("module", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_imports_and_says_what_it_is(module: str) -> None:
    found = importlib.import_module(module)
    assert found.__doc__
    for name in getattr(found, "__all__", ()):
        assert hasattr(found, name)


def test_the_package_is_typed() -> None:
    assert (Path(holdover.__file__).parent / "py.typed").is_file()


# What it costs

SCRIPT = shutil.which("holdover", path=str(Path(sys.executable).parent)) or shutil.which("holdover")


def test_importing_holdover_imports_nothing_heavy() -> None:
    done = python("-c", "import sys, holdover; print(*{name.split('.')[0] for name in sys.modules})")
    loaded = set(done.stdout.split())
    assert "holdover" in loaded
    assert loaded & (HEAVY | {"pydantic"}) == set()


@pytest.mark.skipif(SCRIPT is None, reason="the command is not installed")
@pytest.mark.parametrize("arguments", [("--help",), ("methods", "--help"), ("info", "--help"), ("--version",)])
def test_help_and_version_import_nothing_heavy(arguments: tuple[str, ...]) -> None:
    done = python("-X", "importtime", SCRIPT, *arguments)
    loaded = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in done.stderr.splitlines() if "|" in line}
    assert {"holdover", "typer"} <= loaded
    assert loaded & HEAVY == set()
    assert done.stdout.strip()


LOADED = """
import json, logging, sys
import torch
import diffusers
import diffusers.hooks
from diffusers import FluxPipeline, FluxTransformer2DModel

watched = [torch.nn.Module, torch.nn.ModuleList, FluxPipeline, FluxTransformer2DModel,
           diffusers.FlowMatchEulerDiscreteScheduler, diffusers.DiffusionPipeline, diffusers.hooks.ModelHook]
def state():
    found = {(cls.__name__, key): id(value) for cls in watched for key, value in list(vars(cls).items())}
    found["filters"] = len(__import__("warnings").filters)
    found["handlers"] = len(logging.getLogger().handlers)
    found["level"] = logging.getLogger().level
    found["grad"] = torch.is_grad_enabled()
    found["threads"] = torch.get_num_threads()
    found["random"] = hash(torch.get_rng_state().numpy().tobytes())
    return found
before, modules = state(), set(sys.modules)

import holdover
import holdover.api
import holdover.teacache
import holdover.magcache
packages = sorted({name.split(".")[0] for name in set(sys.modules) - modules})

after = state()
changed = [str(key) for key in before.keys() | after.keys() if before.get(key) != after.get(key)]
print(json.dumps({"packages": packages, "changed": changed}))
"""


def test_importing_everything_imports_no_other_package_and_changes_nothing() -> None:
    """Next to torch and diffusers; `python -m benchmarks.import_time` measures how long it takes."""
    found = json.loads(python("-c", LOADED).stdout.splitlines()[-1])
    assert found["changed"] == []
    assert set(found["packages"]) - set(sys.stdlib_module_names) <= {"holdover", "safetensors"}


WITHOUT_CACHE_DIT = """
import sys
sys.modules["cache_dit"] = None  # as if it were not installed
import holdover, torch
from holdover import *
from holdover.selector import methods
from tiny.pipelines import PIPELINES, run
tiny = PIPELINES["FluxPipeline"]
pipe = tiny.build()
settings = {
    "tea_cache": {"coefficients": [1.0, 0.0], "rel_l1_thresh": 10.0},
    "mag_cache": {"mag_ratios": [1.0] * 6},
    "plan": {"schedule": [0, 3, 5], "predictor": "hold"},
}
for method, values in settings.items():
    with holdover.enable(pipe, method, **values) as cache:
        run(pipe, **tiny.call(steps=6))
        print(method, cache.stats().held > 0)
print("cache_dit" in methods())
for ask in (lambda: holdover.enable(pipe, "cache_dit"), lambda: holdover.CacheDiTConfig):
    try:
        ask()
    except (holdover.ConfigError, ModuleNotFoundError) as error:
        print(error)
"""


def test_without_the_cache_dit_library_everything_else_runs() -> None:
    root = Path(__file__).parent
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_CACHE_DIT], capture_output=True, text=True, cwd=root, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "tea_cache True",
        "mag_cache True",
        "plan True",
        "False",
        "The method 'cache_dit' needs cache_dit: pip install 'holdover[cache-dit]'.",
        "holdover.cache_dit_backend needs the cache-dit library: pip install 'holdover[cache-dit]'.",
    ]
