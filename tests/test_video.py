"""Video files, and `holdover generate` with tiny Wan 2.2: MP4, GIF, and errors before work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import av
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

from holdover.cli import app
from holdover.errors import ConfigError
from holdover.video import write_video
from tiny.prompted import prompted_wan


def colors(height: int = 31, width: int = 45) -> Iterator[torch.Tensor]:
    """Frames of one color each, darker from frame to frame."""
    for level in (0.9, 0.5, 0.1):
        yield torch.full((3, height, width), level)


def test_an_mp4_has_the_frames_in_order(tmp_path: Path) -> None:
    write_video(tmp_path / "a.mp4", colors(), 12.5, "said")
    with av.open(str(tmp_path / "a.mp4")) as container:
        stream = container.streams.video[0]
        assert container.metadata["comment"] == "said"
        assert (float(stream.average_rate or 0), stream.width, stream.height) == (12.5, 46, 32)
        means = [frame.to_ndarray(format="rgb24").mean() / 255 for frame in container.decode(stream)]
    assert means == pytest.approx([0.9, 0.5, 0.1], abs=0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["a.mp4"]


def test_a_gif_has_the_frames_in_order(tmp_path: Path) -> None:
    write_video(tmp_path / "a.gif", colors(), 10)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.size, image.info["duration"]) == (3, (45, 31), 100)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.avi"])
def test_a_failed_file_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_video(tmp_path / name, iter(()), 10)
    assert list(tmp_path.iterdir()) == []


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", "a cat runs", "--steps", "4", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.mark.parametrize("suffix", [".mp4", ".gif"])
def test_generate_writes_a_video(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: prompted_wan())
    path = tmp_path / f"clip{suffix}"
    assert str(path) in run("--out", str(path), "--frames", "5", "--fps", "8", "--cache", "easy_cache")
    if suffix == ".gif":
        with Image.open(path) as image:
            assert (image.size, json.loads(image.info["comment"])["frames"]) == ((64, 64), 5)
        return
    with av.open(str(path)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 5
        assert json.loads(container.metadata["comment"])["cache"] == "easy_cache"


def test_a_folder_gets_an_animated_png_of_that_rate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: prompted_wan())
    run("--out", str(tmp_path), "--frames", "5", "--fps", "8")
    with Image.open(next(tmp_path.glob("*.png"))) as image:
        assert (image.n_frames, image.info["duration"]) == (5, 125)


def test_errors_come_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    assert "generates images, not videos" in run("--out", str(path), code=2)
    assert "--fps must be at least 1 and at most 240, not 0.0" in run("--out", str(path), "--fps", "0", code=2)
    assert "one video file" in run("--out", str(path), "--num", "2", code=2)
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: prompted_wan())
    assert "must be a multiple of 4 plus 1" in run("--out", str(path), "--frames", "6", code=2)
    assert list(tmp_path.iterdir()) == []
    path.touch()
    assert "exists already" in run("--out", str(path), code=2)
