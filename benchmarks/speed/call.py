"""The whole call: FluxPipeline from a prompt to an image, with text encoders and VAE of full size, and its parts.

Weights are random. Tokenizers have a token per byte: the encoders always get 77 and 512 tokens, whatever they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, PreTrainedTokenizerFast, T5Config, T5EncoderModel

import holdover
from holdover.plan.search import growing

from .measure import Results, first_line
from .methods import share
from .models import MODELS, Shape
from .run import COMPILE_S, TINY, Options, compile_model, describe_row, empty_memory
from .table import PARTS

MODES = ("eager", "float8", "compiled")  # the most important first: each of the compiled ones takes up to a minute
BUDGETS = (10, 8)
PROMPTS = ("a watercolor of a lighthouse in a storm", "a glass of lemonade on a table in the garden")
CLIP = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12}
T5 = {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64, "vocab_size": 32128}
TINY_CLIP = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
TINY_T5 = {"d_model": 24, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 258}
VAE = {
    "block_out_channels": (128, 256, 512, 512),
    "latent_channels": 16,
    "layers_per_block": 2,
    "sample_size": 1024,
    "scaling_factor": 0.3611,
    "shift_factor": 0.1159,
    "use_quant_conv": False,
    "use_post_quant_conv": False,
}
TINY_VAE = VAE | {"block_out_channels": (4,) * 4, "latent_channels": 4, "layers_per_block": 1, "norm_num_groups": 2}


def measure_calls(options: Options, results: Results) -> None:
    """Every row of the section: uncached and eager, then with a plan, quantized and compiled."""
    shape = TINY if options.tiny else Shape()
    pipe: FluxPipeline | None = None
    for mode in MODES:
        labels = ["no cache", *(_label(budget, known) for budget in BUDGETS for known in (False, True))]
        ids = [_identity(options, shape, mode, label) for label in (labels if mode != "eager" else labels[:1])]
        if not results.lacking(ids):
            continue
        results.check_time(0 if mode == "eager" or options.tiny else COMPILE_S)
        if pipe is None:
            pipe = build_pipeline(options)
        else:  # each mode starts with a new transformer, everything else stays
            pipe.transformer = None
            empty_memory(options)
            pipe.transformer = MODELS["flux"].build(options.device, options.tiny)
        try:
            compile_model(pipe, mode, options)
            _measure_mode(pipe, mode, options, shape, results)
        except Exception as error:
            results.add(_identity(options, shape, mode, "no cache") | {"raised": first_line(error)})


def _label(budget: int, known: bool) -> str:
    return f"plan, K = {budget} of 50, prompt {'known' if known else 'new'}"


def _identity(options: Options, shape: Shape, mode: str, label: str) -> dict[str, Any]:
    by = "" if label == "no cache" else "holdover"
    return describe_row("call", "flux", shape, options.steps) | {"mode": mode, "by": by, "label": label}


def _measure_mode(pipe: FluxPipeline, mode: str, options: Options, shape: Shape, results: Results) -> None:
    """Without a cache, then with a plan for each budget: a prompt that is new, and the same prompt again."""
    size = {"height": shape.height, "width": shape.width, "max_sequence_length": shape.text}
    time_call(pipe, PROMPTS[0], num_inference_steps=min(4, options.steps), **size)  # compiles, warms up
    plain = time_call(pipe, PROMPTS[1], num_inference_steps=options.steps, **size)
    step_s = plain["parts"]["denoising"] / options.steps

    def add(label: str, row: dict[str, Any], computed: int) -> None:
        identity = _identity(options, shape, mode, label)
        if results.needs(identity):
            encoders_and_vae = row["parts"]["text encoders"] + row["parts"]["VAE"]
            expected = {"step_s": step_s, "computed": computed, "expected_s": computed * step_s + encoders_and_vae}
            results.add(identity | {"title": MODELS["flux"].title} | row | expected)

    add("no cache", plain, options.steps)
    if mode == "eager":
        return
    for budget in BUDGETS:
        schedule = growing(options.steps, share(budget)(options.steps))
        embeddings = holdover.install_prompt_embed_cache(pipe)
        with holdover.enable(pipe, "plan", schedule=schedule, predictor="newton"):
            time_call(pipe, PROMPTS[0], num_inference_steps=options.steps, **size)
            for known in (False, True):
                row = time_call(pipe, PROMPTS[1], num_inference_steps=options.steps, **size)
                add(_label(budget, known), row, len(schedule))
        counted = (embeddings.hits, embeddings.misses)
        holdover.uninstall_prompt_embed_cache(pipe)
        if counted != (1, 2):
            raise RuntimeError(f"The prompts were encoded {counted[1]} times and found {counted[0]} times.")


def time_call(pipe: FluxPipeline, prompt: str, **arguments: Any) -> dict[str, Any]:
    """Seconds of one call, and of its parts: they add up to the whole."""
    generator = torch.Generator(pipe.transformer.device).manual_seed(0)
    with _marks(pipe) as marks:
        begin = time.perf_counter()
        pipe(prompt, generator=generator, **arguments)
        _wait(pipe)
        wall = time.perf_counter() - begin
    moments = [begin, *(marks[name] for name in ("encoded", "denoised", "decoded")), begin + wall]
    return {"wall_s": wall, "parts": {part: b - a for part, (a, b) in zip(PARTS, pairwise(moments), strict=True)}}


@contextmanager
def _marks(pipe: FluxPipeline) -> Iterator[dict[str, float]]:
    """The moments at which the prompt is encoded, the latents are denoised and the image is decoded.

    Each waits for the device once; the loop between them is undisturbed.
    """
    found: dict[str, float] = {}
    entered = ((pipe, "prepare_latents", "encoded"), (pipe.vae, "decode", "denoised"))
    entered += ((pipe.image_processor, "postprocess", "decoded"),)

    def mark(owner: Any, method: str, name: str) -> None:
        plain = getattr(owner, method)

        def marked(*args: Any, **kwargs: Any) -> Any:
            _wait(pipe)
            found[name] = time.perf_counter()
            return plain(*args, **kwargs)

        owner.__dict__[method] = marked

    for each in entered:
        mark(*each)
    try:
        yield found
    finally:
        for owner, method, _ in entered:
            del owner.__dict__[method]


def _wait(pipe: FluxPipeline) -> None:
    if pipe.transformer.device.type == "cuda":
        torch.cuda.synchronize()


def build_pipeline(options: Options) -> FluxPipeline:
    """FluxPipeline of FLUX.1-dev's size, or a tiny one."""
    empty_memory(options)
    t5 = T5Config(feed_forward_proj="gated-gelu", **(TINY_T5 if options.tiny else T5))
    tokens = {"vocab_size": 49408, "max_position_embeddings": 77, "eos_token_id": 2, "bos_token_id": 0}
    clip = CLIPTextConfig(hidden_act="quick_gelu", **tokens, **(TINY_CLIP if options.tiny else CLIP))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32 if options.tiny else torch.bfloat16)
    try:
        with torch.device(options.device):
            encoders: list[nn.Module] = [CLIPTextModel(clip), T5EncoderModel(t5)]
            blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
            vae: nn.Module = AutoencoderKL(**blocks, **(TINY_VAE if options.tiny else VAE))
    finally:
        torch.set_default_dtype(before)
    for module in (*encoders, vae):
        module.eval().requires_grad_(False)
    flow = {"base_shift": 0.5, "max_shift": 1.15, "base_image_seq_len": 256, "max_image_seq_len": 4096}
    pipe = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True, **flow),
        vae=vae,
        text_encoder=encoders[0],
        tokenizer=byte_tokenizer(77),
        text_encoder_2=encoders[1],
        tokenizer_2=byte_tokenizer(512),
        transformer=MODELS["flux"].build(options.device, options.tiny),
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def byte_tokenizer(length: int) -> PreTrainedTokenizerFast:
    """A tokenizer with a token per byte and one for padding."""
    vocabulary = {"<pad>": 0} | {each: i + 1 for i, each in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = Sequence([ByteLevel(add_prefix_space=False), Split("", "isolated")])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", model_max_length=length)
