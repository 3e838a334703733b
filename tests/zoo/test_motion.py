"""EmojiMotionPipeline behaves like WanPipeline (tiny, untrained), and the shipped weights are what they claim."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler, WanTransformer3DModel
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import holdover
from holdover.zoo.motion import MOTIONS, STYLES, WEIGHTS, EmojiMotionPipeline

WORDS = ["[PAD]", "[UNK]", "spinning", "red", "apple", "dog"]
WIDTH, SHAPE = 16, (1, 3, 5, 8, 8)
LOADED_TWICE = 1e-4  # frames in [0, 1] of two loads of the same weights


@pytest.fixture
def pipe() -> EmojiMotionPipeline:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "model_input_names": ["input_ids", "attention_mask"]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=8, **names)
    sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": WIDTH}
    config = BertConfig(vocab_size=len(WORDS), hidden_size=WIDTH, max_position_embeddings=8, type_vocab_size=1, **sizes)
    transformer = WanTransformer3DModel(
        patch_size=(1, 4, 4),
        num_attention_heads=2,
        attention_head_dim=12,
        in_channels=3,
        out_channels=3,
        text_dim=WIDTH,
        freq_dim=16,
        ffn_dim=32,
        num_layers=2,
        rope_max_seq_len=16,
    )
    statistics = {"pixel_mean": [0.5, 0.4, 0.3], "pixel_std": [0.5, 0.6, 0.7], "sample_size": 8, "sample_frames": 5}
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    parts = (tokenizer, BertModel(config).eval(), transformer.eval(), scheduler)
    pipeline = EmojiMotionPipeline(*parts, **statistics)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(pipe: EmojiMotionPipeline, prompt: Any = "spinning red apple", **settings: Any) -> torch.Tensor:
    settings = {"num_inference_steps": 3, "output_type": "pt", "generator": torch.Generator().manual_seed(0)} | settings
    return pipe(prompt, **settings).frames


def test_frames_are_those_of_wan(pipe: EmojiMotionPipeline) -> None:
    tensor, array, latents = generate(pipe), generate(pipe, output_type="np"), generate(pipe, output_type="latent")
    assert tensor.shape == (1, 5, 3, 8, 8)
    assert 0 <= tensor.min() <= tensor.max() <= 1
    assert isinstance(array, np.ndarray)
    assert np.array_equal(array, tensor.permute(0, 1, 3, 4, 2).numpy())
    pixels = latents * torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1, 1) + torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1, 1)
    torch.testing.assert_close(tensor, (pixels / 2 + 0.5).clamp(0, 1).transpose(1, 2))
    (clip,) = generate(pipe, output_type="pil")
    assert len(clip) == 5
    assert isinstance(clip[0], Image.Image)
    assert generate(pipe, num_frames=2, height=12, width=16).shape == (1, 2, 3, 12, 16)
    (frames,) = pipe("dog", num_inference_steps=1, return_dict=False)
    assert frames.shape == (1, 5, 8, 8, 3)


def test_batches_seeds_and_latents(pipe: EmojiMotionPipeline) -> None:
    seeds = [torch.Generator().manual_seed(seed) for seed in (5, 0)]
    both = generate(pipe, ["red apple", "dog"], generator=seeds)
    torch.testing.assert_close(both[1:], generate(pipe, "dog"), atol=1e-5, rtol=0)
    noise = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    assert torch.equal(generate(pipe, generator=None, latents=noise), generate(pipe))
    repeated = generate(pipe, ["red apple", "dog"], latents=noise.expand(4, -1, -1, -1, -1), num_videos_per_prompt=2)
    torch.testing.assert_close(repeated[0], repeated[1])
    assert not torch.allclose(repeated[0], repeated[2])
    states, negative = pipe.encode_prompt("dog"), pipe.encode_prompt("red")
    given = generate(pipe, None, prompt_embeds=states, negative_prompt_embeds=negative)
    assert torch.equal(given, generate(pipe, "dog", negative_prompt="red"))
    assert states[0, 1:].abs().max() == 0, "padding carries nothing"


def test_guidance_opens_a_cache_context_for_each_branch(pipe: EmojiMotionPipeline) -> None:
    names: list[str] = []
    plain = pipe.transformer.cache_context

    def record(name: str) -> Any:
        names.append(name)
        return plain(name)

    pipe.transformer.cache_context = record
    generate(pipe)
    generate(pipe, guidance_scale=1.0)
    assert names == ["cond", "uncond"] * 3 + ["cond"] * 3


def test_callbacks_see_replace_and_interrupt(pipe: EmojiMotionPipeline) -> None:
    steps: list[int] = []

    def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        pipeline._interrupt = step == 1
        return {"latents": torch.zeros_like(tensors["latents"])}

    latents = generate(pipe, callback_on_step_end=callback, output_type="latent")
    assert steps == [0, 1]
    assert latents.abs().max() == 0


def test_unipc_gives_nearly_the_same_video(pipe: EmojiMotionPipeline) -> None:
    fine = generate(pipe, num_inference_steps=40)
    flow = {"use_flow_sigmas": True, "prediction_type": "flow_prediction", "flow_shift": 3.0}
    pipe.scheduler = UniPCMultistepScheduler(**flow)
    assert (generate(pipe, num_inference_steps=12) - fine).abs().mean() < 0.02


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_frames": 0}, "num_frames is 0"),
        ({"num_videos_per_prompt": 0}, "num_videos_per_prompt is 0"),
        ({"height": 10}, "height is 10; use a positive multiple of 4"),
        ({"prompt": None}, "pass prompt or prompt_embeds"),
        ({"generator": [torch.Generator()] * 2}, "2 generators for 1 videos"),
        ({"latents": torch.zeros(1, 3, 4, 8, 8)}, r"latents have shape \(1, 3, 4, 8, 8\)"),
        ({"callback_on_step_end_tensor_inputs": ["latent"]}, "Did you mean 'latents'"),
    ],
)
def test_bad_input(pipe: EmojiMotionPipeline, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(pipe, **({"prompt": "red apple"} | settings))


def test_saved_and_loaded_it_generates_the_same(pipe: EmojiMotionPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path)
    again = EmojiMotionPipeline.from_pretrained(tmp_path)
    again.set_progress_bar_config(disable=True)
    torch.testing.assert_close(generate(pipe), generate(again), atol=LOADED_TWICE, rtol=0)


def test_caches_hold_steps_and_nothing_at_threshold_0(pipe: EmojiMotionPipeline) -> None:
    plain = generate(pipe, num_inference_steps=8)
    with holdover.enable(pipe, "easy_cache") as cache:
        generate(pipe, num_inference_steps=8)
        assert list(cache.stats().generations[-1].computed) == ["cond", "uncond"]
    with holdover.enable(pipe, "mag_cache", calibrate=True) as cache:
        assert torch.equal(generate(pipe, num_inference_steps=8), plain)
    assert torch.equal(generate(pipe, num_inference_steps=8), plain)


def test_shipped_model() -> None:
    files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} <= {".safetensors", ".json", ".md"}
    assert sum(path.stat().st_size for path in files) <= 15_000_000
    pipe = holdover.load("emoji-motion")
    pipe.set_progress_bar_config(disable=True)
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.float32
    words = [*MOTIONS, *STYLES.values(), *pipe.calibration_prompts()]
    assert all(pipe.tokenizer.unk_token_id not in ids for ids in pipe.tokenizer(words)["input_ids"])
    clip = generate(pipe, "sliding right blue heart, google noto style", num_inference_steps=8)[0]
    assert clip.shape == (9, 3, 48, 48)
    ink = (1 - clip).sum((1, 2))  # of each column
    place = (ink * torch.arange(48)).sum(1) / ink.sum(1)
    assert (place.diff() > 0).all(), "it slides to the right"
    assert clip[4, :, 20:28, 20:28].mean((1, 2)).argmax() == 2, "it is blue"
