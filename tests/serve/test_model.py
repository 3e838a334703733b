"""A pipeline as the server uses it: what it supports, images, previews."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch

from holdover.config import Config
from holdover.errors import EnableError
from holdover.selector import own_config
from holdover.serve import Settings
from holdover.serve.images import encode_image
from holdover.serve.model import PreviewDecoder, ServedModel, latents_decoder, load_model, to_pixels
from holdover.serve.queue import ImageSpec, Pixels
from tiny.pipelines import PIPELINES
from tiny.prompted import prompted_flux

GUIDANCE = (("guidance_scale", 2.0),)


def spec(seed: int, prompt: str = "red apple", cache: Config | None = None) -> ImageSpec:
    cache = cache or own_config("none", {})
    return ImageSpec(prompt, None, seed, (64, 64), (64, 64), 6, GUIDANCE, cache)


def ignore(step: int, latents: torch.Tensor) -> None:
    """No-op callback."""


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return ServedModel("tiny", prompted_flux())


def test_a_pipeline_with_a_vae_describes_itself(model: ServedModel) -> None:
    info = model.info
    assert (info.pipeline, info.transformer) == ("FluxPipeline", "FluxTransformer2DModel")
    assert (info.size, info.size_multiple, info.fixed_size, info.partial_images) == ((64, 64), 16, False, True)


def test_a_pipeline_that_generates_no_images_is_refused() -> None:
    with pytest.raises(EnableError, match="generates no images"):
        ServedModel("tiny", PIPELINES["StableAudioPipeline"].build())


def test_weights_that_could_run_code_are_refused(tmp_path: Path) -> None:
    pipe = prompted_flux()
    pipe.transformer.save_pretrained(tmp_path / "transformer", safe_serialization=False)
    pipe.scheduler.save_pretrained(tmp_path / "scheduler")
    index = (
        '{"_class_name": "FluxPipeline", "transformer": ["diffusers", "FluxTransformer2DModel"], '
        '"scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"]}'
    )
    (tmp_path / "model_index.json").write_text(index)
    assert list((tmp_path / "transformer").glob("*.bin"))
    with pytest.raises((OSError, ValueError), match="safetensors"):
        load_model(Settings(model=str(tmp_path)))


def test_a_batch_has_the_images_that_the_pipeline_generates(model: ServedModel) -> None:
    pixels = model.generate([spec(3), spec(4, "ghost")], ignore)
    generators = [torch.Generator().manual_seed(seed) for seed in (3, 4)]
    arguments: dict[str, Any] = {"num_inference_steps": 6, "height": 64, "width": 64, "output_type": "pt"}
    plain = model.pipeline(["red apple", "ghost"], generator=generators, **dict(GUIDANCE), **arguments).images
    assert np.array_equal(pixels, to_pixels(plain))


def test_the_last_preview_is_the_image(model: ServedModel) -> None:
    decode = latents_decoder(model.pipeline)
    assert decode is not None
    decoder = PreviewDecoder(decode, model.pipeline.scheduler, (64, 64))
    previews: list[Pixels] = []

    def on_step(step: int, latents: torch.Tensor) -> None:
        decoder.update(latents)
        previews.append(decoder.preview(step))

    pixels = model.generate([spec(3)], on_step)
    assert len(previews) == 6
    assert np.array_equal(previews[-1], pixels)
    assert not np.array_equal(previews[2], pixels)


def test_a_png_has_the_exact_pixels_and_is_resized_on_request() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    same, larger = (
        PIL.Image.open(io.BytesIO(base64.b64decode(encode_image(pixels, (side, side))))) for side in (8, 32)
    )
    assert same.tobytes() == pixels.tobytes()
    assert larger.size == (32, 32)


@pytest.mark.parametrize(
    ("name", "size", "frames", "fps", "image"),
    [
        ("WanImageToVideoPipeline[2.2]", (832, 480, 16), (81, 4), 16, "required"),
        ("LTXPipeline", (704, 512, 32), (161, 8), 25, "none"),
        ("HunyuanVideoPipeline", (1280, 720, 16), (129, 4), 24, "none"),
    ],
)
def test_a_video_pipeline_describes_its_videos(
    name: str, size: tuple[int, ...], frames: tuple[int, int], fps: float, image: str
) -> None:
    info = ServedModel("tiny", PIPELINES[name].build()).info
    assert info.video is not None
    assert (*info.size, info.size_multiple) == size
    assert (info.video.num_frames, info.video.multiple) == frames
    assert (info.video.fps, info.video.image) == (fps, image)
