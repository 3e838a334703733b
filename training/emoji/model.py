"""The parts of the emoji model before training: tokenizer, text encoder, transformer, and their wrapping."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from holdover.zoo.emoji import MAX_TOKENS
from holdover.zoo.emoji.pipeline import EmojiPipeline, position_ids

PATCH, SIZE = 4, 64
SHARD_BYTES = 12_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of the two networks; the default is the shipped model (13.1M + 2.4M parameters)."""

    heads: int = 4
    head_dim: int = 64
    dual_blocks: int = 2
    single_blocks: int = 8
    text_layers: int = 3
    vocabulary: int = 3072

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    @property
    def rope_axes(self) -> tuple[int, int, int]:
        """A quarter of each head is not rotated; rows and columns share the rest."""
        quarter = self.head_dim // 4
        return (quarter, (self.head_dim - quarter) // 2, (self.head_dim - quarter) // 2)


TINY = Shape(heads=2, head_dim=16, dual_blocks=1, single_blocks=2, text_layers=1, vocabulary=512)


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> PreTrainedTokenizerFast:
    """A lower-case WordPiece tokenizer of the captions."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=vocabulary, special_tokens=special))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return wrap_tokenizer(tokenizer)


def wrap_tokenizer(tokenizer: Tokenizer) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=MAX_TOKENS,
        model_input_names=["input_ids", "attention_mask"],
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


def make_text_encoder(shape: Shape, dropout: float = 0.0) -> BertModel:
    config = BertConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        num_hidden_layers=shape.text_layers,
        num_attention_heads=shape.heads,
        intermediate_size=2 * shape.width,
        max_position_embeddings=MAX_TOKENS,
        type_vocab_size=1,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertModel(config)


def make_transformer(shape: Shape) -> FluxTransformer2DModel:
    transformer = FluxTransformer2DModel(
        patch_size=1,
        in_channels=3 * PATCH * PATCH,
        num_layers=shape.dual_blocks,
        num_single_layers=shape.single_blocks,
        attention_head_dim=shape.head_dim,
        num_attention_heads=shape.heads,
        joint_attention_dim=shape.width,
        pooled_projection_dim=shape.width,
        axes_dims_rope=shape.rope_axes,
    )
    initialise(transformer)
    return transformer


def initialise(transformer: FluxTransformer2DModel) -> None:
    """As DiT does (arXiv 2212.09748): Xavier weights, and every block starts as the identity."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    for module in transformer.time_text_embed.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
    gates = [block.norm for block in transformer.single_transformer_blocks]
    for block in transformer.transformer_blocks:
        gates += [block.norm1, block.norm1_context]
    for layer in [*(gate.linear for gate in gates), transformer.norm_out.linear, transformer.proj_out]:
        nn.init.zeros_(layer.weight)


class Velocity(nn.Module):
    """Captions, noisy tokens and times -> velocity, exactly as the pipeline computes it."""

    def __init__(self, text_encoder: BertModel, transformer: FluxTransformer2DModel) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer
        self.register_buffer("image_ids", position_ids(SIZE, SIZE, PATCH), persistent=False)
        self.register_buffer("text_ids", torch.zeros(MAX_TOKENS, 3), persistent=False)

    def forward(self, noisy: torch.Tensor, times: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        mask = captions != 0
        output = self.text_encoder(input_ids=captions, attention_mask=mask.long())
        states = output.last_hidden_state * mask[..., None]
        velocity: torch.Tensor = self.transformer(
            hidden_states=noisy,
            timestep=times,
            encoder_hidden_states=states,
            pooled_projections=output.pooler_output,
            txt_ids=self.text_ids,
            img_ids=self.image_ids,
            return_dict=False,
        )[0]
        return velocity


def keep_times_exact(transformer: FluxTransformer2DModel, dtype: torch.dtype) -> None:
    """Under autocast, embed times in float32 and run the blocks in `dtype`.

    The transformer casts times to the dtype of its embedded input: in bfloat16 the sinusoids would only ever see
    multiples of 4 (of 1000) during training. So the embedded input stays float32 until the first block.
    """

    def widen(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return output.float()

    def narrow(module: nn.Module, args: object, kwargs: dict[str, Any]) -> tuple[object, dict[str, Any]]:
        names = ("hidden_states", "encoder_hidden_states")
        return args, kwargs | {name: kwargs[name].to(dtype) for name in names}

    transformer.x_embedder.register_forward_hook(widen)
    transformer.transformer_blocks[0].register_forward_pre_hook(narrow, with_kwargs=True)


def make_pipeline(
    velocity: Velocity, tokenizer: PreTrainedTokenizerFast, mean: list[float], std: list[float]
) -> EmojiPipeline:
    return EmojiPipeline(
        tokenizer=tokenizer,
        text_encoder=velocity.text_encoder,
        transformer=velocity.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(),
        pixel_mean=mean,
        pixel_std=std,
        patch_size=PATCH,
        sample_size=SIZE,
    )


def save_shards(tensors: dict[str, torch.Tensor], folder: Path, limit: int = SHARD_BYTES) -> None:
    """Write tensors as weights-1.safetensors, weights-2.safetensors, ... none much above the limit."""
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, torch.Tensor]] = [{}]
    room = limit
    for name, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if size > room and shards[-1]:
            shards.append({})
            room = limit
        shards[-1][name] = tensor.contiguous().cpu()
        room -= size
    for number, shard in enumerate(shards, start=1):
        save_file(shard, folder / f"weights-{number}.safetensors")


def load_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in sorted(folder.glob("weights-*.safetensors")):
        tensors |= load_file(path)
    if not tensors:
        raise SystemExit(f"{folder}: no weights-*.safetensors there")
    return tensors
