"""`holdover generate`: images with their settings in the file, and errors in one line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from holdover.cli import app
from holdover.zoo.emoji import WEIGHTS

PROMPT = "red apple, glossy 3d style"


def run(*arguments: str, code: int = 0) -> tuple[str, str]:
    result = CliRunner().invoke(app, ["generate", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.stdout, result.stderr


def list_images(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_an_image_file_has_its_settings(tmp_path: Path) -> None:
    settings = ("--cache", "tea_cache", "--set", "rel_l1_thresh=0.3")
    out, _ = run(PROMPT, "--steps", "6", "--seed", "7", *settings, "--out", str(tmp_path))
    (name,) = list_images(tmp_path)
    assert name == "red-apple-glossy-3d-style-seed7-tea_cache.png"
    assert str(tmp_path / name) in out
    with Image.open(tmp_path / name) as image:
        assert image.size == (64, 64)
        assert image.text["Description"] == PROMPT
        assert json.loads(image.text["holdover"]) == {
            "model": "emoji",
            "prompt": PROMPT,
            "seed": 7,
            "steps": 6,
            "guidance": None,
            "cache": "tea_cache",
            "settings": {"rel_l1_thresh": 0.3},
        }


def test_the_trace_and_the_time_are_printed(tmp_path: Path) -> None:
    out, _ = run(PROMPT, "--steps", "6", "--cache", "mag_cache", "--out", str(tmp_path), "--compare")
    cond = re.search(r"cond +([Ch]{6}) +(\d) computed, (\d) held", out)
    assert cond is not None
    assert (cond[1].count("C"), cond[1].count("h")) == (int(cond[2]), int(cond[3]))
    assert re.search(r"\d\.\d\d s per image", out)
    assert re.search(r"\d\.\d\d s uncached: \d\.\d\dx, worst PSNR \d+\.\d dB, SSIM \d\.\d{4}, LPIPS \d\.\d{4}", out)


def test_a_quality_is_a_plan_for_its_target(tmp_path: Path) -> None:
    few = ("--steps", "6", "--guidance", "1")
    named, _ = run(PROMPT, *few, "--quality", "draft", "--out", str(tmp_path / "named"))
    given, _ = run(PROMPT, *few, "--cache", "plan", "--set", "target=psnr>=30", "--out", str(tmp_path / "given"))
    traces = [re.search(r"cond +([Ch]{6})", out) for out in (named, given)]
    assert traces[0] is not None
    assert traces[1] is not None
    assert traces[0][1] == traces[1][1]
    assert "h" in traces[0][1]
    assert "quality draft is psnr>=30: expected, not certified" in named
    with Image.open(tmp_path / "named" / "red-apple-glossy-3d-style-seed0-plan.png") as image:
        settings = json.loads(image.text["holdover"])
    assert (settings["cache"], settings["settings"]) == ("plan", {"quality": "draft"})


def test_without_a_cache_the_images_are_equal(tmp_path: Path) -> None:
    out, _ = run(PROMPT, "--steps", "2", "--out", str(tmp_path), "--compare")
    assert "equal images" in out
    assert "CC" in out


def test_several_images_follow_the_seed(tmp_path: Path) -> None:
    run("dog, noto", "--steps", "1", "--seed", "3", "--num", "2", "--out", str(tmp_path))
    assert list_images(tmp_path) == ["dog-google-noto-style-seed3.png", "dog-google-noto-style-seed4.png"]
    first, second = (Image.open(tmp_path / name).tobytes() for name in list_images(tmp_path))
    assert first != second


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for _ in range(2):
        run("dog", "--steps", "1", "--out", str(tmp_path))
    assert list_images(tmp_path) == ["dog-seed0-2.png", "dog-seed0.png"]


def test_a_model_from_a_folder(tmp_path: Path) -> None:
    run("dog", "--model", str(WEIGHTS), "--steps", "1", "--out", str(tmp_path))
    assert list_images(tmp_path) == ["dog-seed0.png"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((" ",), "The prompt is empty; say what to generate, for example 'red apple, glossy 3d style'."),
        (("dog, glosy 3d style",), "Did you mean 'glossy 3d style'?"),
        (("dog", "--steps", "0"), "steps must be a whole number of at least 1, not 0."),
        (("dog", "--num", "0"), "--num must be 1 or more, not 0."),
        (("dog", "--seed", "-1"), "seeds must be a whole number from 0 to 18446744073709551615, not -1."),
        (("dog", "--guidance", "nan"), "guidance must be a finite number of at least 0, not nan."),
        (("dog", "--cache", "teacache"), "There is no caching method 'teacache'. Did you mean 'tea_cache'?"),
        (("dog", "--cache", "tea_cache", "--set", "rel_l1=1"), "Did you mean 'rel_l1_thresh'?"),
        (("dog", "--cache", "tea_cache", "--set", "rel_l1_thresh=-1"), "must be at least 0, not -1"),
        (("dog", "--cache", "tea_cache", "--set", "rel_l1_thresh"), "A setting is written key=value"),
        (("dog", "--quality", "hihg"), "There is no quality 'hihg'. Did you mean 'high'?"),
        (("dog", "--quality", "high", "--cache", "none"), "leave --cache none or --quality out."),
        (("dog", "--quality", "high", "--cache", "mag_cache"), "leave --cache mag_cache or --quality out."),
        (("dog", "--quality", "high", "--set", "budget=3"), "one of budget, target, quality and schedule, not budget"),
        (("dog", "--quality", "high", "--set", "quality=draft"), "The setting 'quality' is given twice."),
        (("dog", "--model", "emojy"), "There is no model 'emojy'. Did you mean 'emoji'?"),
        (("dog", "--model", "emojy"), "Give 'emoji', 'emoji-motion', a folder or an id like 'owner/name'."),
    ],
)
def test_bad_input_is_one_clear_line(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    out, err = run(*arguments, "--out", str(tmp_path), code=2)
    assert out == ""
    assert message in err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert list_images(tmp_path) == []


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    _, err = run("dog", "--out", str(tmp_path / "file" / "folder"), code=2)
    assert err.startswith(f"Error: Cannot write to {tmp_path / 'file' / 'folder'}: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("name", ["clip.avi", "clip.MOV", "clip.mkv", "clip.webm", "clip.m4v", "dog.png", "dog.JPG"])
def test_a_file_in_another_format_is_refused(name: str, tmp_path: Path) -> None:
    formats = "give a .mp4 or .gif or .webp file for a video, else a folder."
    _, err = run("dog", "--out", str(tmp_path / name), code=2)
    assert err == f"Error: {tmp_path / name} is in no format that is written: {formats}\n"
    assert list_images(tmp_path) == []


def test_a_folder_may_have_dots_in_its_name(tmp_path: Path) -> None:
    (tmp_path / "old.png").mkdir()  # a folder already
    for name in ("run-0.1", "v1.5", "old.png"):
        run("dog", "--steps", "1", "--guidance", "1", "--out", str(tmp_path / name))
        assert list_images(tmp_path / name) == ["dog-seed0.png"]


@pytest.mark.parametrize("model", ["emoji", "emoji-motion"])
def test_an_image_that_does_not_fit_on_the_disk_is_named_and_removed(model: str, tmp_path: Path) -> None:
    (tmp_path / "dog-seed0.png.new").symlink_to("/dev/full")
    few = ("--steps", "1", "--guidance", "1")
    _, err = run("dog", "--model", model, *few, "--out", str(tmp_path), code=2)
    assert err.splitlines()[-1] == f"Error: Cannot write {tmp_path / 'dog-seed0.png'}: No space left on device."
    assert list_images(tmp_path) == []


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    _, err = run("dog", "--model", str(tmp_path), "--out", str(tmp_path / "out"), code=2)
    assert err.startswith(f"Error: Cannot load '{tmp_path}': ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["generate", "compare"])
def test_help_does_not_import_torch(command: str) -> None:
    code = (
        "import sys; from holdover.cli import app\n"
        f"try: app(['{command}', '--help'])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "heavy = [name for name in ('torch', 'diffusers', 'matplotlib', 'jinja2', 'yaml') if name in sys.modules]\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout
