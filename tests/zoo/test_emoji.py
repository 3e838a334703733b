"""EmojiPipeline behaves like a diffusers pipeline (tiny, untrained), and the shipped weights are what they claim."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DDIMScheduler,
    DPMSolverMultistepScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    FluxTransformer2DModel,
    UniPCMultistepScheduler,
)
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

import holdover
from holdover import zoo
from holdover.zoo.emoji import STYLES, WEIGHTS, EmojiPipeline, caption
from holdover.zoo.emoji.pipeline import pack, position_ids, unpack

WORDS = ["[PAD]", "[UNK]", "red", "blue", "apple", "dog", "style", ",", "glossy", "3d"]
WIDTH, TOKENS, CHANNELS = 32, 16, 48
LOADED_TWICE = 1e-4  # images in [0, 1] of two loads of the same weights; 1.7e-5 was seen


def tiny_pipeline() -> EmojiPipeline:
    torch.manual_seed(0)
    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=8,
        pad_token="[PAD]",
        unk_token="[UNK]",
        model_input_names=["input_ids", "attention_mask"],
    )
    text_encoder = BertModel(
        BertConfig(
            vocab_size=len(WORDS),
            hidden_size=WIDTH,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=WIDTH,
            max_position_embeddings=8,
            type_vocab_size=1,
        )
    ).eval()
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=CHANNELS,
        num_layers=1,
        num_single_layers=1,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH,
        pooled_projection_dim=WIDTH,
        axes_dims_rope=(4, 6, 6),
    ).eval()
    pipeline = EmojiPipeline(
        tokenizer,
        text_encoder,
        transformer,
        FlowMatchEulerDiscreteScheduler(),
        pixel_mean=[0.5, 0.4, 0.3],
        pixel_std=[0.5, 0.6, 0.7],
        sample_size=16,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@pytest.fixture
def pipe() -> EmojiPipeline:
    return tiny_pipeline()


def generate(pipe: EmojiPipeline, prompt: Any = "red apple", seed: int | None = 0, **settings: Any) -> torch.Tensor:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    settings = {"num_inference_steps": 3, "output_type": "pt", "generator": generator} | settings
    return pipe(prompt, **settings).images


class TestPatches:
    def test_unpack_undoes_pack(self) -> None:
        images = torch.randn(2, 3, 16, 8)
        tokens = pack(images, 4)
        assert tokens.shape == (2, 8, 48)
        assert torch.equal(unpack(tokens, 16, 8, 4), images)

    def test_tokens_are_in_reading_order(self) -> None:
        images = torch.zeros(1, 3, 8, 8)
        images[:, :, :4, 4:] = 1
        assert pack(images, 4).mean(-1).tolist() == [[0, 1, 0, 0]]

    def test_positions_are_rows_and_columns(self) -> None:
        assert position_ids(8, 12, 4)[-1].tolist() == [0, 1, 2]


class TestOutputs:
    def test_types(self, pipe: EmojiPipeline) -> None:
        assert isinstance(generate(pipe, output_type="pil")[0], Image.Image)
        assert generate(pipe, output_type="pil")[0].size == (16, 16)
        array = generate(pipe, output_type="np")
        assert isinstance(array, np.ndarray)
        assert array.shape == (1, 16, 16, 3)
        tensor = generate(pipe)
        assert tensor.shape == (1, 3, 16, 16)
        assert 0 <= tensor.min() <= tensor.max() <= 1
        assert generate(pipe, output_type="latent").shape == (1, TOKENS, CHANNELS)

    def test_latents_decode_to_the_images(self, pipe: EmojiPipeline) -> None:
        latents = generate(pipe, output_type="latent")
        pixels = unpack(latents, 16, 16, 4) * torch.tensor([0.5, 0.6, 0.7]).view(3, 1, 1)
        pixels = pixels + torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)
        torch.testing.assert_close(generate(pipe), (pixels / 2 + 0.5).clamp(0, 1))

    def test_tuple_without_return_dict(self, pipe: EmojiPipeline) -> None:
        assert isinstance(generate(pipe).shape, torch.Size)
        result = pipe("dog", num_inference_steps=1, return_dict=False)
        assert isinstance(result, tuple)
        assert len(result) == 1

    def test_other_sizes(self, pipe: EmojiPipeline) -> None:
        assert generate(pipe, height=8, width=24).shape == (1, 3, 8, 24)


class TestDeterminism:
    def test_same_seed_same_image(self, pipe: EmojiPipeline) -> None:
        assert torch.equal(generate(pipe), generate(pipe))
        assert not torch.equal(generate(pipe), generate(pipe, seed=1))

    def test_one_generator_for_each_image(self, pipe: EmojiPipeline) -> None:
        seeds = [torch.Generator().manual_seed(seed) for seed in (5, 6)]
        both = generate(pipe, ["red apple", "dog"], generator=seeds)
        torch.testing.assert_close(both[1:], generate(pipe, "dog", seed=6), atol=1e-5, rtol=0)

    def test_given_latents_are_the_start(self, pipe: EmojiPipeline) -> None:
        noise = torch.randn((1, TOKENS, CHANNELS), generator=torch.Generator().manual_seed(0))
        assert torch.equal(generate(pipe, seed=None, latents=noise), generate(pipe))

    def test_images_per_prompt_are_neighbours(self, pipe: EmojiPipeline) -> None:
        noise = torch.randn(1, TOKENS, CHANNELS).expand(4, -1, -1)
        four = generate(pipe, ["red apple", "dog"], latents=noise, num_images_per_prompt=2)
        assert len(four) == 4
        torch.testing.assert_close(four[0], four[1])
        torch.testing.assert_close(four[2], four[3])
        assert not torch.allclose(four[0], four[2])


class TestGuidance:
    def test_guidance_one_runs_no_second_branch(self, pipe: EmojiPipeline) -> None:
        assert branches(pipe, guidance_scale=1.0) == ["cond"] * 3
        assert branches(pipe, guidance_scale=3.0) == ["cond", "uncond"] * 3

    def test_negative_prompt_is_empty_by_default(self, pipe: EmojiPipeline) -> None:
        assert torch.equal(generate(pipe), generate(pipe, negative_prompt=""))
        assert not torch.equal(generate(pipe), generate(pipe, negative_prompt="blue dog"))

    def test_own_prompt_as_negative_is_no_guidance(self, pipe: EmojiPipeline) -> None:
        same = generate(pipe, negative_prompt="red apple")
        torch.testing.assert_close(same, generate(pipe, guidance_scale=1.0), atol=1e-5, rtol=0)

    def test_embeds_in_place_of_prompts(self, pipe: EmojiPipeline) -> None:
        states, pooled = pipe.encode_prompt("red apple")
        negative, negative_pooled = pipe.encode_prompt("dog")
        given = generate(
            pipe,
            None,
            prompt_embeds=states,
            pooled_prompt_embeds=pooled,
            negative_prompt_embeds=negative,
            negative_pooled_prompt_embeds=negative_pooled,
        )
        assert torch.equal(given, generate(pipe, negative_prompt="dog"))

    def test_padding_carries_nothing(self, pipe: EmojiPipeline) -> None:
        states, _ = pipe.encode_prompt("red apple")
        assert states.shape == (1, 8, WIDTH)
        assert states[0, 2:].abs().max() == 0


def branches(pipe: EmojiPipeline, **settings: Any) -> list[str]:
    """The cache_context names in the order the pipeline opens them."""
    names: list[str] = []
    plain = pipe.transformer.cache_context

    def record(name: str) -> Any:
        names.append(name)
        return plain(name)

    pipe.transformer.cache_context = record
    generate(pipe, **settings)
    del pipe.transformer.cache_context
    return names


class TestCallbacks:
    def test_sees_every_step_and_may_replace_tensors(self, pipe: EmojiPipeline) -> None:
        seen: list[tuple[int, float]] = []

        def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            seen.append((step, float(timestep)))
            return {"latents": torch.zeros_like(tensors["latents"])}

        latents = generate(pipe, callback_on_step_end=callback, output_type="latent")
        assert [step for step, _ in seen] == [0, 1, 2]
        assert seen[0][1] == 1000
        assert latents.abs().max() == 0

    def test_may_interrupt(self, pipe: EmojiPipeline) -> None:
        steps: list[int] = []

        def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            steps.append(step)
            pipeline._interrupt = True
            return tensors

        generate(pipe, callback_on_step_end=callback)
        assert steps == [0]
        assert len(branches(pipe)) == 6, "the next call starts again"

    def test_gets_the_requested_tensors(self, pipe: EmojiPipeline) -> None:
        def callback(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            assert set(tensors) == {"latents", "negative_prompt_embeds"}
            return tensors

        names = ["latents", "negative_prompt_embeds"]
        plain = generate(pipe)
        requested = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
        assert torch.equal(generate(pipe, **requested), plain)

    def test_progress_bar_counts_steps(self, pipe: EmojiPipeline, capsys: pytest.CaptureFixture[str]) -> None:
        pipe.set_progress_bar_config(disable=False)
        generate(pipe)
        assert "3/3" in capsys.readouterr().err


def second_order(kind: type) -> Any:
    return kind(use_flow_sigmas=True, prediction_type="flow_prediction")


class TestSchedulers:
    @pytest.mark.parametrize("kind", [DPMSolverMultistepScheduler, UniPCMultistepScheduler])
    def test_flow_sigmas(self, pipe: EmojiPipeline, kind: type) -> None:
        fine = generate(pipe, num_inference_steps=60)
        pipe.scheduler = second_order(kind)
        assert (generate(pipe, num_inference_steps=20) - fine).abs().mean() < 0.02

    def test_heun(self, pipe: EmojiPipeline) -> None:
        fine = generate(pipe, num_inference_steps=60)
        pipe.scheduler = FlowMatchHeunDiscreteScheduler()
        assert (generate(pipe, num_inference_steps=20) - fine).abs().mean() < 0.02
        assert pipe.num_timesteps == 39

    def test_shifts(self, pipe: EmojiPipeline) -> None:
        plain = generate(pipe)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
        assert not torch.equal(generate(pipe), plain)
        pipe.scheduler = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
        assert not torch.equal(generate(pipe), plain)

    def test_own_sigmas(self, pipe: EmojiPipeline) -> None:
        assert torch.equal(generate(pipe, sigmas=[1.0, 2 / 3, 1 / 3]), generate(pipe))
        assert len(branches(pipe, sigmas=[1.0, 0.5])) == 4

    @pytest.mark.parametrize(
        "scheduler", [DDIMScheduler(), EulerDiscreteScheduler(), DPMSolverMultistepScheduler(use_flow_sigmas=True)]
    )
    def test_others_are_refused(self, pipe: EmojiPipeline, scheduler: Any) -> None:
        pipe.scheduler = scheduler
        with pytest.raises(ValueError, match=type(scheduler).__name__):
            generate(pipe)


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"num_inference_steps": 0}, "num_inference_steps is 0"),
            ({"num_inference_steps": 2.5}, "num_inference_steps is 2.5"),
            ({"num_images_per_prompt": 0}, "num_images_per_prompt is 0"),
            ({"guidance_scale": float("nan")}, "guidance_scale is nan"),
            ({"guidance_scale": -1.0}, "guidance_scale is -1"),
            ({"output_type": "jpeg"}, "use one of pil, np, pt, latent"),
            ({"height": 10}, "height is 10; use a positive multiple of 4"),
            ({"width": 0}, "width is 0"),
            ({"prompt": None}, "pass prompt or prompt_embeds"),
            ({"prompt": []}, "at least one string"),
            ({"prompt": 3}, "prompt is 3"),
            ({"prompt": ["dog", 3]}, "list of at least one string"),
            ({"negative_prompt": ["dog", "dog"]}, "2 negative prompts for 1 prompts"),
            ({"prompt_embeds": torch.zeros(1, 8, WIDTH)}, "pass both"),
            ({"generator": [torch.Generator()] * 2}, "2 generators for 1 images"),
            ({"latents": torch.zeros(1, 4, CHANNELS)}, r"latents have shape \(1, 4, 48\)"),
            ({"callback_on_step_end_tensor_inputs": ["latent"]}, "Did you mean 'latents'"),
            ({"sigmas": []}, "num_inference_steps is 0"),
        ],
    )
    def test_bad_input(self, pipe: EmojiPipeline, settings: dict[str, Any], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            generate(pipe, **({"prompt": "red apple"} | settings))

    def test_long_prompt_is_cut_with_a_warning(self, pipe: EmojiPipeline, caplog: pytest.LogCaptureFixture) -> None:
        from diffusers.utils import logging

        logging.enable_propagation()
        try:
            generate(pipe, "red " * 20)
        finally:
            logging.disable_propagation()
        assert "20 tokens" in caplog.text


class TestSaving:
    def test_round_trip(self, pipe: EmojiPipeline, tmp_path: Path) -> None:
        pipe.save_pretrained(tmp_path)
        again = EmojiPipeline.from_pretrained(tmp_path)
        again.set_progress_bar_config(disable=True)
        for name in ("transformer", "text_encoder"):
            saved, loaded = pipe.components[name].state_dict(), again.components[name].state_dict()
            assert saved.keys() == loaded.keys()
            assert all(torch.equal(saved[key], loaded[key]) for key in saved)
        # Loaded tensors have another alignment in memory, for which the CPU may choose another kernel.
        torch.testing.assert_close(generate(pipe), generate(again), atol=LOADED_TWICE, rtol=0)
        kinds = {path.suffix for path in tmp_path.rglob("*") if path.is_file()}
        assert kinds <= {".safetensors", ".json", ".txt"}, "nothing that unpickles"

    def test_half_precision(self, pipe: EmojiPipeline) -> None:
        full = generate(pipe)
        pipe.to(torch.bfloat16)
        assert (generate(pipe).float() - full).abs().mean() < 0.02


class TestCaptions:
    def test_style_by_name_or_words(self) -> None:
        assert caption("dog", "fluent3d") == caption(" dog ", "glossy 3d style") == "dog, glossy 3d style"
        assert caption("dog") == "dog"

    def test_refusals(self) -> None:
        with pytest.raises(ValueError, match="Did you mean 'twemoji'"):
            caption("dog", "twemojy")
        with pytest.raises(ValueError, match="empty"):
            caption("  ", "noto")


class TestShippedModel:
    @pytest.fixture(scope="class")
    def shipped(self) -> EmojiPipeline:
        pipeline = zoo.load("emoji")
        pipeline.set_progress_bar_config(disable=True)
        return pipeline

    def test_files_are_small_and_harmless(self) -> None:
        files = [path for path in WEIGHTS.rglob("*") if path.is_file()]
        assert {path.suffix for path in files} <= {".safetensors", ".json", ".md"}
        assert max(path.stat().st_size for path in files) < 16_000_000
        assert sum(path.stat().st_size for path in files) <= 32_000_000

    def test_stored_as_bfloat16(self) -> None:
        from safetensors import safe_open

        for path in WEIGHTS.rglob("*.safetensors"):
            with safe_open(path, framework="pt") as file:
                assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118

    def test_sizes(self, shipped: EmojiPipeline) -> None:
        assert 10e6 < shipped.transformer.num_parameters() < 15e6
        assert 1e6 < shipped.text_encoder.num_parameters() < 3e6
        assert shipped.transformer.config.in_channels == 48
        assert shipped.transformer.dtype == shipped.text_encoder.dtype == torch.float32

    def test_generates_the_subject_of_the_caption(self, shipped: EmojiPipeline) -> None:
        colors = {"red heart": 0, "green heart": 1, "blue heart": 2}
        images = generate(shipped, [caption(name, "twemoji") for name in colors], num_inference_steps=10)
        assert images.shape == (3, 3, 64, 64)
        assert (images[:, :, :2, :2] > 0.95).all(), "white background"
        middle = images[:, :, 24:40, 24:40].mean((2, 3))
        assert middle.argmax(1).tolist() == list(colors.values())

    def test_same_seed_same_image(self, shipped: EmojiPipeline) -> None:
        first, second = (generate(shipped, caption("dog face", "noto"), num_inference_steps=4) for _ in range(2))
        assert torch.equal(first, second)

    def test_knows_every_style_word(self, shipped: EmojiPipeline) -> None:
        unknown = shipped.tokenizer.unk_token_id
        for phrase in STYLES.values():
            assert unknown not in shipped.tokenizer(phrase)["input_ids"]

    def test_index_names_classes_every_release_has(self) -> None:
        index = json.loads((WEIGHTS / "model_index.json").read_text())
        assert index["tokenizer"] == ["transformers", "PreTrainedTokenizerFast"]
        assert index["transformer"] == ["diffusers", "FluxTransformer2DModel"]


class TestZoo:
    def test_unknown_model(self) -> None:
        with pytest.raises(ValueError, match="Did you mean 'emoji'"):
            zoo.load("emojy")

    def test_import_is_light(self) -> None:
        code = "import sys, holdover.zoo; print([m for m in ('torch', 'diffusers') if m in sys.modules])"
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("method", "nothing"), [("tea_cache", {"rel_l1_thresh": 0.0}), ("mag_cache", {"mag_threshold": 0.0})]
)
def test_caches_use_its_profiles_and_are_exact_at_threshold_0(method: str, nothing: dict[str, float]) -> None:
    pipe = zoo.load("emoji")
    pipe.set_progress_bar_config(disable=True)

    def image() -> np.ndarray:
        seed = torch.Generator().manual_seed(0)
        return pipe("red apple", num_inference_steps=6, generator=seed, output_type="np").images

    plain = image()
    with holdover.enable(pipe, method) as cache:
        assert "emoji" in cache.stats().notes[0]
        held = image()
        assert cache.stats().held > 0
        with cache.using(**nothing):
            assert np.array_equal(image(), plain)
    assert not np.array_equal(held, plain)
    assert np.array_equal(image(), plain)
