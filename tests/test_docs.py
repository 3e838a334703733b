"""The documentation is current: its code runs and prints what the page shows, its tables and paths are up to date."""

from __future__ import annotations

import ast
import contextlib
import doctest
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import diffusers.utils.logging
import pytest
import torch
import transformers.utils.logging
from typer.testing import CliRunner

import holdover
from holdover import selector
from holdover.cli import app
from holdover.magcache import strategy
from holdover.models import registry
from tiny.prompted import prompted_flux, prompted_qwen, prompted_wan

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # docs/benchmark.md imports the `benchmarks` folder
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PIPELINES = {"pipe": prompted_flux, "wan": prompted_wan}
CHECKPOINTS = {
    "black-forest-labs/FLUX.1-dev": prompted_flux,
    "Qwen/Qwen-Image": prompted_qwen,
    "Wan-AI/Wan2.2-T2V-A14B-Diffusers": prompted_wan,
}

FENCE = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```$", re.DOTALL | re.MULTILINE)
MEASURED = re.compile(r"\d+\.\d\d s\b|\b\d\.\de[-+]\d\d\b")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page; `printed` is the text block directly below a Python block, if there is one."""

    language: str
    text: str
    line: int
    printed: str | None = None


def blocks(page: Path) -> list[Block]:
    text = page.read_text("utf-8")
    found = list(FENCE.finditer(text))
    result = []
    for i, fence in enumerate(found):
        below = next(iter(found[i + 1 :]), None)
        shown = below is not None and below[1] == "text" and not text[fence.end() : below.start()].strip()
        printed = below[2] if below is not None and shown else None
        result.append(Block(fence[1], fence[2], text.count("\n", 0, fence.start(2)), printed))
    return result


def pages_with_python() -> list[Path]:
    return [page for page in PAGES if any(block.language == "python" for block in blocks(page))]


@pytest.fixture(autouse=True)
def _isolated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Undo what a page registers, write its files to a temporary folder, and silence the libraries."""
    for module, name in (
        (selector, "BACKENDS"),
        (registry, "FAMILY_REGISTRY"),
        (registry, "EXTRACTOR_REGISTRY"),
        (strategy.MagCacheStrategyRegistry, "_registry"),
    ):
        monkeypatch.setattr(module, name, dict(getattr(module, name)))
    monkeypatch.chdir(tmp_path)
    levels = diffusers.utils.logging.get_verbosity(), transformers.utils.logging.get_verbosity()
    diffusers.utils.logging.set_verbosity_error()
    transformers.utils.logging.set_verbosity_error()
    yield
    diffusers.utils.logging.set_verbosity(levels[0])
    transformers.utils.logging.set_verbosity(levels[1])


@pytest.fixture(autouse=True)
def _tiny_checkpoints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a tiny pipeline of the same class in place of each checkpoint named on a page, and leave it on the CPU."""
    load, move = diffusers.DiffusionPipeline.from_pretrained.__func__, diffusers.DiffusionPipeline.to

    def from_pretrained(cls: type, name: str, **options: Any) -> Any:
        return CHECKPOINTS[name]() if name in CHECKPOINTS else load(cls, name, **options)

    def to(pipe: Any, *args: Any, **options: Any) -> Any:
        return pipe if args == ("cuda",) else move(pipe, *args, **options)

    monkeypatch.setattr(diffusers.DiffusionPipeline, "from_pretrained", classmethod(from_pretrained))
    monkeypatch.setattr(diffusers.DiffusionPipeline, "to", to)


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module a page runs in: dataclasses and the selector look their module up by name."""
    name = "page_" + re.sub(r"\W", "_", request.node.callspec.id)
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("page", pages_with_python(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_python_block_runs_and_prints_what_the_page_says(
    page: Path, module: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = [block for block in blocks(page) if block.language == "python"]
    # What is tested is that compiling works, not the machine code.
    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *args, **kwargs: compile_(*args, **{"backend": "eager"} | kwargs))
    source = "\n".join(block.text for block in python)
    if "torchao" in source:  # which multiplies in float8 on GPUs only
        ao = pytest.importorskip(
            "torchao.quantization", reason="torchao is not installed: pip install 'holdover[quantize]'"
        )
        int8 = ao.Int8DynamicActivationInt8WeightConfig
        monkeypatch.setattr(ao, "Float8DynamicActivationFloat8WeightConfig", lambda granularity: int8())
    namespace = vars(module)
    namespace.update({name: make() for name, make in PIPELINES.items() if re.search(rf"\b{name}\b", source)})
    torch.manual_seed(0)
    for block in python:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
            exec(compile("\n" * block.line + block.text, str(page), "exec"), namespace)
        if block.printed is not None:
            assert_printed(block.printed, printed.getvalue(), f"{page.name}:{block.line}")


def assert_printed(wanted: str, got: str, where: str) -> None:
    """Equal except for seconds and replay errors; `...` matches anything."""
    wanted, got = MEASURED.sub("#", wanted), MEASURED.sub("#", got)
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    assert doctest.OutputChecker().check_output(wanted, got, options), f"{where} prints\n{got}\ninstead of\n{wanted}"


def commands() -> list[str]:
    """Every distinct `holdover ...` line of the shell blocks, without its comment.

    Commands that serve are tested in tests/serve, those that measure for minutes in tests/cli.
    """
    lines = [
        line.partition("#")[0].strip()
        for page in PAGES
        for block in blocks(page)
        if block.language in ("sh", "bash", "shell", "console")
        for line in block.text.splitlines()
    ]
    found = {line.removeprefix("$ ") for line in lines if line.removeprefix("$ ").startswith("holdover ")}
    elsewhere = ("holdover serve", "holdover calibrate", "holdover tune")
    return sorted(line for line in found if not line.startswith(elsewhere))


@pytest.mark.parametrize("command", commands())
def test_every_command_of_the_command_line_works(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, shlex.split(command)[1:])
    assert done.exit_code == 0, done.output
    assert done.stdout.strip()


def test_some_commands_are_shown() -> None:
    assert {"holdover methods", "holdover info"} <= set(commands())


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_tables_taken_from_the_code_are_not_stale() -> None:
    stale = [
        str(path.relative_to(ROOT)) for path, text in generator().pages().items() if path.read_text("utf-8") != text
    ]
    assert not stale, f"run `python docs/generate.py`: {stale}"


def test_the_reference_names_everything_public() -> None:
    reference = (ROOT / "docs" / "reference.md").read_text("utf-8")
    assert [name for name in holdover.__all__ if f"`{name}`" not in reference] == []


def test_files_that_are_named_exist() -> None:
    """Paths such as `engine/clock.py`, relative to the package or to the repository."""
    missing = []
    for page in (*PAGES, *sorted((ROOT / "docs" / "assets").glob("*.svg"))):
        for named in set(re.findall(r"(?<![\w/.-])(?:\w+/)+\w+\.py\b(?!:)", page.read_text("utf-8"))):
            if page.name != "models.md" and not any((ROOT / place / named).exists() for place in ("", "src/holdover")):
                missing.append(f"{page.name}: {named}")
    assert missing == []


def test_the_tree_of_the_architecture_page_names_every_package_and_module() -> None:
    page = ROOT / "docs" / "architecture.md"
    tree = next(block.text for block in blocks(page) if block.text.startswith("src/holdover/"))
    package = ROOT / "src" / "holdover"
    folders = [f"{p.name}/" for p in package.iterdir() if p.is_dir() and (p / "__init__.py").exists()]
    files = [p.name for p in package.glob("*.py")]
    assert [name for name in (*folders, *files) if name not in tree] == []


def messages() -> set[str]:
    """Every string literal of the package, with `...` in place of formatted values."""
    found = set()
    for path in (ROOT / "src" / "holdover").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            if all(isinstance(part, ast.Constant | ast.FormattedValue) for part in parts):
                found.add("".join(str(p.value) if isinstance(p, ast.Constant) else "..." for p in parts))
    return found


def test_messages_on_the_troubleshooting_page_exist() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text("utf-8")
    headings, literals = re.findall(r"^### `(.+)`$", page, re.MULTILINE), messages()
    assert len(headings) > 15
    assert [heading for heading in headings if not any(heading in literal for literal in literals)] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text("utf-8").splitlines()) <= 200


def test_links_in_the_readme_and_contributing_lead_somewhere() -> None:
    dead = []
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text("utf-8")):
            if not target.startswith("http") and not (page.parent / target).exists():
                dead.append(f"{page.name}: {target}")
    assert dead == []


def test_the_site_builds_strictly_and_fetches_nothing(tmp_path: Path) -> None:
    reason = "mkdocs is not installed: pip install 'holdover[docs]'"
    pytest.importorskip("mkdocs", reason=reason)
    pytest.importorskip("material", reason=reason)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet"]
    done = subprocess.run(
        [*build, "--config-file", str(ROOT / "mkdocs.yml"), "--site-dir", str(tmp_path / "site")],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(list((ROOT / "docs").rglob("*.md")))  # the 404 page is one more
    fetched = re.compile(r"""<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=["']?https?://[^>]*>""")
    assert [match for page in pages for match in fetched.findall(page.read_text("utf-8"))] == []
