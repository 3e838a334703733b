"""Comparisons on tiny real pipelines: what is measured, what is resumed, what is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import av
import pytest
import torch
from diffusers import FluxPipeline
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file

import holdover
from holdover.compare import (
    Comparison,
    Custom,
    FewerSteps,
    Folder,
    MethodCandidate,
    ProgressCallback,
    Results,
    Row,
    compare,
)
from holdover.errors import ConfigError, HoldoverError
from holdover.metrics import psnr
from tiny.prompted import prompted_flux, prompted_wan

SETTINGS = {"mag_threshold": 0.5, "mag_ratios": [1.0] * 8, "mag_retention_ratio": 0.2, "mag_max_skip_steps": 2}
HOLDS = MethodCandidate("mag_cache", tuple(SETTINGS.items()), "holds")
NONE = MethodCandidate("none")


def spec(*candidates: Any, **changes: Any) -> Comparison:
    values: dict[str, Any] = {"prompts": ("red apple", "blue dog"), "seeds": (3, 4), "steps": 8, "batch_size": 3}
    return Comparison(candidates=candidates, **values | changes)


class Recorder(ProgressCallback):
    """Records what was generated again."""

    def __init__(self) -> None:
        self.started: list[str] = []
        self.finished: list[str] = []

    def on_start(self, label: str, steps: int) -> None:
        self.started.append(label)

    def on_finish(self, row: Row, results: Results) -> None:
        self.finished.append(row.label)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return prompted_flux()


class TestRows:
    @pytest.fixture(scope="class")
    def results(self, pipe: Any) -> Results:
        return compare(pipe, spec(HOLDS, NONE))

    def test_both_baselines_are_added_for_every_method_at_its_computed_steps(self, results: Results) -> None:
        counted = round(results.row("holds").computed_steps or 0)
        assert 1 < counted < 8
        assert [row.label for row in results.rows[2:]] == [f"{counted} steps", f"{counted} steps, second order"]
        assert [row.kind for row in results.rows] == ["method", "method", "fewer_steps", "second_order"]

    def test_a_method_that_holds_nothing_is_equal(self, results: Results) -> None:
        row = results.row("none")
        assert row.values["psnr"] == (math.inf,) * 4
        assert row.values["nonwhite_error"] == (0,) * 4
        assert row.summary("ssim").worst == pytest.approx(1)
        assert row.computed_steps == 8

    def test_what_was_computed_and_held(self, results: Results) -> None:
        row = results.row("holds")
        (strip,) = row.strips.values()
        assert len(strip) == 8
        assert strip.startswith("C")
        assert row.computed_steps == strip.count("C") == 8 - strip.count("h")
        assert row.bytes_held > 0
        assert 0 < row.summary("psnr").worst < 100

    def test_every_image_has_its_values_and_its_seconds(self, results: Results) -> None:
        for row in results.rows:
            assert row.error is None
            assert len(row.seconds) == 4
            assert all(seconds > 0 for seconds in row.seconds)
            assert {name: len(values) for name, values in row.values.items()} == dict.fromkeys(row.values, 4)
            assert {"psnr", "ssim", "nonwhite_error"} <= set(row.values)

    def test_values_are_those_of_the_images(self, pipe: Any, results: Results) -> None:
        def generate(prompt: str, seed: int) -> torch.Tensor:
            noise = torch.Generator().manual_seed(seed)
            return pipe(prompt, num_inference_steps=8, generator=noise, output_type="pt").images[0]

        plain = generate("blue dog", 3)
        with holdover.enable(pipe, "mag_cache", **SETTINGS):
            held = generate("blue dog", 3)
        assert results.row("holds").values["psnr"][2] == pytest.approx(float(psnr(plain, held)), abs=0.01)

    def test_json_and_back(self, results: Results, tmp_path: Path) -> None:
        results.save(tmp_path / "results.json")
        assert Results.load(tmp_path / "results.json") == results
        assert json.loads((tmp_path / "results.json").read_text())["rows"][1]["values"]["psnr"] == [None] * 4
        assert [path.name for path in tmp_path.iterdir()] == ["results.json"]

    def test_the_table_in_words(self, results: Results) -> None:
        lines = str(results).splitlines()
        assert len(lines) == 2 + len(results.rows)
        assert "1.00x" in lines[1]
        assert "equal" in lines[3]

    def test_the_environment_says_what_it_ran_on(self, results: Results) -> None:
        assert results.environment["pipeline"] == "FluxPipeline"
        assert results.environment["transformer"] == "FluxTransformer2DModel"
        assert results.environment["versions"]["holdover"] == holdover.__version__
        assert "1 thread" in results.environment["device"]
        assert results.unavailable == {}


def test_the_batch_size_does_not_change_the_noise(pipe: Any) -> None:
    one, four = (compare(pipe, spec(HOLDS, batch_size=size)).row("holds").values["psnr"] for size in (1, 4))
    assert one == pytest.approx(four, abs=0.05)


def test_the_processor_s_time_needs_one_thread(pipe: Any) -> None:
    assert compare(pipe, spec(clock="cpu")).reference.mean_seconds > 0
    torch.set_num_threads(2)
    try:
        with pytest.raises(ConfigError, match="one thread"):
            compare(pipe, spec(clock="cpu"))
    finally:
        torch.set_num_threads(1)


class TestWarmUp:
    def test_it_changes_no_image(self, pipe: Any) -> None:
        cold, warm, whole = (compare(pipe, spec(HOLDS, warmup=steps)).row("holds") for steps in (0, 2, 8))
        assert cold.values == warm.values == whole.values
        assert cold.strips == warm.strips == whole.strips

    def test_a_pipeline_that_cannot_be_stopped_is_warmed_by_a_whole_generation(self) -> None:
        """A schedule is for the grid of the comparison: on a shorter one it would be refused."""

        class Unstoppable(FluxPipeline):
            def __call__(self, prompt, generator, num_inference_steps, output_type, return_dict):
                return super().__call__(
                    prompt,
                    generator=generator,
                    num_inference_steps=num_inference_steps,
                    output_type=output_type,
                    return_dict=return_dict,
                )

        plain = prompted_flux()
        pipe = Unstoppable(**plain.components)
        pipe.default_sample_size = plain.default_sample_size
        held = MethodCandidate("plan", (("schedule", (0, 4, 6)), ("predictor", "hold")), "held")
        row = compare(pipe, spec(held, warmup=2)).row("held")
        assert row.error is None
        assert row.computed_steps == 3

    def test_a_custom_candidate_sees_a_generation_to_its_end(self, pipe: Any) -> None:
        caches: list[Any] = []

        def counted(pipe: Any) -> Any:
            caches.append(holdover.enable(pipe, "none"))
            return caches[-1]

        compare(pipe, spec(Custom("counts", counted)))
        generations = caches[0].stats().generations
        assert [(g.steps, len(g.forwards)) for g in generations] == [(8, 8), (8, 8), (8, 8)]


def test_the_pipeline_is_left_as_it_was(pipe: Any) -> None:
    scheduler, forward = pipe.scheduler, pipe.transformer.forward
    compare(pipe, spec(HOLDS, FewerSteps(3, second_order=True)))
    assert pipe.scheduler is scheduler
    assert pipe.transformer.forward == forward


def test_a_pipeline_with_a_cache_on_is_refused(pipe: Any) -> None:
    with holdover.enable(pipe, "none"), pytest.raises(ConfigError, match="disable it"):
        compare(pipe, spec())


class TestCustom:
    def test_a_strip_from_a_function(self, pipe: Any) -> None:
        @contextmanager
        def around(given: Any) -> Iterator[Any]:
            assert given is pipe
            yield lambda: {"cond": "CChhChhh"}

        results = compare(pipe, spec(Custom("peer", around)))
        assert results.row("peer").computed_steps == 3
        assert [row.label for row in results.rows] == ["peer", "3 steps", "3 steps, second order"]

    def test_a_cache_of_holdover(self, pipe: Any) -> None:
        results = compare(
            pipe, spec(Custom("mine", lambda pipe: holdover.enable(pipe, "mag_cache", **SETTINGS)), HOLDS)
        )
        assert results.row("mine").strips == results.row("holds").strips
        assert results.row("mine").values == results.row("holds").values

    def test_unknown_computed_steps(self, pipe: Any) -> None:
        @contextmanager
        def around(pipe: Any) -> Iterator[None]:
            yield None

        results = compare(pipe, spec(Custom("unknown", around)))
        assert results.row("unknown").computed_steps is None
        assert len(results.rows) == 1
        assert "?" in str(results)


class TestFailures:
    def test_a_failing_candidate_is_a_row_and_the_others_go_on(self, pipe: Any) -> None:
        @contextmanager
        def around(pipe: Any) -> Iterator[None]:
            raise RuntimeError("out of luck\nsecond line")
            yield

        results = compare(pipe, spec(Custom("fails", around), MethodCandidate("tea_cache"), HOLDS))
        assert results.row("fails").error == "RuntimeError: out of luck"
        assert results.row("tea_cache").error is None
        assert results.row("holds").error is None
        assert "failed: RuntimeError: out of luck" in str(results)
        assert Results.from_dict(json.loads(json.dumps(results.as_dict()))) == results

    def test_a_profile_that_is_missing_fails_by_name(self, pipe: Any) -> None:
        results = compare(pipe, spec(MethodCandidate("mag_cache", (("profile", "no-such-profile"),)), HOLDS))
        error = results.rows[0].error
        assert error is not None
        assert error.startswith("ProfileError: ")
        assert "no-such-profile" in error
        assert results.row("holds").error is None

    def test_images_that_are_not_finite_fail(self, pipe: Any) -> None:
        @contextmanager
        def around(pipe: Any) -> Iterator[None]:
            with torch.no_grad():
                bias = pipe.transformer.proj_out.bias
                kept = bias.clone()
                bias.fill_(float("nan"))
                try:
                    yield
                finally:
                    bias.copy_(kept)

        results = compare(pipe, spec(Custom("nan", around)))
        assert results.row("nan").error == "HoldoverError: the images have pixels that are not finite"


class TestFolder:
    def test_a_second_run_generates_nothing(self, pipe: Any, tmp_path: Path) -> None:
        first = compare(pipe, spec(HOLDS), tmp_path)
        seen = Recorder()
        second = compare(pipe, spec(HOLDS), tmp_path, seen)
        assert seen.started == []
        assert seen.finished == ["uncached", *(row.label for row in first.rows)]
        assert (second.rows, second.reference) == (first.rows, first.reference)

    def test_an_interrupted_run_resumes(self, pipe: Any, tmp_path: Path) -> None:
        class Interrupted(ProgressCallback):
            def on_start(self, label: str, steps: int) -> None:
                if label == "none":
                    raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            compare(pipe, spec(HOLDS, NONE), tmp_path, Interrupted())
        assert [row.label for row in Results.load(tmp_path / "results.json").rows] == ["holds"]
        seen = Recorder()
        compare(pipe, spec(HOLDS, NONE), tmp_path, seen)
        assert "holds" not in seen.started
        assert seen.started[0] == "none"

    @pytest.mark.parametrize("name", ["results.json", "images/holds-*-0.png"])
    def test_a_file_that_does_not_fit_on_the_disk_is_named_and_removed(
        self, pipe: Any, tmp_path: Path, name: str
    ) -> None:
        compare(pipe, spec(NONE, HOLDS), tmp_path)
        (path,) = tmp_path.glob(name)
        path.unlink()
        new = path.with_name(path.name + ".new")
        new.symlink_to("/dev/full")
        said = f"Cannot write {path}: No space left on device."
        if name == "results.json":
            with pytest.raises(HoldoverError, match=re.escape(said)):
                compare(pipe, spec(NONE, HOLDS), tmp_path)
        else:
            (tmp_path / "results.json").unlink()  # so that it is generated again
            results = compare(pipe, spec(NONE, HOLDS), tmp_path)
            assert results.row("holds").error == f"WriteError: {said}"
        assert not new.is_symlink()
        assert not path.exists()

    def test_a_reference_that_does_not_fit_is_named(
        self, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(tensors: Any, path: Path) -> None:  # what safetensors raises; it writes to no device
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

        monkeypatch.setattr("holdover.compare.results.save_file", fail)
        path = tmp_path / "reference" / "0.safetensors"
        with pytest.raises(HoldoverError, match=re.escape(f"Cannot write {path}: No space left on device.")):
            compare(pipe, spec(HOLDS), tmp_path)

    def test_candidates_may_be_added_and_removed(self, pipe: Any, tmp_path: Path) -> None:
        compare(pipe, spec(HOLDS), tmp_path)
        seen = Recorder()
        results = compare(pipe, spec(NONE, HOLDS), tmp_path, seen)
        assert seen.started == ["none"]
        assert [row.label for row in results.rows[:2]] == ["none", "holds"]
        compare(pipe, spec(NONE), tmp_path)
        assert [row.label for row in Results.load(tmp_path / "results.json").rows] == ["none"]

    def test_a_failure_is_tried_again(self, pipe: Any, tmp_path: Path) -> None:
        @contextmanager
        def fails(pipe: Any) -> Iterator[None]:
            raise RuntimeError("not now")
            yield

        @contextmanager
        def works(pipe: Any) -> Iterator[None]:
            yield

        assert compare(pipe, spec(Custom("peer", fails)), tmp_path).row("peer").error is not None
        assert compare(pipe, spec(Custom("peer", works)), tmp_path).row("peer").error is None

    def test_another_comparison_is_refused_by_name(self, pipe: Any, tmp_path: Path) -> None:
        compare(pipe, spec(), tmp_path)
        before = (tmp_path / "results.json").read_bytes()
        with pytest.raises(ConfigError, match="different settings: steps 8 there and 6 here"):
            compare(pipe, spec(steps=6), tmp_path)
        assert (tmp_path / "results.json").read_bytes() == before

    def test_another_model_is_refused(self, pipe: Any, tmp_path: Path) -> None:
        compare(pipe, spec(prompts=("dog",), seeds=(0,)), tmp_path)
        with pytest.raises(ConfigError, match="pipeline 'FluxPipeline' there and 'ShortWanPipeline' here"):
            compare(prompted_wan(), spec(prompts=("dog",), seeds=(0,)), tmp_path)

    def test_images_and_differences_are_written(self, pipe: Any, tmp_path: Path) -> None:
        results = compare(pipe, spec(HOLDS), tmp_path)
        for row in results.rows:
            assert len(set(row.images)) == len(set(row.differences)) == 4
            for image, difference in zip(row.images, row.differences, strict=True):
                assert Image.open(tmp_path / image).mode == "RGB"
                assert Image.open(tmp_path / difference).mode == "RGBA"
                assert Image.open(tmp_path / image).size == Image.open(tmp_path / difference).size
        assert len(results.reference.images) == 4

    def test_a_difference_is_opaque_where_the_images_differ(self, tmp_path: Path) -> None:
        folder = Folder(tmp_path)
        folder.prepare()
        a, b = torch.full((1, 3, 8, 8), 0.5), torch.full((1, 3, 8, 8), 0.5)
        b[..., :4] = 0.9
        name = folder.save_difference({"label": "x"}, 0, b[0], a[0])
        alpha = torch.tensor(list(Image.open(tmp_path / name).getchannel("A").getdata())).view(8, 8)
        assert alpha[:, :4].unique().tolist() == [255]
        assert alpha[:, 4:].unique().tolist() == [0]

    def test_a_folder_that_cannot_be_written(self, pipe: Any, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(ConfigError, match="Cannot write to"):
            compare(pipe, spec(), tmp_path / "file" / "folder")

    def test_a_damaged_file_is_refused(self, pipe: Any, tmp_path: Path) -> None:
        (tmp_path / "results.json").write_text('{"format": 2}')
        with pytest.raises(HoldoverError, match="is no results file of a comparison"):
            compare(pipe, spec(), tmp_path)

    def test_a_value_of_the_wrong_type_is_refused_by_its_key(self, pipe: Any, tmp_path: Path) -> None:
        compare(pipe, spec(NONE), tmp_path)
        results = json.loads((tmp_path / "results.json").read_text())
        results["rows"][0]["seconds"][1] = "soon"
        (tmp_path / "results.json").write_text(json.dumps(results))
        with pytest.raises(HoldoverError, match=r"rows\.0\.seconds\.1: Input should be a valid number"):
            Results.load(tmp_path / "results.json")


class TestOtherOutputs:
    def test_videos_have_one_value_each(self, tmp_path: Path) -> None:
        peer = Custom("none", lambda pipe: holdover.enable(pipe, "none"))
        results = compare(prompted_wan(), spec(peer, FewerSteps(5), prompts=("dog",), batch_size=1), tmp_path)
        row = results.row("5 steps")
        assert [len(values) for values in row.values.values()] == [2] * len(row.values)
        assert results.row("none").values["psnr"] == (math.inf,) * 2
        assert results.row("none").worst_frames == (0, 0)
        assert "s/video" in str(results)
        with av.open(str(tmp_path / row.images[0])) as clip, av.open(str(tmp_path / row.differences[0])) as difference:
            assert (clip.streams.video[0].frames, difference.streams.video[0].frames) == (5, 5) == (row.frames,) * 2
            assert (clip.streams.video[0].width, clip.streams.video[0].average_rate) == (192, 16)
        stored = [load_file(tmp_path / "reference" / f"{number}.safetensors")["output"] for number in (0, 1)]
        assert [tuple(output.shape) for output in stored] == [(5, 3, 64, 64)] * 2
        uncached, fewer = stored[1], prompted_wan()("dog", num_inference_steps=5, output_type="pt", **noise(4))[0][0]
        frames = psnr(fewer, uncached)
        assert row.worst_frames[1] == frames.argmin()
        assert row.values["psnr"][1] == pytest.approx(float(psnr(*(v.flatten(0, 1)[None] for v in (fewer, uncached)))))
        seen = Recorder()
        again = compare(prompted_wan(), spec(peer, FewerSteps(5), prompts=("dog",), batch_size=1), tmp_path, seen)
        assert (seen.started, again.rows) == ([], results.rows)

    def test_latents(self, pipe: Any, tmp_path: Path) -> None:
        results = compare(pipe, spec(FewerSteps(4), output="latent"), tmp_path)
        row = results.row("4 steps")
        assert 0 < row.summary("psnr").worst < 100
        assert row.images == ()


# Pipelines that are not diffusers pipelines


def noise(seed: int) -> dict[str, Any]:
    return {"generator": torch.Generator().manual_seed(seed), "return_dict": False}


class PlainPipeline:
    """A plain object with a transformer; returns an object of its own that has `images`, as PIL images."""

    def __init__(self, pipe: Any) -> None:
        self.transformer, self.scheduler, self._pipe = pipe.transformer, pipe.scheduler, pipe

    def __call__(self, prompt: Any, generator: Any, num_inference_steps: int) -> Any:
        return SimpleNamespace(
            images=self._pipe(prompt, generator=generator, num_inference_steps=num_inference_steps).images
        )


def test_a_pipeline_that_is_a_plain_object(pipe: Any) -> None:
    pipe.set_progress_bar_config(disable=True)
    found = compare(PlainPipeline(pipe), spec(HOLDS, NONE, seeds=(3,), batch_size=2, baselines=False))
    assert [row.error for row in found.rows] == [None, None]
    holds, none = found.rows
    assert holds.computed_steps < 8
    assert none.values["psnr"] == (math.inf, math.inf)
    assert found.environment["transformer"] == "FluxTransformer2DModel"
    assert found.environment["device"]
