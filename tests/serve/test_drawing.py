"""The worker's side without HTTP: pipelines of other kinds, pictures as they form, caches exchanged."""

from __future__ import annotations

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from holdover.runtime.backend import NoneBackend
from PIL import Image

import holdover
from holdover import selector
from holdover.base import CacheBackend
from holdover.errors import ConfigError, HoldoverError
from holdover.serve.choice import Choice, choice
from holdover.serve.forming import Forming, as_png, decoder_of, to_bytes
from holdover.serve.model import Painter
from holdover.serve.switch import Switch
from holdover.serve.work import Job, Order
from snapshots import denoiser, differences
from tiny.prompted import prompted_flux

NONE = choice("none", {})
RATIOS = {"mag_ratios": [1.0], "mag_max_skip_steps": 2, "mag_retention_ratio": 0.2}
MAG = choice("mag_cache", RATIOS)


def order(job: Job, seed: int, prompt: str = "red apple") -> Order:
    return Order(job, prompt, None, seed)


JOB = Job((64, 64), 6, (("guidance_scale", 2.0),), False, NONE)


@pytest.fixture(scope="module")
def painter() -> Painter:
    return Painter("tiny", prompted_flux())


def test_a_pipeline_with_a_vae_draws_what_it_draws_by_itself(painter: Painter) -> None:
    drawn = painter.draw(JOB, [order(JOB, 3), order(JOB, 4, "ghost")], lambda step, latents: None)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    arguments = {"num_inference_steps": 6, "guidance_scale": 2.0, "height": 64, "width": 64, "output_type": "pt"}
    plain = painter.pipeline(["red apple", "ghost"], generator=generators, **arguments).images
    assert torch.equal(drawn, to_bytes(plain))


def test_the_picture_a_vae_forms_ends_as_the_picture(painter: Painter) -> None:
    decode = decoder_of(painter.pipeline)
    assert decode is not None
    forming = Forming(decode, painter.pipeline.scheduler, JOB.size)
    shown: list[torch.Tensor] = []

    def follow(step: int, latents: torch.Tensor) -> None:
        forming.follow(latents)
        shown.append(forming.pictures(step))

    drawn = painter.draw(JOB, [order(JOB, 3)], follow)
    assert len(shown) == 6
    assert torch.equal(shown[-1], drawn)
    assert not torch.equal(shown[2], drawn)


def test_a_png_holds_the_picture_bit_for_bit_and_is_resized_when_asked() -> None:
    picture = torch.randint(0, 256, (3, 8, 8), dtype=torch.uint8)
    same, larger = (Image.open(io.BytesIO(base64.b64decode(as_png(picture, (side, side))))) for side in (8, 32))
    assert same.tobytes() == picture.permute(1, 2, 0).contiguous().numpy().tobytes()
    assert larger.size == (32, 32)


# The cache on the pipeline


def draw(painter: Painter, switch: Switch, wanted: Choice) -> tuple[torch.Tensor, str]:
    job = Job(JOB.size, JOB.steps, JOB.guidance, False, wanted)
    with switch.on(wanted) as cache:
        picture = painter.draw(job, [order(job, 3)], lambda step, latents: None)
        last = cache.stats().last
    assert last is not None
    return picture, last.trace(last.branches[0])


@contextmanager
def switched(painter: Painter, standing: Choice) -> Iterator[Switch]:
    switch = Switch(painter.pipeline, standing)
    yield switch
    switch.take_off()


def test_caches_are_exchanged_between_pictures_and_leave_nothing_behind(painter: Painter) -> None:
    before = denoiser(painter.pipeline)
    tea = choice("tea_cache", {"rel_l1_thresh": 10.0, "coefficients": [1.0, 0.0]})
    less = Choice("mag_cache", MAG.config.replaced(mag_max_skip_steps=1))
    with switched(painter, MAG) as switch:
        first = {wanted: draw(painter, switch, wanted) for wanted in (MAG, NONE, less, tea)}
        again = {wanted: draw(painter, switch, wanted) for wanted in (tea, less, NONE, MAG)}
    assert first[NONE][1] == "CCCCCC"
    assert len({trace for _, trace in first.values()}) == 4
    for wanted, (picture, trace) in first.items():
        assert again[wanted][1] == trace
        assert torch.equal(again[wanted][0], picture)
    assert differences(before, denoiser(painter.pipeline)) == []


def test_a_cache_that_cannot_be_put_on_leaves_the_one_before(painter: Painter) -> None:
    with switched(painter, MAG) as switch:
        before = draw(painter, switch, MAG)
        with pytest.raises(HoldoverError):
            draw(painter, switch, choice("tea_cache", {"signal": "nothing"}))
        after = draw(painter, switch, MAG)
    assert before[1] == after[1]
    assert torch.equal(before[0], after[0])


def test_a_target_without_a_profile_is_refused_with_what_to_do(painter: Painter) -> None:
    with switched(painter, MAG) as switch, pytest.raises(ConfigError, match="profile"):
        draw(painter, switch, choice("plan", {"target": "psnr>=40"}))


class OneSetting(NoneBackend):
    """A backend of somebody else's that has one setting for all generations."""

    using = CacheBackend.using
    off = CacheBackend.off


def test_a_backend_with_one_setting_is_exchanged_instead(painter: Painter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(selector.BACKENDS, "other", (__name__, "OneSetting"))
    with switched(painter, choice("other", {})) as switch:
        assert draw(painter, switch, NONE)[1] == "CCCCCC"
        assert "h" in draw(painter, switch, MAG)[1]


# What is known of a model


def test_what_was_measured_is_told(tmp_path: Any) -> None:
    import numpy as np

    from holdover.plan.identity import facts_of
    from holdover.profiles import Certificate, MeasuredPlan, Profile, ProfileFacts
    from holdover.serve.known import known_of

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
    known = known_of(choice("plan", {"profile": str(path)}), pipe)
    assert known.profile is not None
    assert (known.profile["name"], known.targets) == ("mine", True)
    assert [(point["speed"], point["psnr"]) for point in known.frontier] == [(4 / 3, 40.0), (2.0, 31.0)]
    assert known.certificates[0]["target"] == "psnr>=30"
    assert "2 below" in known.certificates[0]["said"]
