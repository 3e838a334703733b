"""Videos over HTTP: OpenAI's client and a tiny Wan 2.2, files and records, restarts, and what goes wrong."""

from __future__ import annotations

import asyncio
import base64
import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import WanPipeline
from diffusers.pipelines.wan import pipeline_wan_i2v

from holdover.selector import own_config
from holdover.serve import Settings, running
from holdover.serve.errors import ApiError
from holdover.serve.model import ServedModel, to_pixels
from holdover.serve.queue import GeneratedVideo, QueueItem, VideoSpec
from holdover.serve.schemas import GenerationInfo, Seconds, Video
from holdover.serve.videos import VideoFolder, VideoJobs
from holdover.video import VideoFile
from tiny.prompted import prompted_wan, prompted_wan_image

from .servers import PATIENCE, Client, Server, eventually
from .test_edits import picture

pytestmark = pytest.mark.filterwarnings("ignore:The Sora API")
NONE, EASY = {"method": "none"}, {"method": "easy_cache", "threshold": 0.5, "warmup_steps": 2}
FIELDS: dict[str, Any] = {"num_frames": 5, "steps": 6, "seed": 3, "guidance": 1.0}


class Tiny(Client):
    """A server with a tiny pipeline, the folder of its videos, and a gate, at which steps wait while it is closed."""

    def __init__(self, url: str, model: ServedModel, folder: Path) -> None:
        super().__init__(url)
        self.http.headers["authorization"] = "Bearer right"
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="right", max_retries=0)
        self.model, self.folder, self.gate, self.arrived = model, folder, threading.Event(), threading.Event()
        self.gate.set()
        self.left = 0
        for part in (model.pipeline.transformer, model.pipeline.transformer_2):
            part.register_forward_pre_hook(self._pass)

    def _pass(self, *arguments: object) -> None:
        if not self.gate.is_set() and self.left == 0:
            self.arrived.set()
            self.gate.wait(PATIENCE)
        self.left -= 1

    def close(self, after: int = 0) -> None:
        """Close the gate when so many forwards have passed it."""
        self.left = after
        self.gate.clear()
        self.arrived.clear()

    def post(self, **request: Any) -> httpx.Response:
        return self.http.post("/v1/videos", json={"prompt": "a cat runs", "size": "64x64"} | FIELDS | request)

    def get(self, video: str) -> dict[str, Any]:
        found: dict[str, Any] = self.http.get(f"/v1/videos/{video}").json()
        return found

    def finished(self, video: str) -> dict[str, Any]:
        assert eventually(lambda: self.get(video)["status"] in ("completed", "failed"))
        return self.get(video)

    def frames(self, video: str, variant: str = "video") -> np.ndarray[Any, Any]:
        answer = self.http.get(f"/v1/videos/{video}/content", params={"variant": variant})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "video/mp4")
        with av.open(io.BytesIO(answer.content)) as container:
            return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])

    def files(self, video: str) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if video in path.name)


@contextmanager
def serving(pipeline: Any, folder: Path, **settings: Any) -> Iterator[Tiny]:
    model = ServedModel("tiny", pipeline)
    limits = {"queue_size": 2, "max_images": 1, "max_size": 1024, "max_frames": 33, "max_steps": 50}
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:  # not for servers that other fixtures start
            patch.setattr("holdover.serve.worker.load_model", lambda settings: model)
            patch.setenv("HOLDOVER_API_KEYS", "right")
            server = stack.enter_context(running(**{"model": "tiny", "video_dir": str(folder)} | limits | settings))
        tiny = Tiny(server.url, model, folder)
        yield tiny
        threading.Timer(0.5, tiny.gate.set).start()  # a job at the gate is still there at shutdown
        tiny.http.close()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tiny]:
    with serving(prompted_wan(), tmp_path_factory.mktemp("videos")) as server:
        yield server


def test_openais_client_generates_lists_and_deletes_videos(tiny: Tiny) -> None:
    videos, extra = tiny.openai.videos, FIELDS | {"cache": NONE}  # a form, in which all fields are texts
    first = videos.create_and_poll(prompt="a cat runs", size="64x64", extra_body=extra, poll_interval_ms=20)  # type: ignore[arg-type]
    assert (first.status, first.progress, first.size, first.error) == ("completed", 100, "64x64", None)
    assert (first.model, first.prompt, first.seconds, first.object) == ("tiny", "a cat runs", "0.3125", "video")
    assert first.created_at <= (first.completed_at or 0) < (first.expires_at or 0)
    assert "owner" not in first.to_dict()
    assert first.holdover["computed"] == {"transformer/cond": 2, "transformer_2/cond": 4}  # type: ignore[attr-defined]

    call: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 5, "num_inference_steps": 6, "guidance_scale": 1.0}
    noise = torch.Generator().manual_seed(3)
    plain = WanPipeline.__call__(
        tiny.model.pipeline, prompt=["a cat runs"], generator=[noise], output_type="pt", **call
    ).frames[0]
    shown = tiny.frames(first.id)
    assert shown.shape == (5, 64, 64, 3)
    assert np.abs(shown.astype(float) - to_pixels(plain)).mean() < 20  # of 255: it is noise, which H.264 keeps badly
    assert len(videos.download_content(first.id).read()) > 1000

    second = tiny.finished(tiny.post(seconds="0.5", num_frames=None, fps=8, seed=4).json()["id"])
    assert (second["num_frames"], second["seconds"], second["fps"]) == (5, "0.625", 8)
    assert [one.id for one in videos.list(limit=1)] == [second["id"], first.id]  # two pages
    assert [one.id for one in videos.list(order="asc", after=first.id)] == [second["id"]]
    assert tiny.files(first.id) == [f"{first.id}.json", f"{first.id}.mp4"]
    assert videos.delete(first.id).deleted
    assert tiny.files(first.id) == []
    with pytest.raises(openai.NotFoundError) as unknown:
        videos.retrieve(first.id)
    assert unknown.value.code == "video_not_found"
    assert unknown.value.param == "video_id"
    assert httpx.get(f"{tiny.url}/v1/videos", timeout=PATIENCE).status_code == 401


def test_a_video_is_compared_with_the_one_without_a_cache(tiny: Tiny) -> None:
    def plain_generations() -> int:
        totals = tiny.http.get("/v1/cache").json()["totals"]
        return int(totals["none"]["generations"])

    first = tiny.finished(tiny.post(compare=True, cache=EASY, steps=12, seed=9).json()["id"])
    found, before = first["comparison"], plain_generations()
    assert sum(first["holdover"]["held"].values()) > 0
    assert sum(found["plain"]["held"].values()) == 0
    assert not found["equal"]
    assert len(found["psnr_frames"]) == 5
    assert min(found["psnr_frames"]) <= found["psnr"] <= max(found["psnr_frames"])
    seen = ((tiny.frames(first["id"]) / 255 - tiny.frames(first["id"], "plain") / 255) ** 2).mean()
    assert found["psnr"] == pytest.approx(-10 * np.log10(seen), abs=6)  # both files have errors of their own
    again = tiny.finished(tiny.post(compare=True, cache=EASY | {"threshold": 0.0}, steps=12, seed=9).json()["id"])
    assert (again["comparison"]["equal"], again["comparison"]["psnr"]) == (True, None)
    assert plain_generations() == before  # the frames were kept
    assert np.array_equal(tiny.frames(again["id"]), tiny.frames(first["id"], "plain"))


def test_jobs_wait_run_and_are_cancelled(tiny: Tiny) -> None:
    cancelled = tiny.metric("holdover_cancelled_images_total")
    tiny.close(after=20)
    one = tiny.post(steps=50).json()
    assert (one["status"], one["progress"], one["completed_at"]) == ("queued", 0, None)
    assert tiny.arrived.wait(PATIENCE)
    assert eventually(lambda: tiny.get(one["id"])["progress"] == 40)
    assert tiny.get(one["id"])["status"] == "in_progress"
    two, three = (tiny.post().json() for _ in range(2))
    full = tiny.post()
    assert (full.status_code, "The queue is full with 2 videos" in full.text) == (429, True)
    early = tiny.http.get(f"/v1/videos/{one['id']}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (400, "video_not_ready")
    assert tiny.http.delete(f"/v1/videos/{two['id']}").json()["deleted"]
    assert tiny.http.delete(f"/v1/videos/{one['id']}").json() == {
        "id": one["id"],
        "object": "video.deleted",
        "deleted": True,
    }
    tiny.gate.set()
    assert tiny.finished(three["id"])["status"] == "completed"
    assert tiny.metric("holdover_cancelled_images_total") == cancelled + 1  # the one in the queue was never started
    assert tiny.files(one["id"]) == tiny.files(two["id"]) == []
    assert {one["id"], two["id"]}.isdisjoint(video["id"] for video in tiny.http.get("/v1/videos").json()["data"])


WRONG: list[tuple[dict[str, Any], int, str | None, str]] = [
    ({"num_frames": 6}, 400, "num_frames", "tiny generates a multiple of 4 plus 1, such as 5."),
    ({"num_frames": 37}, 413, "num_frames", "The video has 37 frames; this server allows at most 33."),
    ({"seconds": "4", "num_frames": None}, 413, "seconds", "The video has 65 frames"),
    ({"seconds": "soon"}, 400, "seconds", "seconds must be a number above 0"),
    ({"seconds": 1, "num_frames": 5}, 400, "num_frames", "send only one"),
    ({"fps": 0}, 400, "fps", "greater than or equal to 1"),
    ({"size": "60x64"}, 400, "size", "multiples of 16"),
    ({"size": "1024x64"}, 413, "size", "the longest side may have 512 pixels"),  # position embeddings of the model
    ({"num_frams": 5}, 400, "num_frams", "Did you mean 'num_frames'?"),
    ({"cache": {"method": "easy_cach"}}, 400, "cache.method", "Did you mean 'easy_cache'?"),
    ({"model": "tini"}, 404, "model", "Did you mean 'tiny'?"),
    ({"input_reference": {"image_url": "https://example.com/a.png"}}, 400, "input_reference", "fetches nothing"),
    ({"input_reference": {"image_url": "data:image/png;base64,!"}}, 400, "input_reference", "not in base64"),
    ({"input_reference": {"image_url": "data:image/png;base64,aaaa"}}, 400, "input_reference", "not a PNG"),
    ({"user": "me", "prompt": ""}, 400, "prompt", "at least 1 character"),
]


@pytest.mark.parametrize(("request_", "status", "param", "said"), WRONG, ids=[row[3][:30] for row in WRONG])
def test_what_is_wrong_is_said_before_the_work(
    tiny: Tiny, request_: dict[str, Any], status: int, param: str | None, said: str
) -> None:
    error = tiny.post(**request_).json()["error"]
    assert (tiny.post(**request_).status_code, error["param"]) == (status, param), error
    assert said in error["message"]


def test_other_wrong_requests(tiny: Tiny, server: Server) -> None:
    """Images of a video model, videos of an image model, forms, ids and pages."""
    asked = {"prompt": "x"}
    reference = {"image_url": f"data:image/png;base64,{base64.b64encode(picture()).decode()}"}
    image = {"files": {"image": picture()}}
    for answer, status, said in (
        (tiny.http.post("/v1/images/generations", json=asked), 400, "tiny generates videos: use /v1/videos."),
        (tiny.http.post("/v1/images/edits", data=asked, **image), 400, "tiny generates videos: use /v1/videos."),
        (server.http.post("/v1/videos", json=asked), 400, "emoji generates images: use /v1/images/generations."),
        (server.http.get("/v1/videos/video_1"), 400, "emoji generates images: use /v1/images/generations."),
        (tiny.post(input_reference=reference), 400, "tiny takes no image"),
        (tiny.http.post("/v1/videos", content=b"{"), 400, "The request is not JSON"),
        (tiny.http.post("/v1/videos", data=asked, **image), 400, "send the image in the field input_reference"),
        (tiny.http.get("/v1/videos/../../etc/passwd"), 404, "There is nothing at /etc/passwd"),
        (tiny.http.get("/v1/videos/..%2F..%2Fx"), 404, "There is nothing at"),
        (tiny.http.get("/v1/videos/video_1"), 404, "There is no video 'video_1'."),
        (tiny.http.get("/v1/videos", params={"limit": 0}), 400, "limit: Input should be greater than or equal to 1."),
        (tiny.http.get("/v1/videos", params={"after": "x"}), 400, "after must be the id of a video"),
        (tiny.http.get("/v1/videos", params={"limt": 5}), 400, "no query parameter 'limt'. Did you mean 'limit'?"),
        (tiny.http.get("/v1/videos", params={"page": 2}), 400, "'page'. Query parameters: after, limit, order."),
        (tiny.http.get("/v1/videos/video_1", params={"x": 1}), 400, "'x'. Query parameters: none."),
    ):
        assert (answer.status_code, said in answer.json()["error"]["message"]) == (status, True), answer.text
    described = tiny.http.get("/v1/models").json()["data"][0]
    assert described["video"] == {"num_frames": 81, "fps": 16, "multiple": 4, "image": "none"}
    assert server.http.get("/v1/models").json()["data"][0]["video"] is None


def test_a_video_starts_from_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_wan_i2v, "ftfy", SimpleNamespace(fix_text=str), raising=False)  # is not installed
    with serving(prompted_wan_image(), tmp_path) as tiny:
        missing = tiny.post().json()["error"]
        assert (missing["param"], missing["message"]) == ("input_reference", "tiny needs an image to start from.")
        reference = "a.png", picture(100, 72)
        made = tiny.openai.videos.create(prompt="a cat", input_reference=reference, extra_body=FIELDS)  # a form
        one = tiny.finished(made.id)
        url = {"image_url": f"data:image/png;base64,{base64.b64encode(reference[1]).decode()}"}
        two = tiny.finished(tiny.post(input_reference=url, prompt="a cat", size="96x64").json()["id"])
        assert (one["status"], one["size"], two["status"]) == ("completed", "96x64", "completed")
        assert np.array_equal(tiny.frames(one["id"]), tiny.frames(two["id"]))


def test_a_full_disk_fails_the_job_and_not_the_server(tiny: Tiny, tmp_path: Path) -> None:
    tiny.close()
    video = tiny.post().json()["id"]
    (tiny.folder / f".{video}.mp4.new.mp4").symlink_to("/dev/full")  # what the worker is going to write
    tiny.gate.set()
    found = tiny.finished(video)
    assert (found["status"], found["error"]["code"]) == ("failed", "storage_failed")
    assert "No space left on device" in found["error"]["message"]
    assert tiny.files(video) == [f"{video}.json"]
    failed = tiny.http.get(f"/v1/videos/{video}/content").json()["error"]
    assert (failed["code"], "No space left" in failed["message"]) == ("video_failed", True)
    with tiny.model.pipeline.vae.decoder.register_forward_hook(broken_decoder):
        asked = FIELDS | {"prompt": "x", "cache": NONE}
        broken = tiny.http.post("/v1/videos", json=asked, headers={"x-request-id": "one"})
        assert "its log says why, under one." in tiny.finished(broken.json()["id"])["error"]["message"]
    assert tiny.finished(tiny.post().json()["id"])["status"] == "completed"

    (tmp_path / "file").touch()
    folder = VideoFolder(Settings(video_dir=str(tmp_path / "file" / "videos")))
    with pytest.raises(ApiError, match="Cannot use the folder") as refused:
        folder.create(new_video(0), SPEC)
    assert refused.value.status_code == 507
    huge = VideoSpec(**vars(SPEC) | {"frames": 10**12})
    with pytest.raises(ApiError, match="are free"):
        VideoFolder(Settings(video_dir=str(tmp_path))).create(new_video(0), huge)


def broken_decoder(*_: object) -> None:
    raise RuntimeError("no luck")


def test_frames_are_written_when_they_are_decoded(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    events, add = list[str](), VideoFile.add

    def count(file: VideoFile, frame: torch.Tensor) -> None:
        events.append("written")
        add(file, frame)

    monkeypatch.setattr(VideoFile, "add", count)
    with tiny.model.pipeline.vae.decoder.register_forward_pre_hook(lambda *_: events.append("decoded")):
        video = tiny.finished(tiny.post(num_frames=9, seed=77).json()["id"])
    assert events == ["decoded", "written", *(["decoded"] + ["written"] * 4) * 2]
    assert len(tiny.frames(video["id"])) == 9


SPEC = VideoSpec("x", None, 1, (64, 64), (64, 64), 6, (), own_config("none", {}))


def new_video(number: int) -> Video:
    name = f"video_{number:028x}"
    return Video(
        id=name, created_at=1, model="tiny", prompt="x", seconds="1", size="64x64", num_frames=5, fps=5, steps=6
    )


def test_finished_videos_survive_and_others_are_marked(tmp_path: Path) -> None:
    """A server is stopped with a job that runs and one that waits; a process is killed; another one lives."""
    with serving(prompted_wan(), tmp_path, grace=0) as tiny:
        done = tiny.finished(tiny.post().json()["id"])
        content = (tmp_path / f"{done['id']}.mp4").read_bytes()
        tiny.close()
        running_, waiting = (tiny.post(steps=50).json()["id"] for _ in range(2))
        assert tiny.arrived.wait(PATIENCE)
    other = VideoFolder(Settings(video_dir=str(tmp_path)))
    ours, killed = (other.create(new_video(number), SPEC).id for number in (1, 2))
    record = json.loads((tmp_path / f"{killed}.json").read_text())
    (tmp_path / f"{killed}.json").write_text(json.dumps(record | {"owner": "0", "status": "in_progress"}))
    (tmp_path / f".{killed}.mp4.new.mp4").touch()
    with serving(prompted_wan(), tmp_path) as tiny:
        assert tiny.get(done["id"]) == done
        assert tiny.http.get(f"/v1/videos/{done['id']}/content").content == content
        for video, said in ((running_, "was shut down"), (waiting, "was shut down"), (killed, "The server stopped")):
            found = tiny.get(video)
            assert (found["status"], found["error"]["code"]) == ("failed", "server_stopped")
            assert said in found["error"]["message"]
            assert tiny.files(video) == [f"{video}.json"]
        assert tiny.get(ours)["status"] == "queued"
        other.close()
        assert tiny.get(ours)["status"] == "failed"
        tiny.close()
        deleted = tiny.post(steps=50).json()["id"]
        assert tiny.arrived.wait(PATIENCE)
        VideoFolder(Settings(video_dir=str(tmp_path))).delete(deleted)  # by another process
        tiny.left = 2  # the next step tells the server that the record is gone, and the one after it waits
        tiny.gate.set()
        tiny.gate.clear()
        assert eventually(lambda: tiny.http.get(f"/v1/videos/{deleted}").status_code == 404)
        tiny.gate.set()
        assert eventually(lambda: tiny.metric("holdover_cancelled_images_total") == 1)
        assert tiny.files(deleted) == []


_DELETE = """
import sys
from holdover.serve import Settings
from holdover.serve.videos import VideoFolder

folder = VideoFolder(Settings(video_dir=sys.argv[1]))
for line in sys.stdin:
    folder.delete(line.strip())
    print("deleted", flush=True)
"""


def test_what_another_process_deletes_stays_deleted(tmp_path: Path) -> None:
    """While this process writes the progress of the same job without a pause."""
    folder = VideoFolder(Settings(video_dir=str(tmp_path)))
    command = [sys.executable, "-c", _DELETE, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        for number in range(20):
            record = folder.create(new_video(number), SPEC)
            other.stdin.write(f"{record.id}\n")
            answer = threading.Thread(target=other.stdout.readline)
            answer.start()
            while answer.is_alive():
                folder.save(record)
            assert not folder.save(record)
        other.stdin.close()
        assert other.wait(PATIENCE) == 0
    assert folder.page(None, 100, descending=False).data == []
    folder.close()
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_old_videos_and_the_oldest_make_room(tmp_path: Path) -> None:
    folder = VideoFolder(Settings(video_dir=str(tmp_path), video_space=2e-6, video_hours=1))
    ids = []
    for number in range(3):
        record = folder.create(new_video(number), SPEC)
        (tmp_path / f"{record.id}.mp4").write_bytes(bytes(1000))
        assert folder.save(record.model_copy(update={"status": "completed"}))
        ids.append(record.id)
    (tmp_path / f"{new_video(9).id}.mp4").touch()  # of a process that was killed while it deleted
    (tmp_path / "video_of_my_cat.mp4").touch()  # not ours
    assert [video.id for video in folder.page(None, 10, descending=False).data] == ids[1:]
    waiting = folder.create(new_video(3), SPEC)
    names = sorted(path.name for path in tmp_path.glob("*.mp4"))
    assert names == [*(f"{one}.mp4" for one in ids[1:]), "video_of_my_cat.mp4"]
    old = folder.get(ids[1])
    (tmp_path / f"{old.id}.json").write_text(
        old.model_copy(update={"expires_at": int(time.time()) - 1}).model_dump_json()
    )
    with pytest.raises(ApiError, match="There is no video"):
        folder.get(old.id)
    (tmp_path / f"{ids[2]}.json").write_text("{")  # not ours
    assert [video.id for video in folder.page(None, 10, descending=True).data] == [waiting.id]
    folder.close()


def killed(folder: Path, record: Video) -> None:
    """Leave a job as if its process had been killed."""
    path = folder / f"{record.id}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"owner": "0", "status": "in_progress"}))


def test_a_video_is_finished_when_its_file_is(tmp_path: Path) -> None:
    """Its process was killed before it wrote the record, or could not write it because the disk was full."""
    folder = VideoFolder(Settings(video_dir=str(tmp_path)))
    record = folder.create(new_video(1), SPEC)
    (tmp_path / f"{record.id}.mp4").write_bytes(b"one")
    killed(tmp_path, record)
    other = VideoFolder(Settings(video_dir=str(tmp_path)))
    found = other.get(record.id)
    assert (found.status, found.progress, found.error) == ("completed", 100, None)
    assert "before it had recorded how" in found.notes[0]
    assert other.open(record.id, "video").read() == b"one"

    late = folder.create(new_video(2), SPEC)
    (tmp_path / f"{late.id}.mp4").write_bytes(b"two")
    full = tmp_path / f".{folder._own}.new"  # what the record is written to
    full.symlink_to("/dev/full")
    assert folder.save(late.model_copy(update={"status": "completed"}))
    assert json.loads((tmp_path / f"{late.id}.json").read_text())["status"] == "queued"
    assert folder.get(late.id).status == "completed"
    folder.save(late)  # progress that comes late
    folder.close()  # there is room again
    assert other.get(late.id).status == "completed"
    assert other.open(late.id, "video").read() == b"two"


def test_a_full_disk_hides_no_video(tmp_path: Path) -> None:
    """A record of a process that was killed cannot be written, the others are there."""
    folder = VideoFolder(Settings(video_dir=str(tmp_path)))
    ids = [folder.create(new_video(number), SPEC).id for number in (1, 2)]
    killed(tmp_path, folder.get(ids[0]))
    other = VideoFolder(Settings(video_dir=str(tmp_path)))
    full = tmp_path / f".{other._own}.new"
    for _ in range(2):
        full.symlink_to("/dev/full")
        assert [video.status for video in other.page(None, 10, descending=False).data] == ["failed", "queued"]
        full.symlink_to("/dev/full")
        assert other.get(ids[0]).error.code == "server_stopped"  # type: ignore[union-attr]
    full.symlink_to("/dev/full")
    other.delete(ids[0])
    assert [video.id for video in other.page(None, 10, descending=False).data] == ids[1:]
    folder.close()


def test_a_record_that_cannot_be_read_keeps_its_video(tmp_path: Path) -> None:
    folder = VideoFolder(Settings(video_dir=str(tmp_path)))
    name = new_video(1).id
    (tmp_path / f"{name}.json").write_text('{"id": "of another version"}')
    (tmp_path / f"{name}.mp4").write_bytes(b"one")
    folder.purge()
    assert (tmp_path / f"{name}.mp4").read_bytes() == b"one"


def test_content_can_be_read_while_it_is_deleted(tiny: Tiny) -> None:
    video = tiny.finished(tiny.post(seed=78).json()["id"])["id"]
    path = f"/v1/videos/{video}/content"
    whole = tiny.http.get(path).content
    head = tiny.http.head(path)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(whole)), b"")
    part = tiny.http.get(path, headers={"range": "bytes=10-19"})
    assert (part.status_code, part.content) == (206, whole[10:20])
    with VideoFolder(Settings(video_dir=str(tiny.folder))).open(video, "video") as file:
        tiny.http.delete(f"/v1/videos/{video}")
        assert file.read() == whole
    assert tiny.http.get(path).status_code == 404
    video = tiny.finished(tiny.post(seed=78).json()["id"])["id"]
    (tiny.folder / f"{video}.mp4").unlink()
    gone = tiny.http.get(f"/v1/videos/{video}/content")
    assert (gone.status_code, gone.json()["error"]["message"]) == (404, f"The file of {video} is gone.")


def test_a_job_that_ends_at_shutdown_is_finished(tmp_path: Path) -> None:
    """The server stops between the end of a generation and the moment at which its record says so."""
    items = list[QueueItem]()
    backend: Any = SimpleNamespace(submit=items.extend)
    seconds = Seconds(queued=0, generation=1, computed=1, held=0)
    counts: dict[str, Any] = {"computed": {}, "held": {}, "trace": {}, "seconds": seconds, "batch": 1, "held_bytes": 0}
    info = GenerationInfo(seed=1, method="none", settings={}, steps=6, drawn_size="64x64", **counts)

    async def run() -> None:
        jobs = VideoJobs(Settings(video_dir=str(tmp_path)), backend)
        video = await jobs.create(SPEC, "tiny", [])
        Path(items[0].spec.path).write_bytes(b"one")  # type: ignore[attr-defined]
        assert items[0].notify(GeneratedVideo(info, None))
        await jobs.stop(0)
        assert jobs.folder.get(video.id).status == "completed"
        assert jobs.folder.open(video.id, "video").read() == b"one"

    asyncio.run(run())
