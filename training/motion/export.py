"""Write the pipeline folder that ships, from a training run.

    python training/motion/export.py build/motion/run src/holdover/zoo/motion/weights

Reads what train.py wrote (best/ or last/, tokenizer.json, run.json) and writes a diffusers folder in bfloat16:
safetensors and JSON alone.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from network import SHARD_BYTES, load_run

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "emoji"))

from export import name_tokenizer_plainly


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--weights", default="best", choices=("best", "last"))
    options = parser.parse_args()
    pipeline = load_run(options.run, options.weights)
    for network in (pipeline.text_encoder, pipeline.transformer):
        for tensor in (*network.parameters(), *network.buffers()):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(torch.bfloat16)
    pipeline.save_pretrained(options.out, safe_serialization=True, max_shard_size=SHARD_BYTES)
    name_tokenizer_plainly(options.out)
    for path in sorted(options.out.rglob("*")):
        if path.is_file():
            print(f"{path.stat().st_size:>10,} {path.relative_to(options.out)}")


if __name__ == "__main__":
    main()
