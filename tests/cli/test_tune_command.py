"""`holdover tune`, on the emoji model with few steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

import holdover
from holdover import loading
from holdover.cli import app
from holdover.compare import Results
from holdover.profiles import Profile
from holdover.report.plots import predict_psnr
from tiny.prompted import prompted_flux

FEW = ("--num", 2, "--share", 0.5, "--confidence", 0.7, "--batch-size", 2, "--target", "psnr>=15")

NAMES = [
    "tea_cache",
    "mag_cache",
    "cache_dit DBCache",
    "cache_dit DBCache + TaylorSeer",
    "diffusers MagCache",
    "diffusers first-block",
    "diffusers TaylorSeer",
    "hold, uniform",
    "fewer steps",
    "fewer steps, second-order solver",
]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.output


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("profile") / "emoji.safetensors"
    code, output = run("calibrate", "--effort", "quick", "--num", 2, "--steps", 4, "--batch-size", 2, "--out", out)
    assert code == 0, output
    return out


def test_tune_writes_a_certificate_and_prints_predicted_and_measured(profile: Path) -> None:
    expected = dict(predict_psnr(Profile.load(profile)))
    code, output = run("tune", profile, *FEW)
    assert code == 0, output
    assert "50% of images meet psnr>=15, with 70% confidence; 2 prompts tried, 0 below" in output
    assert Profile.load(profile).facts.certificates[0].target == "psnr>=15"
    rows = re.findall(
        r"^ +(\d) of 4 +([\d.]+) +([\d.]+|equal) +([\d.]+|equal) +(\d) +(passed|failed)$", output, re.MULTILINE
    )
    assert rows[0][-1] == "passed"
    assert [float(row[1]) for row in rows] == [round(expected[int(row[0])], 1) for row in rows]
    assert all(float(row[3]) <= float(row[2]) for row in rows)


def test_a_quality_gets_a_target_and_a_certificate(profile: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.safetensors"
    code, output = run("tune", profile, *FEW, "--quality", "draft", "--out", own)
    assert code == 0, output
    assert Profile.load(own).facts.qualities == (("draft", "psnr>=15"),)
    code, output = run("tune", own, *FEW[:-2], "--quality", "draft", "--out", tmp_path / "again.safetensors")
    assert code == 0, output
    assert "50% of images meet psnr>=15" in output
    again = Profile.load(tmp_path / "again.safetensors")
    assert [certificate.target for certificate in again.facts.certificates] == ["psnr>=15"]


def test_a_report_has_both_frontiers_with_every_method_and_both_baselines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a tiny pipeline instead of the emoji model, because there are forty candidates."""
    pipe, page = prompted_flux(), tmp_path / "tuned.html"
    monkeypatch.setattr(loading, "load_pipeline", lambda settings: pipe)
    holdover.calibrate(pipe, ["red apple", "blue dog"], 8, batch_size=2, effort="quick", progress=False).save(
        tmp_path / "p.safetensors"
    )
    code, output = run("tune", tmp_path / "p.safetensors", *FEW, "--report", page, "--report-prompts", 1)
    assert code == 0, output
    assert str(page) in output
    results = Results.load(tmp_path / "tuned" / "results.json")
    assert [row.label for row in results.rows if row.error is not None] == []
    text = page.read_text("utf-8")
    assert "Predicted and measured" in text
    assert "dB expected" in text
    for name in NAMES:
        assert re.search(rf"<text [^>]*>\s*{re.escape(name)}</text>", text), name


BAD = {
    "a profile that is not there": (["none.safetensors"], "No profile could be read from none.safetensors"),
    "a bad target": (["none.safetensors", "--target", "pnsr>=3"], "Did you mean 'psnr'?"),
    "a bad quality": (["none.safetensors", "--quality", "hihg"], "There is no quality 'hihg'. Did you mean 'high'?"),
    "no prompts": (["none.safetensors", "--num", "0"], "--num must be 1 or more, not 0."),
    "a report of no prompts": (["none.safetensors", "--report-prompts", "0"], "--report-prompts must be 1 or more"),
    "a page that is a folder": (["none.safetensors", "--report", "there.html"], "there.html is a folder."),
    "a folder that is a file": (
        ["none.safetensors", "--report", "file"],
        "--report cannot be written: file is a file.",
    ),
    "a page next to a file": (
        ["none.safetensors", "--report", "file.html"],
        "--report cannot be written: file is a file.",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_gets_one_line_and_exit_code_2(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there.html").mkdir()
    (tmp_path / "file").touch()
    arguments, message = BAD[case]
    code, output = run("tune", *arguments)
    assert code == 2
    assert message in output
    assert output.strip().count("\n") == 0
