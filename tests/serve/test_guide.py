"""The serving guide: its commands do what it says."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from PIL import Image

from holdover.serve import Settings

from .conftest import MAG
from .servers import HOLDOVER, Server

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "docs" / "serving.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE, re.DOTALL | re.MULTILINE)


def test_the_server_of_these_tests_is_started_as_the_guide_says() -> None:
    (command,) = [block for block in blocks("sh") if block.startswith("holdover serve")]
    assert shlex.split(command) == ["holdover", "serve", "--cache-backend", "mag_cache", "--cache-config", MAG]


@pytest.mark.skipif(not (shutil.which("curl") and shutil.which("jq")), reason="curl and jq are not there")
def test_curl_generates_the_dragon(server: Server, tmp_path: Path) -> None:
    command, _ = [block for block in blocks("bash") if block.startswith("curl")]
    there = command.replace("http://localhost:8000", server.url).replace('"num_inference_steps": 50', '"steps": 4')
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", there],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert Image.open(tmp_path / "dragon.png").size == (1024, 1024)


def test_every_flag_of_the_guide_exists() -> None:
    shown = subprocess.run([HOLDOVER, "serve", "--help"], capture_output=True, text=True, check=True, timeout=300)
    named = set(
        re.findall(r"(?<![\w-])--[a-z]+(?:-[a-z]+)*", re.sub(r"```(bash|dockerfile|yaml).*?```", "", GUIDE, flags=re.S))
    )
    assert {"--max-batch", "--cors-origin", "--grace"} <= named
    assert [flag for flag in named if flag not in shown.stdout] == []


def test_the_guide_has_every_flag() -> None:
    own = set(Settings.field_names()) - {"model"}
    assert [name for name in own if f"`--{name.replace('_', '-')}`" not in GUIDE] == []


def test_what_is_to_be_copied_is_well_formed() -> None:
    assert yaml.safe_load(blocks("yaml")[0])["scrape_configs"]
    assert "server" in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (unit,) = blocks("ini")
    assert re.findall(r"^\[(\w+)\]$", unit, re.MULTILINE) == ["Unit", "Service", "Install"]
    assert "ExecStart=/opt/holdover/bin/holdover serve" in unit
