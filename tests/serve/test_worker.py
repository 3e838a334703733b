"""The worker without HTTP: caches exchanged on one pipeline, and what is reported about profiles."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import holdover
from holdover import selector
from holdover.base import CacheBackend
from holdover.config import Config
from holdover.engine.backend import NoneBackend
from holdover.engine.method import NoneConfig
from holdover.errors import ConfigError, HoldoverError
from holdover.plan.generation import facts_of
from holdover.profiles import Certificate, MeasuredPlan, Profile, ProfileFacts
from holdover.selector import own_config
from holdover.serve import Settings
from holdover.serve.model import ServedModel
from holdover.serve.queue import Pixels, QueueItem
from holdover.serve.worker import CacheSwitch, Worker, profile_report
from snapshots import denoiser, differences
from tiny.prompted import prompted_flux

from .test_model import ignore, spec

NONE = own_config("none", {})
RATIOS = {"mag_ratios": [1.0], "mag_max_skip_steps": 2, "mag_retention_ratio": 0.2}
MAG = own_config("mag_cache", RATIOS)


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("tiny", prompted_flux())


def generate(model: ServedModel, switch: CacheSwitch, cache: Config) -> tuple[Pixels, str]:
    with switch.use(cache) as backend:
        pixels = model.generate([spec(3, cache=cache)], ignore)
        last = backend.stats().last
    assert last is not None
    return pixels, last.trace(last.branches[0])


@contextmanager
def switched(model: ServedModel, cache: Config) -> Iterator[CacheSwitch]:
    switch = CacheSwitch(model.pipeline, cache)
    yield switch
    switch.disable()


def test_caches_are_exchanged_between_images_and_leave_nothing_behind(model: ServedModel) -> None:
    before = denoiser(model.pipeline)
    tea = own_config("tea_cache", {"rel_l1_thresh": 10.0, "coefficients": [1.0, 0.0]})
    less = MAG.replaced(mag_max_skip_steps=1)
    with switched(model, MAG) as switch:
        first = {cache: generate(model, switch, cache) for cache in (MAG, NONE, less, tea)}
        again = {cache: generate(model, switch, cache) for cache in (tea, less, NONE, MAG)}
    assert first[NONE][1] == "CCCCCC"
    assert len({trace for _, trace in first.values()}) == 4
    for cache, (pixels, trace) in first.items():
        assert again[cache][1] == trace
        assert np.array_equal(again[cache][0], pixels)
    assert differences(before, denoiser(model.pipeline)) == []


def test_a_cache_that_cannot_be_enabled_leaves_the_previous_one(model: ServedModel) -> None:
    with switched(model, MAG) as switch:
        before = generate(model, switch, MAG)
        with pytest.raises(HoldoverError):
            generate(model, switch, own_config("tea_cache", {"signal": "nothing"}))
        after = generate(model, switch, MAG)
    assert before[1] == after[1]
    assert np.array_equal(before[0], after[0])


def test_a_target_without_a_profile_is_refused_with_what_to_do(model: ServedModel) -> None:
    with switched(model, MAG) as switch, pytest.raises(ConfigError, match="profile"):
        generate(model, switch, own_config("plan", {"target": "psnr>=40"}))


@dataclass(frozen=True)
class OtherConfig(NoneConfig):
    method: ClassVar[str] = "other"


class OtherBackend(NoneBackend):
    """A third-party backend that has one setting for all generations."""

    config_class = OtherConfig
    using = CacheBackend.using
    off = CacheBackend.off


def test_a_backend_with_one_setting_is_replaced_instead(model: ServedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selector.BACKENDS, "other", (__name__, "OtherBackend"))
    with switched(model, own_config("other", {})) as switch:
        assert generate(model, switch, NONE)[1] == "CCCCCC"
        assert "h" in generate(model, switch, MAG)[1]


def test_a_client_that_leaves_while_its_method_is_set_up_gets_no_generation(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowBackend(OtherBackend):
        """The client leaves while it is enabled."""

        def enable(self, pipeline: Any) -> None:
            super().enable(pipeline)
            item.future.cancel()

    monkeypatch.setitem(globals(), "SlowBackend", SlowBackend)
    monkeypatch.setitem(selector.BACKENDS, "other", (__name__, "SlowBackend"))
    item, worker, forwards = QueueItem(spec(3, cache=own_config("other", {}))), Worker(Settings()), list[int]()
    hook = model.pipeline.transformer.register_forward_pre_hook(lambda *arguments: forwards.append(1))
    with switched(model, MAG) as switch:
        worker._generate([item], model, switch)
        assert forwards == []
        generate(model, switch, MAG)
    hook.remove()
    assert forwards != []
    assert b"holdover_cancelled_images_total 1.0" in asyncio.run(worker.metrics())


def test_the_report_has_what_was_measured(tmp_path: Path) -> None:
    pipe = holdover.load("emoji")
    noise, euler = (1.0, 0.75, 0.5, 0.25), "FlowMatchEulerDiscreteScheduler"
    facts = ProfileFacts(
        name="mine",
        pipeline="EmojiPipeline",
        scheduler=euler,
        noise=noise,
        models=(("transformer", facts_of(pipe.transformer)),),
        prompts=1,
        prompts_hash="0",
        date="2026-11-15",
        versions=(("torch", "2.13.0"),),
        schedules=tuple(
            MeasuredPlan(noise=noise, scheduler=euler, computed=steps, weights=(), origin="planned", psnr=psnr)
            for steps, psnr in (((0, 2), 31.0), ((0, 1, 2), 40.0))
        ),
        certificates=(
            Certificate(
                target="psnr>=30",
                computed=(0, 2),
                noise=noise,
                share=0.9,
                confidence=0.95,
                prompts=40,
                below=2,
                prompts_hash="0",
                scheduler=euler,
                plan="0",
            ),
        ),
    )
    path = Profile(facts, np.eye(4)[None], np.ones((1, 5)), {}).save(tmp_path / "mine.safetensors")
    report = profile_report(own_config("plan", {"profile": str(path)}), pipe)
    assert report.profile is not None
    assert (report.profile["name"], report.targets) == ("mine", True)
    assert [(point.speed, point.psnr) for point in report.frontier] == [(4 / 3, 40.0), (2.0, 31.0)]
    assert report.certificates[0]["target"] == "psnr>=30"
    assert "2 below" in report.certificates[0]["said"]
