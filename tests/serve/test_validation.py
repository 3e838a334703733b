"""Requests validated for models other than the one in the box, and the cache that a request gets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, get_args

import pytest
from PIL import Image

from holdover.profiles.targets import QUALITY_TARGETS
from holdover.selector import methods, own_config
from holdover.serve.errors import ApiError
from holdover.serve.openapi import method_infos, settings_schema
from holdover.serve.queue import ImageSpec
from holdover.serve.schemas import ImageRequest, Quality, VideoDefaults, VideoRequest
from holdover.serve.settings import Settings
from holdover.serve.validation import (
    ModelInfo,
    ignored_fields,
    preview_steps,
    requested_cache,
    validate,
    validate_video,
)

NONE = own_config("none", {})
FLUX = ModelInfo(
    name="flux",
    pipeline="FluxPipeline",
    transformer="FluxTransformer2DModel",
    parameters=frozenset({"guidance_scale", "true_cfg_scale", "negative_prompt", "callback_on_step_end"}),
    steps=28,
    size=(512, 512),
    size_multiple=16,
    fixed_size=False,
    partial_images=True,
)
BARE = ModelInfo("bare", "BarePipeline", "BareModel", frozenset(), 20, (64, 64), 8, False, False)


def validated(model: ModelInfo = FLUX, **request: Any) -> list[ImageSpec]:
    return validate(ImageRequest(prompt="x", **request), model, Settings(), NONE)


def test_fields_that_are_left_out_have_the_models_defaults() -> None:
    (found,) = validated()
    assert (found.size, found.steps, found.guidance, found.negative_prompt) == ((512, 512), 28, (), None)
    assert validated(size="auto")[0].size == (512, 512)


def test_a_model_with_two_guidance_scales_gets_both() -> None:
    (found,) = validated(guidance=3.5, cfg_scale=4.0, negative_prompt="blur")
    assert found.guidance == (("guidance_scale", 3.5), ("true_cfg_scale", 4.0))
    assert found.negative_prompt == "blur"


def test_an_image_is_generated_in_the_requested_size() -> None:
    (found,) = validated(size="640x480")
    assert (found.output_size, found.size) == ((640, 480), (640, 480))


def test_the_servers_limit_applies_to_the_models_default_too() -> None:
    (found,) = validate(ImageRequest(prompt="x"), FLUX, Settings(max_steps=4), NONE)
    assert found.steps == 4


@pytest.mark.parametrize(
    ("model", "request_", "param", "said"),
    [
        (FLUX, {"size": "500x512"}, "size", "multiples of 16"),
        (BARE, {"guidance": 2.0}, "guidance", "has no guidance scale"),
        (BARE, {"negative_prompt": "blur"}, "negative_prompt", "has no negative prompt"),
        (BARE, {"stream": True, "partial_images": 1}, "partial_images", "has no previews of unfinished images"),
    ],
)
def test_what_a_model_does_not_support_is_an_error(
    model: ModelInfo, request_: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(ApiError, match=said) as refused:
        validated(model, **request_)
    assert (refused.value.status_code, refused.value.param) == (400, param)


def test_each_image_of_a_request_has_its_own_seed_and_the_same_batch_key() -> None:
    found = validated(n=3, seed=5)
    assert [one.seed for one in found] == [5, 6, 7]
    assert len({one.batch_key for one in found}) == 1


@pytest.mark.parametrize(
    ("count", "steps", "after"),
    [(0, 10, []), (1, 10, [5]), (3, 8, [2, 4, 6]), (9, 10, list(range(1, 10))), (50, 4, [1, 2, 3]), (5, 1, [])],
)
def test_previews_are_evenly_spaced(count: int, steps: int, after: list[int]) -> None:
    assert sorted(preview_steps(count, steps)) == after


# The cache of a request

DEFAULT = own_config("mag_cache", {"mag_threshold": 0.5, "mag_max_skip_steps": 2, "profile": "emoji"})
PLANNED = own_config("plan", {"target": "psnr>=35", "profile": "mine.safetensors"})


def test_a_request_without_a_cache_gets_the_default() -> None:
    assert requested_cache(None, DEFAULT, 100) is DEFAULT
    assert requested_cache({}, DEFAULT, 100) == DEFAULT


def test_settings_alone_change_the_default() -> None:
    assert requested_cache({"mag_threshold": 0.1}, DEFAULT, 100) == DEFAULT.replaced(mag_threshold=0.1)


def test_a_method_by_name_has_its_own_defaults_but_the_servers_profile() -> None:
    named = requested_cache({"method": "mag_cache", "mag_threshold": 0.1}, DEFAULT, 100)
    assert named == own_config("mag_cache", {"mag_threshold": 0.1, "profile": "emoji"})
    assert requested_cache({"method": "plan", "budget": "2x"}, PLANNED, 100) == own_config(
        "plan", {"budget": "2x", "profile": "mine.safetensors"}
    )


def test_a_target_selects_plan() -> None:
    assert requested_cache({"target": "psnr>=40"}, DEFAULT, 100) == own_config("plan", {"target": "psnr>=40"})
    assert requested_cache({"target": "psnr>=40"}, PLANNED, 100).as_dict()["profile"] == "mine.safetensors"


def test_a_quality_selects_plan_where_there_is_a_profile() -> None:
    assert get_args(Quality) == tuple(QUALITY_TARGETS)
    draft = own_config("plan", {"quality": "draft"})
    assert requested_cache({"quality": "draft"}, DEFAULT, 100) == draft
    assert requested_cache(None, DEFAULT, 100, "draft") == draft
    with_profile = requested_cache({"predictor": "newton"}, PLANNED, 100, "draft")
    assert with_profile == own_config(
        "plan", {"quality": "draft", "predictor": "newton", "profile": "mine.safetensors"}
    )
    shipped, unmeasured = replace(FLUX, has_profile=True), own_config("plan", {"profile": "none"})
    for model, default, used in (
        (FLUX, NONE, False),
        (FLUX, own_config("plan", {}), False),
        (FLUX, PLANNED, True),
        (shipped, NONE, True),
        (shipped, own_config("plan", {}), True),
        (shipped, unmeasured, False),
    ):
        request = ImageRequest(prompt="x", quality="high")
        (found,) = validate(request, model, Settings(), default)
        assert (found.cache.as_dict().get("quality") == "high") == used
        assert found.cache == default or used
        assert bool(ignored_fields(request, model, default)) == (not used)


@pytest.mark.parametrize(
    ("cache", "param"),
    [
        ({"method": "plan", "budget": "2x", "target": "psnr>=40"}, "cache"),
        ({"budget": "0x"}, "cache.budget"),
        ({"method": "plan", "schedule": [0, 0]}, "cache.schedule"),
        ({"method": "plan", "profile": "/etc/passwd"}, "cache.profile"),
        ({"method": ["plan"]}, "cache.method"),
        ({"method": "pian"}, "cache.method"),
    ],
)
def test_the_error_names_the_field_that_is_wrong(cache: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        requested_cache(cache, PLANNED, 100)
    assert (refused.value.status_code, refused.value.param) == (400, param)


@pytest.mark.parametrize("method", methods())
def test_no_request_can_name_a_file(method: str) -> None:
    (info,) = [info for info in method_infos() if info.method == method]
    names = [setting.name for setting in info.settings]
    assert list(settings_schema(method, 100)) == names
    assert not [name for name in names if "path" in name or "profile" in name or "calibrate" in name]


def test_the_negative_prompt_of_the_server_is_used_where_a_request_has_none() -> None:
    settings = Settings(negative_prompt="blue")
    for request, wanted in (({}, "blue"), ({"negative_prompt": "red"}, "red")):
        (found,) = validate(ImageRequest(prompt="x", **request), FLUX, settings, NONE)
        assert found.negative_prompt == wanted


LTX = replace(
    FLUX,
    name="ltx",
    parameters=frozenset({"frame_rate"}),
    video=VideoDefaults(num_frames=161, fps=25, multiple=8, image="optional"),
)


def test_a_video_has_the_models_defaults_and_the_shape_of_its_image() -> None:
    found = validate_video(VideoRequest(prompt="x"), LTX, Settings(), NONE)
    assert (found.frames, found.fps, found.size, found.steps, found.batchable) == (161, 25, (512, 512), 28, False)
    large = Image.new("RGB", (1024, 512))
    assert validate_video(VideoRequest(prompt="x"), LTX, Settings(), NONE, image=large).size == (720, 352)
    for seconds, frames in (("4", 97), (0.01, 1), ("1.0", 25)):
        assert validate_video(VideoRequest(prompt="x", seconds=seconds), LTX, Settings(), NONE).frames == frames


@pytest.mark.parametrize(
    ("model", "request_", "said"),
    [
        (LTX, {"fps": 12.5}, "fps is 12.5; ltx takes whole numbers."),
        (LTX, {"guidance_scale_2": 3.0}, "ltx has no second guidance scale."),
        (LTX, {"guidance": 3.0}, "ltx has no guidance scale."),
        (LTX, {"num_frames": 160}, "ltx generates a multiple of 8 plus 1, such as 161."),
        (FLUX, {}, "flux generates images: use /v1/images/generations."),
    ],
)
def test_what_a_model_cannot_make_of_a_video_is_said(model: ModelInfo, request_: dict[str, Any], said: str) -> None:
    with pytest.raises(ApiError) as refused:
        validate_video(VideoRequest(prompt="x", **request_), model, Settings(), NONE)
    assert said in refused.value.detail
