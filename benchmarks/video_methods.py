"""`python -m benchmarks.video_methods`: every method on small video pipelines, by `generate`, `compare` and `serve`.

The pipelines are those of tests/tiny: diffusers' own classes with random weights. Each method has settings that hold
steps, and each of the three must say that it held some, and must give a video with the right frames. An argument is
the number of processes, 1 by default.
"""

from __future__ import annotations

import base64
import io
import logging
import multiprocessing
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import av
import httpx
import torch
from PIL import Image
from typer.testing import CliRunner

import holdover.loading
from holdover import selector
from holdover.cli import app
from holdover.compare import Comparison, MethodCandidate, compare
from holdover.report import write_report
from holdover.serve import running
from holdover.serve.model import ServedModel
from tiny.prompted_video import PROMPTED_VIDEOS, SMALL

from .report import provenance, save, table

PIPELINES = {
    "Wan 2.1": "wan21",
    "Wan 2.2": "wan",
    "Wan 2.2, image to video": "wan_image",
    "LTX": "ltx",
    "HunyuanVideo": "hunyuan",
}
SIZES = {name: {"height": 64, "width": 64} | SMALL[name] for name in PIPELINES.values()}
STEPS, FRAMES, PROMPT = 8, 9, "a cat runs"
HOLDING: dict[str, dict[str, Any]] = {
    "tea_cache": {"rel_l1_thresh": 10.0, "coefficients": [1.0, 0.0]},
    "mag_cache": {"mag_ratios": [1.0], "mag_threshold": 1.0, "mag_max_skip_steps": 1, "mag_retention_ratio": 0.2},
    "cache_dit": {"residual_diff_threshold": 10.0, "max_warmup_steps": 2},
    "plan": {"schedule": [0, 1, 3, 4, 6]},
    "easy_cache": {"threshold": 10.0, "warmup_steps": 2},
    "sea_cache": {"threshold": 10.0},
    "first_block": {"threshold": 10.0},
    "taylor_seer": {"interval": 2, "warmup_steps": 2},
    "spectrum": {"interval": 2.0, "warmup_steps": 2},
    "none": {},
}
Found = Iterator[tuple[str, str]]  # a method, and what is wrong with it: nothing if the text is empty


def generate(name: str, methods: Collection[str], folder: Path) -> Found:
    """`holdover generate` to an MP4 file."""
    names = {"height": "--height", "width": "--width", "num_frames": "--frames"}
    flags = [text for key, value in SIZES[name].items() for text in (names[key], str(value))]
    flags += ["--image", str(_photo(folder))] if name == "wan_image" else []
    pipe = PROMPTED_VIDEOS[name]()
    with patch.object(holdover.loading, "load_pipeline", lambda settings: pipe):
        for method in methods:
            path = folder / f"{method}.mp4"
            settings = [text for item in HOLDING[method].items() for text in ("--set", "{}={}".format(*item))]
            command = ["generate", PROMPT, "--steps", str(STEPS), "--out", str(path), "--cache", method]
            result = CliRunner().invoke(app, [*command, *settings, *flags], env={"COLUMNS": "300"})
            if result.exit_code:
                yield method, f"{result.output} {result.exception!r}"
                continue
            held = sum(map(int, re.findall(r"(\d+) held", result.output)))
            yield method, _check(method, held, _count_frames(path.read_bytes()))


def compare_all(name: str, methods: Collection[str], folder: Path) -> Found:
    """`compare` with a report that plays the videos."""
    photo = {"image": str(_photo(folder))} if name == "wan_image" else {}
    rest = {"steps": STEPS, "arguments": tuple(SIZES[name].items()), "warmup": 0, "baselines": False}
    candidates = tuple(MethodCandidate(method, tuple(HOLDING[method].items())) for method in methods)
    results = compare(PROMPTED_VIDEOS[name](), Comparison((PROMPT,), candidates, **rest, **photo), folder)
    page = write_report(results, folder).read_text(encoding="utf-8")
    rows = {row.candidate.get("name"): row for row in results.rows}
    for method in methods:
        row = rows[method]
        if row.error is not None:
            yield method, row.error
            continue
        clip = (folder / row.images[0]).read_bytes()
        wrong = "" if base64.b64encode(clip).decode() in page else "the report does not play the video"
        yield method, wrong or _check(method, sum(row.held.values()), _count_frames(clip))


def serve(name: str, methods: Collection[str], folder: Path) -> Found:
    """`POST /v1/videos` with a comparison; one server has all methods in its queue."""
    model = ServedModel(name, PROMPTED_VIDEOS[name]())
    size = "{width}x{height}".format(**SIZES[name])
    body: dict[str, Any] = {"prompt": PROMPT, "size": size, "num_frames": FRAMES, "steps": STEPS, "seed": 0}
    if name == "wan_image":
        data = base64.b64encode(_photo(folder).read_bytes()).decode()
        body["input_reference"] = {"image_url": f"data:image/png;base64,{data}"}
    with (
        patch("holdover.serve.worker.load_model", lambda settings: model),
        running(model=name, video_dir=str(folder / "videos")) as server,
        httpx.Client(base_url=f"{server.url}/v1", timeout=600) as client,
    ):
        jobs = {}
        for method in methods:
            cache = {"method": method} | HOLDING[method]
            answer = client.post("/videos", json=body | {"cache": cache, "compare": True}).json()
            if "id" not in answer:
                yield method, str(answer)
            else:
                jobs[method] = answer["id"]
        for method, job in jobs.items():
            while (video := client.get(f"/videos/{job}").json())["status"] in ("queued", "in_progress"):
                time.sleep(0.02)
            if video["status"] == "failed":
                yield method, video["error"]["message"]
                continue
            frames = _count_frames(client.get(f"/videos/{job}/content").content)
            held = sum(video["holdover"]["held"].values())
            wrong = "another video than without a cache" if held == 0 and not video["comparison"]["equal"] else ""
            yield method, wrong or _check(method, held, frames)


ENTRANCES: dict[str, Callable[[str, Collection[str], Path], Found]] = {
    "generate": generate,
    "compare": compare_all,
    "serve": serve,
}


def _check(method: str, held: float, frames: int) -> str:
    if frames != FRAMES:
        return f"{frames} frames instead of {FRAMES}"
    return "" if (held > 0) == (method != "none") else f"{held:g} steps were held"


def _count_frames(file: bytes) -> int:
    with av.open(io.BytesIO(file)) as container:
        return sum(1 for _ in container.decode(video=0))


def _photo(folder: Path) -> Path:
    path = folder / "photo.png"
    Image.effect_noise((64, 64), 50).convert("RGB").save(path)
    return path


def run_all(title: str) -> tuple[list[str], dict[str, str]]:
    """The row of one pipeline in the table, and its failures."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    start, methods, cells, failures = time.process_time(), selector.methods(), list[str](), dict[str, str]()
    for entrance, run in ENTRANCES.items():
        with tempfile.TemporaryDirectory() as folder:
            found = dict(run(PIPELINES[title], methods, Path(folder)))
        wrong = {f"{title}, {entrance}, {method}": text for method, text in found.items() if text}
        failures |= wrong
        cells.append(f"{len(found) - len(wrong)} of {len(methods)}")
    return [title, *cells, f"{time.process_time() - start:.0f}"], failures


def main() -> int:
    """Run all of them, each pipeline in a process of its own; the exit status is the number of failures."""
    with ProcessPoolExecutor(int(sys.argv[1]) if sys.argv[1:] else 1, multiprocessing.get_context("spawn")) as pool:
        rows, failures = zip(*pool.map(run_all, PIPELINES), strict=True)
    failed = {where: text for found in failures for where, text in found.items()}
    shown = [["", *ENTRANCES, "CPU seconds"], *rows]
    print(*(f"{where}: {text}" for where, text in failed.items()), sep="\n")
    print(table(shown))
    figures = {"methods": selector.methods(), "steps": STEPS, "frames": FRAMES, "rows": shown, "failures": failed}
    print(save("video_methods", provenance() | figures))
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
