"""`holdover calibrate`, on the emoji model with few steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from holdover.cli import app
from holdover.profiles import Profile


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "emoji.safetensors"
    code, output = run("calibrate", "--effort", "quick", "--num", 2, "--steps", 6, "--batch-size", 2, "--out", out)
    assert code == 0, output
    assert "3x: 2 of 6 steps, expected PSNR" in output
    assert f"profile  {out}" in output
    return out


def test_calibrate_writes_a_profile(profile: Path) -> None:
    facts = Profile.load(profile).facts
    assert (facts.name, facts.pipeline, facts.prompts, len(facts.noise)) == ("emoji", "EmojiPipeline", 2, 6)
    assert facts.psnr_offset is not None
    assert facts.tea_cache
    assert facts.mag_cache


BAD = {
    "another suffix": (["calibrate", "--out", "profile.json"], "--out must end in .safetensors"),
    "an unknown effort": (["calibrate", "--effort", "standart"], "Did you mean 'standard'"),
    "no prompts": (["calibrate", "--num", "0"], "--num must be 1 or more"),
    "a file that is not there": (["calibrate", "--prompts", "none.txt"], "No prompts could be read from none.txt"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    arguments, message = BAD[case]
    code, output = run(*arguments)
    assert code == 2
    assert message in output
    assert output.strip().count("\n") == 0


def test_an_existing_profile_is_not_replaced(profile: Path) -> None:
    before = profile.read_bytes()
    code, output = run("calibrate", "--out", profile)
    assert code == 2
    assert "already exists" in output
    assert profile.read_bytes() == before
