"""Video files, and `holdover generate` with tiny video models: MP4, GIF, WebP, and errors before work."""

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
from holdover.errors import ConfigError, WriteError
from holdover.video import stream_frames, write_video
from tiny.prompted import prompted_wan
from tiny.prompted_video import PROMPTED_VIDEOS, SMALL


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


def test_the_same_frames_give_the_same_file(tmp_path: Path) -> None:
    noise = torch.rand(5, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    files = [tmp_path / f"{number}.mp4" for number in range(30)]
    for file in files:
        write_video(file, noise, 16)
    assert len({file.read_bytes() for file in files}) == 1


def test_a_gif_has_the_frames_in_order(tmp_path: Path) -> None:
    write_video(tmp_path / "a.gif", colors(), 10)
    with Image.open(tmp_path / "a.gif") as image:
        assert (image.n_frames, image.size, image.info["duration"]) == (3, (45, 31), 100)


@pytest.mark.parametrize("name", ["a.mp4", "a.gif", "a.webp", "a.avi"])
def test_a_failed_file_leaves_nothing(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        write_video(tmp_path / name, iter(()), 10)
    assert list(tmp_path.iterdir()) == []


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", "a cat runs", "--steps", "4", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


def test_a_disk_that_fills_up_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / ".a.mp4.new.mp4").symlink_to("/dev/full")
    with pytest.raises(WriteError, match="Cannot write .*a.mp4: No space left on device."):
        write_video(tmp_path / "a.mp4", torch.rand(60, 3, 128, 128), 16)  # more than a buffer
    assert list(tmp_path.iterdir()) == []


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


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    Image.effect_noise((120, 80), 50).save(tmp_path / "in" / "photo.jpg")
    return tmp_path / "in" / "photo.jpg"


def flags(name: str, photo: Path) -> list[str]:
    names = {"height": "--height", "width": "--width", "num_frames": "--frames"}
    sizes = [text for key, value in SMALL[name].items() for text in (names[key], str(value))]
    return [*sizes, *(("--image", str(photo)) if name == "wan_image" else ())]


@pytest.mark.parametrize("name", ["wan_image", "ltx", "hunyuan", "cogvideox", "cosmos"])
def test_every_kind_of_model_writes_a_video(
    name: str, photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: PROMPTED_VIDEOS[name]())
    if name == "wan_image":  # about as many pixels as by default, in the shape of the image
        monkeypatch.setattr("holdover.plan.calls.defaults_of", lambda pipe: {"height": 64, "width": 64})
    path, more = tmp_path / "clip.mp4", ["--compare"] if name == "ltx" else []
    out = run("--out", str(path), "--cache", "taylor_seer", *flags(name, photo), *more)
    assert "worst frame" in out or not more
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        sizes = {"wan_image": (80, 48), "ltx": (96, 64)}
        rates = {"ltx": 25, "hunyuan": 24, "cogvideox": 8, "cosmos": 30}
        assert (stream.frames, stream.width, stream.height) == (9, *sizes.get(name, (64, 64)))
        assert stream.average_rate == rates.get(name, 16)
        assert json.loads(container.metadata["comment"])["fps"] == rates.get(name, 16)


@pytest.mark.parametrize(
    ("name", "frames"), [("wan", 9), ("cogvideox", 9), ("hunyuan", 9), ("hunyuan", 45), ("ltx", 41)]
)
def test_frames_that_are_streamed_are_those_of_the_whole_video(name: str, frames: int) -> None:
    pipe, streamed = PROMPTED_VIDEOS[name](), list[torch.Tensor]()
    if name == "ltx":
        pipe.vae.use_framewise_decoding = True
        pipe.vae.tile_sample_min_num_frames, pipe.vae.tile_sample_stride_num_frames = 16, 8

    def generate() -> torch.Tensor:
        noise = {"generator": torch.Generator().manual_seed(0), "output_type": "pt", "num_inference_steps": 3}
        return pipe(prompt="a cat runs", **noise, **(SMALL[name] | {"num_frames": frames})).frames[0]

    whole = generate()
    with stream_frames(pipe, streamed.append) as can:
        rest = generate()
    assert can
    assert torch.equal(torch.stack(streamed), whole)
    assert rest.shape[-2:] == (1, 1)
    assert torch.equal(generate(), whole)
    assert not any(module._forward_hooks for module in pipe.vae.modules())


def test_a_vae_that_decodes_everything_at_once_is_not_streamed() -> None:
    pipe = PROMPTED_VIDEOS["ltx"]()
    with stream_frames(pipe, list[torch.Tensor]().append) as can:
        assert not can
        assert not any(module._forward_hooks for module in pipe.vae.modules())


def test_a_generation_that_fails_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = prompted_wan()
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: pipe)
    pipe.vae.decoder.register_forward_hook(lambda *_: (_ for _ in ()).throw(RuntimeError("no luck")))
    result = CliRunner().invoke(app, ["generate", "a cat", "--steps", "2", "--out", str(tmp_path / "clip.mp4")])
    assert isinstance(result.exception, RuntimeError)
    assert list(tmp_path.iterdir()) == []


def test_errors_come_before_work(photo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "clip.mp4"
    for given in ((), ("--frames", "5"), ("--fps", "8")):
        assert "generates images, not videos" in run("--out", str(path), *given, code=2)
    assert "--fps must be at least 1 and at most 240, not 0.0" in run("--out", str(path), "--fps", "0", code=2)
    assert "one video file" in run("--out", str(path), "--num", "2", code=2)
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: prompted_wan())
    assert "must be a multiple of 4 plus 1" in run("--out", str(path), "--frames", "6", code=2)
    sizes = ("--height", "50", "--width", "64")
    assert "height must be a multiple of 16 for ShortWanPipeline, such as 48" in run("--out", str(path), *sizes, code=2)
    assert "num_frames must be at most 125 for ShortWanPipeline, not 129." in run(
        "--out", str(path), "--frames", "129", code=2
    )
    assert "width must be at most 512" in run("--out", str(path), "--height", "64", "--width", "1024", code=2)
    assert "takes no image" in run("--out", str(path), "--image", str(photo), code=2)
    assert "There is no image" in run("--out", str(path), "--image", str(tmp_path / "no.png"), code=2)
    monkeypatch.setattr("holdover.loading.load_pipeline", lambda settings: PROMPTED_VIDEOS["wan_image"]())
    assert "starts from an image: give one (--image FILE)" in run("--out", str(path), code=2)
    assert "test_video.py is no image." in run("--out", str(path), "--image", __file__, code=2)
    photo.unlink()
    photo.parent.rmdir()
    assert list(tmp_path.iterdir()) == []
    path.touch()
    assert "exists already" in run("--out", str(path), code=2)
