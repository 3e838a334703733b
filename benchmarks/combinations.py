"""`python -m benchmarks.combinations`: quantized and offloaded weights, compiled or not, with caches on top.

Every combination that diffusers itself runs is run on a tiny FLUX: the plain pipeline twice, then three methods, each
computing every step (the image must be the plain one, bit for bit), holding steps (the replay check passes, and a seed
gives the same image twice) and disabled (every attribute is the object it was, and the image the plain one).
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import diffusers
import torch
from accelerate import cpu_offload
from torch import nn

import holdover
from holdover.plan.generation import fingerprint
from snapshots import denoiser, differences
from tiny.pipelines import PIPELINES, run
from tiny.pipelines_image import FLUX, model

from . import RESULTS
from .report import provenance, save, versions

STEPS = 6
TINY = PIPELINES["FluxPipeline"]
WIDER: dict[str, Any] = {"num_attention_heads": 4, "attention_head_dim": 16, "axes_dims_rope": (8, 4, 4)}
METHODS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # computing every step, and holding some
    "mag_cache": ({"mag_threshold": 0.0, "mag_ratios": [1.0]}, {"mag_threshold": 1.0, "mag_ratios": [1.0]}),
    "plan": ({"schedule": tuple(range(STEPS))}, {"schedule": (0, 1, 3)}),
    "easy_cache": ({"threshold": 0.0}, {"threshold": 1e6, "warmup_steps": 2}),
}
ALWAYS: dict[str, dict[str, Any]] = {
    "mag_cache": {"mag_max_skip_steps": 1, "mag_retention_ratio": 0.0},
    "plan": {"predictor": "newton"},
    "easy_cache": {},
}
Device = torch.device


class NotHereError(Exception):
    """The combination needs a package or a device that is not here."""


# Weights: a transformer, quantized


def _linear_layers(transformer: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """The blocks' linear layers but those of the modulation, with their parents and names."""
    for parent_name, parent in list(transformer.named_modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Linear) and "blocks" in parent_name and "norm" not in parent_name:
                yield parent, name, layer


def _torchao(config: str) -> Callable[[Any, Device], Any]:
    def quantize(transformer: Any, device: Device) -> Any:
        _need("torchao")
        from torchao import quantization as ao

        settings = {"granularity": ao.PerRow()} if config == "Float8DynamicActivationFloat8WeightConfig" else {}
        if settings and device.type == "cpu":
            raise NotHereError("torchao multiplies in float8 on GPUs only")
        transformer.to(device, torch.bfloat16 if settings else None)  # scales per row need bfloat16
        chosen = [layer for _, _, layer in _linear_layers(transformer)]
        ao.quantize_(transformer, getattr(ao, config)(**settings), lambda module, name: module in chosen)
        return transformer

    return quantize


def _bitsandbytes(bits: int) -> Callable[[Any, Device], Any]:
    """Layers of bitsandbytes in place of linear ones; on a CPU diffusers refuses to do this itself."""

    def quantize(transformer: Any, device: Device) -> Any:
        _need("bitsandbytes")
        import bitsandbytes as bnb

        for parent, name, layer in list(_linear_layers(transformer)):
            size, weight = (layer.in_features, layer.out_features), layer.weight.data
            new: nn.Module
            if bits == 8:
                new = bnb.nn.Linear8bitLt(*size, has_fp16_weights=False)
                new.weight = bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
            else:
                new = bnb.nn.Linear4bit(*size, quant_type="nf4", compute_dtype=weight.dtype)
                new.weight = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
            new.bias = layer.bias
            setattr(parent, name, new.eval())
        return transformer.to(device)

    return quantize


def _gguf(transformer: Any, device: Device) -> Any:
    """The transformer written to a GGUF file in Q8_0, and read from it as diffusers does."""
    _need("gguf")
    import gguf
    from gguf.quants import quantize

    quantized = {f"{name}.weight" for name, m in transformer.named_modules() if isinstance(m, nn.Linear)}
    with tempfile.TemporaryDirectory() as folder:
        writer = gguf.GGUFWriter(Path(folder) / "flux.gguf", "flux")
        for name, tensor in transformer.state_dict().items():
            values, kind = tensor.float().cpu().numpy(), gguf.GGMLQuantizationType.Q8_0
            if name in quantized and "blocks" in name and values.shape[-1] % 32 == 0:
                writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
            else:
                writer.add_tensor(name, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        transformer.save_config(folder)
        read = type(transformer).from_single_file(
            str(Path(folder) / "flux.gguf"),
            config=folder,
            quantization_config=diffusers.GGUFQuantizationConfig(compute_dtype=torch.float32),
            dtype=torch.float32,
            local_files_only=True,
        )
    return read.eval().to(device)


def _layerwise(transformer: Any, device: Device) -> Any:
    transformer.to(device).enable_layerwise_casting(storage_dtype=torch.float8_e4m3fn, compute_dtype=torch.float32)
    return transformer


def _plain(transformer: Any, device: Device) -> Any:
    return transformer.to(device)


def _need(package: str) -> None:
    if find_spec(package) is None:
        raise NotHereError(f"{package} is not installed")


WEIGHTS: dict[str, Callable[[Any, Device], Any]] = {
    "as they are": _plain,
    "layerwise casting to float8": _layerwise,
    "torchao int8": _torchao("Int8WeightOnlyConfig"),
    "torchao int8 dynamic": _torchao("Int8DynamicActivationInt8WeightConfig"),
    "torchao float8": _torchao("Float8WeightOnlyConfig"),
    "torchao float8 dynamic": _torchao("Float8DynamicActivationFloat8WeightConfig"),
    "bitsandbytes int8": _bitsandbytes(8),
    "bitsandbytes nf4": _bitsandbytes(4),
    "GGUF Q8_0": _gguf,
}


# Placement: where the weights are while they are not needed


def _group(level: str, **options: Any) -> Callable[[Any, Device], None]:
    def place(pipe: Any, device: Device) -> None:
        if options.get("use_stream") and device.type == "cpu":
            raise NotHereError("streams need an accelerator")
        pipe.transformer.enable_group_offload(device, offload_type=level, **options)

    return place


def _sequential(pipe: Any, device: Device) -> None:
    """On a CPU the same hooks, without the device index that diffusers adds and accelerate then takes for a GPU."""
    if device.type == "cpu":
        cpu_offload(pipe.transformer, device)
    else:
        pipe.enable_sequential_cpu_offload(device=device)


PLACEMENTS: dict[str, Callable[[Any, Device], None]] = {
    "on the device": lambda pipe, device: None,
    "group offload, blocks": _group("block_level", num_blocks_per_group=1),
    "group offload, leaves": _group("leaf_level"),
    "group offload, blocks, streams": _group("block_level", num_blocks_per_group=1, use_stream=True),
    "group offload, leaves, streams": _group("leaf_level", use_stream=True),
    "model offload": lambda pipe, device: pipe.enable_model_cpu_offload(device=device),
    "sequential offload": _sequential,
}
MODES = ("eager", "compiled")


# One combination


@dataclass(frozen=True)
class Combination:
    """Quantization, placement, and compiled blocks or none."""

    weights: str
    placement: str
    mode: str

    @property
    def name(self) -> str:
        """For the terminal and `--only`."""
        return f"{self.weights}, {self.placement}, {self.mode}"

    def build(self, device: Device) -> tuple[Any, str]:
        """A pipeline with tiny random weights, and the fingerprint of its transformer before the weights move."""
        pipe = TINY.build()
        transformer = model(diffusers.FluxTransformer2DModel, **FLUX | WIDER, guidance_embeds=True)
        pipe.transformer = WEIGHTS[self.weights](transformer.requires_grad_(False), device)
        known = fingerprint(pipe.transformer)
        PLACEMENTS[self.placement](pipe, device)
        if self.mode == "compiled":
            pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="eager")
        return pipe, known


def generate(pipe: Any, device: Device) -> torch.Tensor:
    """A latent, always from the same noise; inputs are where the pipeline runs, and of its type."""
    half = pipe.transformer.context_embedder.bias.dtype == torch.bfloat16
    where = {"device": device, "dtype": torch.bfloat16 if half else torch.float32}
    inputs = {n: v.to(**where) if isinstance(v, torch.Tensor) else v for n, v in TINY.call(steps=STEPS).items()}
    latent: torch.Tensor = run(pipe, **inputs)
    return latent


def try_combination(combination: Combination, device: Device) -> dict[str, Any]:
    """What came out: `refused` with the words of diffusers, or for every method `ok` or what went wrong."""
    torch._dynamo.reset()
    gc.collect()
    try:
        pipe, known = combination.build(device)
        plain, before = generate(pipe, device), denoiser(pipe)
        again = generate(pipe, device)
        own = differences(before, denoiser(pipe))  # offloading installs its hooks anew after each image
    except NotHereError as error:
        return {"not_here": str(error)}
    except Exception as error:
        return {"refused": _first_line(error)}
    if not torch.equal(plain, again):
        return {"refused": "the plain pipeline gives two images for one seed"}
    try:
        moved = fingerprint(pipe.transformer)
    except Exception as error:
        return {"methods": {"profiles": _first_line(error)}}
    if moved != known:
        return {"methods": {"profiles": "moving the weights changes the fingerprint"}}
    return {"methods": {method: try_method(pipe, method, plain, device, own) for method in METHODS}}


def try_method(pipe: Any, method: str, plain: torch.Tensor, device: Device, own: Collection[str]) -> str:
    """`ok`, or the first thing that is not as it must be; `own` is what diffusers changes itself."""
    zero, holding = (ALWAYS[method] | settings for settings in METHODS[method])
    before = denoiser(pipe)
    try:
        with holdover.enable(pipe, method, **zero) as cache:
            if not torch.equal(generate(pipe, device), plain):
                return "computing every step changes the image"
            if cache.stats().held:
                return "held a step that was to be computed"
        with holdover.enable(pipe, method, **holding) as cache:
            image = generate(pipe, device)
            if not cache.stats().held:
                return "held nothing"
            if not torch.equal(generate(pipe, device), image):
                return "the second image of a seed is another one"
            if not image.isfinite().all():
                return "the image is not finite"
    except Exception as error:
        return _first_line(error)
    if changed := [path for path in differences(before, denoiser(pipe)) if path not in own]:
        return f"left {', '.join(changed[:3])}"
    return "ok" if torch.equal(generate(pipe, device), plain) else "the image is another one after disable()"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    return f"{type(error).__name__}: {lines[0][:160]}"


# The run and its table


def main() -> int:
    """Run every combination, write the result, and print what failed."""
    options = argparse.ArgumentParser(prog="python -m benchmarks.combinations", description=__doc__)
    options.add_argument("--device", default="cpu")
    options.add_argument("--budget-seconds", type=float, default=float("inf"), help="start nothing after that")
    options.add_argument("--out", type=Path, default=RESULTS / "combinations.json")
    options.add_argument("--only", default="", help="combinations with this in their name")
    chosen = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    figures: dict[str, Any] = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
    device, begin = Device(chosen.device), time.monotonic()
    card = torch.cuda.get_device_name() if device.type == "cuda" else None
    about = provenance() | {"card": card, "versions": versions(*PACKAGES)}
    rows = {Combination(*(row[n] for n in KEY)): row for row in figures.get(device.type, {}).get("rows", ())}
    for combination in every_combination():
        if time.monotonic() - begin > chosen.budget_seconds:
            print("The budget is spent before", combination.name)
            break
        if chosen.only in combination.name:
            rows[combination] = vars(combination) | try_combination(combination, device)
            found = outcome(rows[combination])
            print(f"{time.monotonic() - begin:6.1f} s  {combination.name}: {found}", flush=True)
            save("combinations", figures | {device.type: about | {"rows": list(rows.values())}}, chosen.out)
    faults = [row for row in rows.values() if not set(row.get("methods", {}).values()) <= {"ok"}]
    run_count = sum("methods" in row for row in rows.values())
    print(f"{len(rows)} combinations, {run_count} run, {len(faults)} with a fault")
    return min(len(faults), 1)


KEY = ("weights", "placement", "mode")
PACKAGES = ("torch", "diffusers", "accelerate", "torchao", "bitsandbytes", "gguf")


def every_combination() -> Iterator[Combination]:
    """Eager ones first, because compiling takes most of the time."""
    for mode, placement, weights in product(MODES, PLACEMENTS, WEIGHTS):
        yield Combination(weights, placement, mode)


def outcome(row: dict[str, Any]) -> str:
    """A row in words."""
    if "methods" in row:
        faults = [f"{method}: {said}" for method, said in row["methods"].items() if said != "ok"]
        return "; ".join(faults) or "ok"
    return f"refused: {row['refused']}" if "refused" in row else f"not here: {row['not_here']}"


if __name__ == "__main__":
    raise SystemExit(main())
