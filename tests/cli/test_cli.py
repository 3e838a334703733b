"""The command line."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import holdover
from holdover.cli import app, main
from holdover.cli.application import console
from holdover.config import allowed_values
from holdover.selector import config_class, methods


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "width", 160)


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    """What a command writes to its output and to its error output."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


def rows(table: str) -> list[list[str]]:
    """The cells of the rows that rich printed, in plain text."""
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines() if line[:1] == "│"]


def expected(method: str) -> list[list[str]]:
    return [
        [field.name, repr(field.default), allowed_values(field), field.metadata["doc"]]
        for field in config_class(method).settings()
    ]


def test_methods_lists_every_method_with_its_settings() -> None:
    out, err = run("methods")
    titles = [line.strip() for line in out.splitlines() if line[:1].isalpha()]
    assert titles == list(methods())
    assert rows(out) == [row for method in methods() for row in expected(method)]
    assert err == ""


@pytest.mark.parametrize("method", methods())
def test_methods_shows_one(method: str) -> None:
    out, _ = run("methods", method)
    assert out.splitlines()[0].strip() == method
    assert rows(out) == expected(method)


@pytest.mark.parametrize(("name", "hint"), [("magcache", " Did you mean 'mag_cache'?"), ("lossless", "")])
def test_an_unknown_method_is_one_clear_line(name: str, hint: str) -> None:
    out, err = run("methods", name, code=2)
    assert out == ""
    assert err == f"Error: There is no caching method '{name}'.{hint} Methods: {', '.join(methods())}.\n"


def test_info_says_what_a_bug_report_needs() -> None:
    out, err = run("info")
    found = dict(line.split(maxsplit=1) for line in out.splitlines())
    assert err == ""
    assert found["holdover"] == holdover.__version__
    assert found["python"].startswith(f"{platform.python_version()} on ")
    for package in ("torch", "diffusers", "transformers", "accelerate", "safetensors"):
        assert found[package] == importlib.metadata.version(package)
    assert found["device"]


def test_info_shows_the_blocks_of_a_model(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    out, err = run("info", "--model", "emoji")
    assert err == ""
    assert [record.message for record in caplog.records if record.name.startswith("holdover")] == []
    assert "FluxTransformer2DModel replays" in out
    assert "stack: transformer_blocks (2), single_transformer_blocks (8)" in out


def test_version() -> None:
    assert run("--version") == (f"{holdover.__version__}\n", "")


def test_help_names_every_command() -> None:
    out, _ = run("--help")
    names = {command.name or command.callback.__name__ for command in app.registered_commands}
    assert {"methods", "info"} <= names
    listed = {line.split()[0] for line in out.split("Commands:")[1].splitlines() if line.strip()}
    assert names <= listed


def test_without_a_command_the_help_is_shown() -> None:
    out, err = run(code=2)
    assert "Usage: " in out + err


@pytest.mark.parametrize("arguments", [("enable",), ("methods", "--all"), ("methods", "tea_cache", "mag_cache")])
def test_an_unknown_command_or_option_is_an_error(arguments: tuple[str, ...]) -> None:
    out, err = run(*arguments, code=2)
    assert out == ""
    assert "Error" in err
    assert "Traceback" not in err


def test_the_command_is_installed() -> None:
    (entry,) = importlib.metadata.entry_points(group="console_scripts", name="holdover")
    assert entry.load() is main


def test_the_command_in_a_process_of_its_own() -> None:
    code = "import sys; from holdover.cli import main; sys.argv[0] = 'holdover'; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=False, timeout=600
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{holdover.__version__}\n", "")
