"""Write the pipeline folder that ships, from a training run.

    python training/emoji/export.py build/emoji/run src/holdover/zoo/emoji/weights

Reads what train.py wrote (weights-*.safetensors, tokenizer.json, run.json) and writes a diffusers folder in bfloat16:
safetensors and JSON alone, every file under 16 MB.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from model import (
    SHARD_BYTES,
    Shape,
    Velocity,
    load_shards,
    make_pipeline,
    make_text_encoder,
    make_transformer,
    wrap_tokenizer,
)
from tokenizers import Tokenizer

from holdover.zoo.emoji.pipeline import EmojiPipeline


def load_run(folder: Path) -> EmojiPipeline:
    """The pipeline of a training run, in float32."""
    about = json.loads((folder / "run.json").read_text())
    shape = Shape(**about["shape"])
    velocity = Velocity(make_text_encoder(shape), make_transformer(shape)).eval()
    velocity.load_state_dict({name: tensor.float() for name, tensor in load_shards(folder).items()})
    tokenizer = wrap_tokenizer(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return make_pipeline(velocity, tokenizer, about["pixel_mean"], about["pixel_std"])


def name_tokenizer_plainly(folder: Path) -> None:
    """Write the tokenizer's class under the name that every transformers release knows."""
    for path, keys in (
        ("model_index.json", ("tokenizer", 1)),
        ("tokenizer/tokenizer_config.json", ("tokenizer_class",)),
    ):
        content = json.loads((folder / path).read_text())
        target = content
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = "PreTrainedTokenizerFast"
        (folder / path).write_text(json.dumps(content, indent=2) + "\n")


def export(run: Path, out: Path, shift: float = 1.0) -> None:
    pipeline = load_run(run).to(dtype=torch.bfloat16)
    pipeline.scheduler.register_to_config(shift=shift)
    pipeline.save_pretrained(out, safe_serialization=True, max_shard_size=SHARD_BYTES)
    name_tokenizer_plainly(out)
    for path in sorted(out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>10,} {path.relative_to(out)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--shift", type=float, default=1.0, help="the scheduler's static time shift")
    options = parser.parse_args()
    export(options.run, options.out, options.shift)


if __name__ == "__main__":
    main()
