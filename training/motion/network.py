"""The parts of the motion model before training: text encoder, transformer, and how training calls them."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler, WanTransformer3DModel
from tokenizers import Tokenizer
from torch import nn
from transformers import BertModel, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emoji"))

import model as emoji_model

from holdover.zoo.motion import FRAMES, SIZE, EmojiMotionPipeline

SHIFT = 3.0  # 9 frames of one object are noisier than they look: the square root of their number
SHARD_BYTES = 15_000_000


@dataclass(frozen=True)
class Shape:
    """Sizes of the two networks; the default is the shipped model."""

    heads: int = 4
    head_dim: int = 64
    blocks: int = 7
    hidden: int = 512  # of the feed-forward layers
    patch: int = 6
    text_heads: int = 3
    text_layers: int = 2
    vocabulary: int = 2560

    @property
    def text(self) -> emoji_model.Shape:
        head_dim, layers = self.head_dim, self.text_layers
        return emoji_model.Shape(self.text_heads, head_dim, text_layers=layers, vocabulary=self.vocabulary)


TINY = Shape(heads=2, head_dim=24, blocks=3, hidden=96, text_heads=2, text_layers=1, vocabulary=512)


def make_text_encoder(shape: Shape) -> BertModel:
    """A BERT without the pooled state, which Wan's transformer does not read."""
    encoder = emoji_model.make_text_encoder(shape.text)
    encoder.pooler.requires_grad_(False)
    return encoder


def make_transformer(shape: Shape) -> WanTransformer3DModel:
    transformer = WanTransformer3DModel(
        patch_size=(1, shape.patch, shape.patch),
        num_attention_heads=shape.heads,
        attention_head_dim=shape.head_dim,
        in_channels=3,
        out_channels=3,
        text_dim=shape.text.width,
        freq_dim=256,
        ffn_dim=shape.hidden,
        num_layers=shape.blocks,
        rope_max_seq_len=64,
    )
    initialise(transformer)
    return transformer


def initialise(transformer: WanTransformer3DModel) -> None:
    """As DiT does (arXiv 2212.09748): Xavier weights, and every block starts as the identity."""
    for module in transformer.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    embedder = transformer.condition_embedder
    for layer in (embedder.time_embedder.linear_1, embedder.time_embedder.linear_2):
        nn.init.normal_(layer.weight, std=0.02)
    patches = transformer.patch_embedding
    nn.init.xavier_uniform_(patches.weight.view(len(patches.weight), -1))
    nn.init.zeros_(patches.bias)
    for layer in (embedder.time_proj, transformer.proj_out, *(block.attn2.to_out[0] for block in transformer.blocks)):
        nn.init.zeros_(layer.weight)
    for table in (transformer.scale_shift_table, *(block.scale_shift_table for block in transformer.blocks)):
        nn.init.zeros_(table)


class Velocity(nn.Module):
    """Captions, noisy clips and times in [0, 1] -> velocity, exactly as the pipeline computes it."""

    def __init__(self, text_encoder: BertModel, transformer: WanTransformer3DModel) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer

    def forward(self, noisy: torch.Tensor, times: torch.Tensor, captions: torch.Tensor) -> torch.Tensor:
        mask = captions != 0
        states = self.text_encoder(input_ids=captions, attention_mask=mask.long()).last_hidden_state
        velocity: torch.Tensor = self.transformer(
            hidden_states=noisy,
            timestep=1000 * times,
            encoder_hidden_states=states * mask[..., None],
            return_dict=False,
        )[0]
        return velocity


def make_pipeline(
    velocity: Velocity, tokenizer: PreTrainedTokenizerFast, mean: list[float], std: list[float]
) -> EmojiMotionPipeline:
    return EmojiMotionPipeline(
        tokenizer=tokenizer,
        text_encoder=velocity.text_encoder,
        transformer=velocity.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        pixel_mean=mean,
        pixel_std=std,
        sample_size=SIZE,
        sample_frames=FRAMES,
    )


def load_run(folder: Path, weights: str = "best") -> EmojiMotionPipeline:
    """The pipeline of a training run, in float32, with the best or the last weights."""
    about = json.loads((folder / "run.json").read_text())
    shape = Shape(**about["shape"])
    velocity = Velocity(make_text_encoder(shape), make_transformer(shape)).eval()
    velocity.load_state_dict(
        {name: tensor.float() for name, tensor in emoji_model.load_shards(folder / weights).items()}
    )
    tokenizer = emoji_model.wrap_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return make_pipeline(velocity, tokenizer, about["pixel_mean"], about["pixel_std"])
