"""holdover next to vLLM-Omni's own caches, on the same inputs: `python -m benchmarks.vllm_omni_parity --wheel PATH`.

    pip download --no-deps vllm-omni==0.30.0 -d /tmp/wheels

The wheel is read, not installed: its pure modules run with `vllm` replaced by a stub. Each case is run by both sides
and their results are compared, numbers bit by bit. `--record tests/spec/vllm_omni.json` keeps the results of vLLM-Omni
as test data. Last, a tiny FLUX transformer generates under both, on the same weights in the same memory.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import itertools
import json
import logging
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry
from torch import nn

import holdover
from holdover.engine.signals import SignalReading
from holdover.grid import Grid
from holdover.magcache import Flux2MagCacheStrategy, FluxMagCacheStrategy
from holdover.policies.base import schedule
from holdover.policies.magcache import MagCachePolicy, nearest_ratios
from holdover.policies.teacache import Polynomial, TeaCachePolicy
from holdover.profiles import shipped

from .report import provenance, save, table

Case = dict[str, Any]
POLYNOMIALS = {profile.name: profile.fit("").coefficients for profile in shipped("tea_cache")}
MAG_RATIOS = {profile.name: profile.ratios("cond") for profile in shipped("mag_cache")}
STEPS = 12


def make_tensor(seed: int, *shape: int) -> torch.Tensor:
    """Numbers in -0.5 to 0.5 that are the same on every machine."""
    count = torch.Size(shape).numel()
    values = [((i + 1 + 7919 * seed) * 1103515245 + 12345) % 2**31 / 2**31 - 0.5 for i in range(count)]
    return torch.tensor(values, dtype=torch.float32).reshape(shape)


def make_cases() -> Iterator[Case]:
    """Everything that is compared; the values are JSON."""
    for length, count in itertools.product((4, 28, 50), (1, 2, 4, 8, 20, 25, 28, 30, 40, 50, 100)):
        yield {"kind": "nearest_interp", "length": length, "count": count}
    for seed, shape in enumerate(((1, 7, 8), (2, 16, 4), (1, 64, 32), (3, 5, 2, 6))):
        yield {"kind": "calibration_metrics", "seed": seed, "shape": shape}
    yield {"kind": "calibration_metrics", "seed": None, "shape": (1, 7, 8)}
    settings = itertools.product((0.06, 0.12, 0.24), (2, 5), (0.1, 0.2))
    for (threshold, limit, retention), steps in itertools.product(settings, (4, 10, 28, 50)):
        for name in ("vllm.flux1", "vllm.flux2"):
            limits = {"threshold": threshold, "max_skip_steps": limit, "retention_ratio": retention}
            yield {"kind": "mag_decisions", "ratios": name, "steps": steps} | limits
    for name in ("vllm.Bagel", "vllm.SenseNovaU1ForCausalLM", "vllm.HunyuanImage3Pipeline", "tc.flux1-dev"):
        yield {"kind": "polynomial", "name": name, "changes": [i / 64 for i in range(33)]}
        for threshold, scale in itertools.product((0.2, 0.4, 0.6), (0.02, 0.1, 0.3)):
            yield {"kind": "tea_decisions", "name": name, "threshold": threshold, "scale": scale, "steps": 16}
    for strategy, seed in itertools.product(("Flux", "Flux2"), range(2)):
        yield {"kind": "residual", "strategy": strategy, "seed": seed}


def run_case(case: Case, side: Any) -> Any:
    """The result of a case by one side, as JSON; floats in hexadecimal, so that they are compared bit by bit."""
    result = getattr(side, case["kind"])(**{name: value for name, value in case.items() if name != "kind"})
    return json.loads(json.dumps(_plain(result)))


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.tolist()
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.hex() if isinstance(value, float) else value


def make_signals(scale: float, steps: int) -> list[torch.Tensor]:
    """A signal whose relative change from step to step is about `scale`."""
    first = make_tensor(1, 1, 24, 8)
    return [first + sum(scale * make_tensor(2 + i, 1, 24, 8) for i in range(step)) for step in range(steps)]


class Ours:
    """holdover."""

    def nearest_interp(self, length: int, count: int) -> torch.Tensor:
        return FluxMagCacheStrategy.nearest_interp(torch.arange(length), count)

    def calibration_metrics(self, seed: int | None, shape: Sequence[int]) -> Any:
        before = None if seed is None else make_tensor(seed + 10, *shape)
        return FluxMagCacheStrategy().compute_calibration_metrics(make_tensor(seed or 0, *shape), before)

    def mag_decisions(
        self, ratios: str, steps: int, threshold: float, max_skip_steps: int, retention_ratio: float
    ) -> str:
        taken = nearest_ratios(MAG_RATIOS[ratios], steps)
        policy = MagCachePolicy(threshold, max_skip_steps, retention_ratio, taken, Grid(steps))
        return "".join("C" if decision.compute else "h" for decision in schedule(policy, policy.grid))

    def polynomial(self, name: str, changes: Sequence[float]) -> list[float]:
        return [Polynomial(POLYNOMIALS[name]).raw(change) for change in changes]

    def tea_decisions(self, name: str, threshold: float, scale: float, steps: int) -> str:
        rescale = Polynomial.trusted(POLYNOMIALS[name]).raw
        policy = TeaCachePolicy(threshold, rescale, Grid(steps), compute_last=False)
        state, reading, decisions = policy.start(), None, ""
        for step, signal in enumerate(make_signals(scale, steps)):
            reading = SignalReading(signal, reading)
            decisions += "C" if policy.decide(step, reading.change(), state).compute else "h"
        return decisions

    def residual(self, strategy: str, seed: int) -> Any:
        return apply_strategy({"Flux": FluxMagCacheStrategy, "Flux2": Flux2MagCacheStrategy}[strategy](), seed)


def apply_strategy(strategy: Any, seed: int) -> list[Any]:
    """Residuals of one and of two streams, and what applying them returns."""
    hidden, encoder = make_tensor(seed, 1, 6, 4), make_tensor(seed + 1, 1, 3, 4)
    output = make_tensor(seed + 2, 1, 3, 4), make_tensor(seed + 3, 1, 6, 4)
    if type(strategy).__name__.startswith("Flux2"):
        pair = strategy.compute_residual(output, (encoder, hidden))
        single = strategy.compute_residual(output[1], hidden)
    else:
        pair, single = (output[0] - encoder, output[1] - hidden), strategy.compute_residual(output, hidden)
    applied = strategy.apply_residual_tuple(hidden, encoder, pair)
    return [pair, single, applied, strategy.apply_residual(hidden, single)]


class Block(nn.Module):
    """Adds 1 to its input and notes its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[int] = []

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        self.steps.append(step)
        return hidden_states + 1.0


class Transformer(nn.Module):
    """Two blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList([Block(), Block()])

    def forward(self, hidden_states: torch.Tensor, step: int) -> torch.Tensor:
        for block in self.transformer_blocks:
            hidden_states = block(hidden_states, step)
        return hidden_states


class Theirs:
    """vLLM-Omni, from its wheel."""

    def __init__(self, wheel: Path) -> None:
        install_stubs(wheel)
        cache = "vllm_omni.diffusion.cache"
        self.strategies = importlib.import_module(f"{cache}.magcache.strategy")
        self.mag, self.mag_config = (importlib.import_module(f"{cache}.magcache.{name}") for name in ("hook", "config"))
        self.tea, self.tea_config = (importlib.import_module(f"{cache}.teacache.{name}") for name in ("hook", "config"))
        self.tea_state = importlib.import_module(f"{cache}.teacache.state").TeaCacheState
        TransformerBlockRegistry.register(Block, TransformerBlockMetadata(return_hidden_states_index=0))

    def nearest_interp(self, length: int, count: int) -> torch.Tensor:
        found: torch.Tensor = self.strategies.FluxMagCacheStrategy.nearest_interp(torch.arange(length), count)
        return found

    def calibration_metrics(self, seed: int | None, shape: Sequence[int]) -> Any:
        before = None if seed is None else make_tensor(seed + 10, *shape)
        strategy = self.strategies.FluxMagCacheStrategy()
        return strategy.compute_calibration_metrics(make_tensor(seed or 0, *shape), before)

    def mag_decisions(self, ratios: str, steps: int, **limits: Any) -> str:
        strategy = getattr(
            self.strategies, {"vllm.flux1": "Flux", "vllm.flux2": "Flux2"}[ratios] + "MagCacheStrategy"
        )()
        taken = strategy.nearest_interp(strategy.mag_ratios, steps)
        config = self.mag_config.MagCacheConfig(num_inference_steps=steps, mag_ratios=taken, **limits)
        model = Transformer()
        self.mag.apply_mag_cache_hook(model, config, self.strategies.FluxMagCacheStrategy())
        for step in range(steps):
            model(torch.zeros(1, 1, 1), step)
        return "".join("C" if step in model.transformer_blocks[0].steps else "h" for step in range(steps))

    def polynomial(self, name: str, changes: Sequence[float]) -> list[float]:
        return [float(self._hook(name, 0.2).rescale_func(change)) for change in changes]

    def tea_decisions(self, name: str, threshold: float, scale: float, steps: int) -> str:
        hook, state, decisions = self._hook(name, threshold), self.tea_state(), ""
        for signal in make_signals(scale, steps):
            decisions += "C" if hook._should_compute_full_transformer(state, signal) else "h"
            state.previous_modulated_input, state.cnt = signal, state.cnt + 1
        return decisions

    def _hook(self, name: str, threshold: float) -> Any:
        known = {"tc.flux1-dev": "FluxTransformer2DModel"}
        kind = known.get(name, name.removeprefix("vllm."))
        return self.tea.TeaCacheHook(self.tea_config.TeaCacheConfig(threshold, transformer_type=kind))

    def residual(self, strategy: str, seed: int) -> Any:
        return apply_strategy(getattr(self.strategies, f"{strategy}MagCacheStrategy")(), seed)


def install_stubs(wheel: Path) -> None:
    """Let the wheel's pure modules be imported: packages without their `__init__`, and `vllm` as a stub."""
    logger = SimpleNamespace(init_logger=logging.getLogger)
    one_process = {
        "get_classifier_free_guidance_rank": lambda: 0,
        "get_classifier_free_guidance_world_size": lambda: 1,
        "get_sp_group": lambda: None,
        "model_parallel_is_initialized": lambda: False,
    }
    for name in ("", ".diffusion", ".diffusion.cache", ".diffusion.cache.magcache", ".diffusion.cache.teacache"):
        package = ModuleType(f"vllm_omni{name}")
        package.__path__ = [str(wheel / package.__name__.replace(".", "/"))]
        sys.modules[package.__name__] = package
    for name, contents in {
        "vllm": {},
        "vllm.logger": vars(logger),
        "vllm_omni.logger": vars(logger),
        "vllm_omni.diffusion.distributed": {},
        "vllm_omni.diffusion.distributed.parallel_state": one_process,
        "vllm_omni.diffusion.cache.teacache.extractors": {"get_extractor": lambda kind: None},
    }.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(contents)
    hooks = ModuleType("vllm_omni.diffusion.hooks")
    hooks.__path__ = [str(wheel / "vllm_omni/diffusion/hooks")]
    sys.modules[hooks.__name__] = hooks
    vars(hooks).update(vars(importlib.import_module("vllm_omni.diffusion.hooks.base")))


def compare_generations(theirs: Theirs) -> dict[str, Any]:
    """A tiny FLUX transformer under both MagCaches: the computed steps, and at how many steps all bits are equal."""
    from tiny.models import MODELS, with_timestep

    model, ratios = MODELS["FluxTransformer2DModel"], [1.0, *[1.02] * (STEPS - 1)]
    net, inputs = model.build(), model.inputs()
    limits = {"threshold": 0.2, "max_skip_steps": 3, "retention_ratio": 0.1}

    def generate() -> tuple[str, list[torch.Tensor]]:
        runs, outputs, trace = [], [], ""
        counter = net.transformer_blocks[0].attn.register_forward_hook(lambda *_: runs.append(1))
        for step in range(STEPS):
            before = len(runs)
            outputs.append(net(**with_timestep(model, inputs, 1 - step / STEPS), return_dict=False)[0])
            trace += "C" if len(runs) > before else "h"
        counter.remove()
        return trace, outputs

    with torch.no_grad():
        with holdover.enable(net, holdover.MagCacheConfig(mag_ratios=ratios, num_inference_steps=STEPS, **limits)):
            generate()  # the first generation also traces and checks the model
            our_trace, our_outputs = generate()
        config = theirs.mag_config.MagCacheConfig(mag_ratios=ratios, num_inference_steps=STEPS, **limits)
        theirs.mag.apply_mag_cache_hook(net, config, theirs.strategies.FluxMagCacheStrategy())
        their_trace, their_outputs = generate()
    pairs = zip(our_outputs, their_outputs, strict=True)
    equal = sum(torch.equal(ours, other) for ours, other in pairs)
    return {"ours": our_trace, "theirs": their_trace, "steps": STEPS, "bit_identical_steps": equal}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, required=True, help="the wheel of vLLM-Omni 0.30, or the folder it is in")
    parser.add_argument("--record", type=Path, help="file to keep the results of vLLM-Omni in")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wheel = next(arguments.wheel.glob("vllm_omni-*.whl")) if arguments.wheel.is_dir() else arguments.wheel
    ours, theirs = Ours(), Theirs(wheel)
    recorded, kinds = [], dict[str, list[Case]]()
    for case in make_cases():
        result = run_case(case, theirs)
        recorded.append(case | {"result": result})
        own = run_case(case, ours)
        kinds.setdefault(case["kind"], []).append(case | {"same": own == result, "ours": own, "theirs": result})
    rows = [[kind, len(cases), sum(case["same"] for case in cases)] for kind, cases in kinds.items()]
    print(table([("compared", "cases", "same"), *rows]))
    differing = [case for cases in kinds.values() for case in cases if not case["same"]]
    for case in differing:
        print(json.dumps(case)[:300])
    generations = compare_generations(theirs)
    print(generations)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if arguments.record is not None:
        lines = ",\n".join(json.dumps(case) for case in recorded)
        arguments.record.write_text(f'{{"wheel": "{wheel.name}", "sha256": "{digest}", "cases": [\n{lines}\n]}}\n')
    summary = {kind: {"cases": cases, "same": same} for kind, cases, same in rows}
    result = {"wheel": wheel.name, "sha256": digest, "compared": summary, "flux": generations, "differing": differing}
    print(save("vllm_omni_parity", result | provenance()))


if __name__ == "__main__":
    main()
