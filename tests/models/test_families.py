"""The declared families: their classes exist, and their signals are what the models compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from torch import nn

from holdover.grid import Grid
from holdover.models.inputs import ForwardSignature, bind_arguments
from holdover.models.registry import DEFAULT_FAMILY, Family, Signal, get_family, list_families
from holdover.models.trace import find_block_lists
from holdover.profiles import shipped
from tiny.models import MODELS
from tiny.pipelines import PIPELINES, run

torch.set_num_threads(1)

# Warnings of diffusers: moved classes, uncompiled flex attention, autocast on a CPU
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("FutureWarning", "UserWarning")]

DECLARED = list_families()
TINY = [name for name in MODELS if name.partition("[")[0] in DECLARED]
OF_BLOCK = [n for n in TINY if any(s.of_block and s.name != "input" for s in DECLARED[n.partition("[")[0]].signals)]
OF_TIME = [n for n in TINY if any(s.of_time for s in DECLARED[n.partition("[")[0]].signals)]

DOCUMENTED_SIGNALS = {
    "FluxTransformer2DModel": ("modulated",),
    "Flux2Transformer2DModel": ("modulated",),
    "QwenImageTransformer2DModel": ("modulated",),
    "SD3Transformer2DModel": ("modulated",),
    "HunyuanVideoTransformer3DModel": ("modulated",),
    "HunyuanVideoFramepackTransformer3DModel": ("modulated",),
    "HunyuanImageTransformer2DModel": ("modulated",),
    "WanTransformer3DModel": ("e", "e0"),
    "CogVideoXTransformer3DModel": ("time",),
    "ConsisIDTransformer3DModel": ("time",),
    "LTXVideoTransformer3DModel": ("modulated",),
    "MochiTransformer3DModel": ("modulated",),
    "Lumina2Transformer2DModel": ("modulated", "time"),
    "LuminaNextDiT2DModel": ("modulated",),
    "CosmosTransformer3DModel": ("modulated",),
    "HiDreamImageTransformer2DModel": ("time", "input"),
    "ZImageTransformer2DModel": ("modulated",),
    "LongCatImageTransformer2DModel": ("modulated",),
    "StableAudioDiTModel": ("normed",),
    "LatteTransformer3DModel": ("modulated",),
    "ChromaTransformer2DModel": ("modulated",),
    "MiniMaxH3Transformer3DModel": ("modulated",),
}


VLLM_OMNI = ["Bagel", "SenseNovaU1ForCausalLM", "HunyuanImage3Pipeline"]  # models that diffusers does not have


def test_every_declared_class_exists() -> None:
    assert [name for name in DECLARED if not hasattr(diffusers, name)] == VLLM_OMNI


@pytest.mark.parametrize(("name", "signals"), DOCUMENTED_SIGNALS.items())
def test_documented_signals_are_declared_in_order(name: str, signals: tuple[str, ...]) -> None:
    assert tuple(signal.name for signal in DECLARED[name].signals) == signals


def test_every_family_has_a_signal() -> None:
    assert [family.name for family in DECLARED.values() if family.signal() is None] == []


@pytest.mark.parametrize("profile", shipped("tea_cache"), ids=lambda p: p.name)
def test_the_signal_of_a_shipped_profile_is_declared(profile: Any) -> None:
    assert DECLARED[profile.transformer_class].signal(profile.signal) is not None


def test_the_signal_of_an_unknown_model_is_its_input() -> None:
    family = get_family(nn.Linear(2, 2))
    assert family is DEFAULT_FAMILY
    assert family.signals[0].name == "input"


@pytest.mark.parametrize("family", {id(f): f for f in DECLARED.values()}.values(), ids=lambda f: f.name)
def test_declared_heads_and_conditioning_exist_in_the_models(family: Family) -> None:
    for name in family.classes:
        if name in MODELS:
            transformer = MODELS[name].build()
            assert family.head is None or family.head in find_block_lists(transformer)
            assert set(family.conditioning) <= set(ForwardSignature(transformer).names)


def get_attention(block: Any) -> nn.Module:
    names = ("attn", "attn1", "attention", "self_attn")
    found: nn.Module = next(getattr(block, name) for name in names if hasattr(block, name))
    return found


def get_main_block(transformer: nn.Module, family: Family) -> nn.Module:
    lists = find_block_lists(transformer)
    preludes = ("refiner", "text", "vace", "context")
    first = next(name for name in lists if not any(word in name for word in preludes))
    return lists[family.head or first][0]


@pytest.mark.parametrize("name", OF_BLOCK)
@torch.no_grad()
def test_a_block_signal_is_the_input_of_the_first_attention(name: str) -> None:
    transformer = MODELS[name].build()
    family = get_family(transformer)
    block = get_main_block(transformer, family)
    calls: list[dict[str, Any]] = []
    truths: list[torch.Tensor] = []

    def seen_by_block(module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.append(bind_arguments(type(module), args, kwargs))

    def seen_by_attention(module: nn.Module, args: Any, kwargs: Any) -> None:
        truths.append(args[0] if args else kwargs["hidden_states"])

    block.register_forward_pre_hook(seen_by_block, with_kwargs=True)
    get_attention(block).register_forward_pre_hook(seen_by_attention, with_kwargs=True)
    transformer(**MODELS[name].inputs(batch=2))
    signal = next(s for s in family.signals if s.of_block is not None and s.name != "input")
    assert signal.of_block is not None
    assert torch.equal(signal.of_block(block, calls[0]), truths[0])


def record_time_embeddings(transformer: Any, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Run the model and return what it computes from its timestep, by signal name."""
    truths: dict[str, torch.Tensor] = {}

    def embedded(module: nn.Module, args: Any, output: Any) -> None:
        first, *rest = output if isinstance(output, tuple) else (output,)
        truths.update(e=first, time=first, **({"e0": rest[0]} if rest else {}))

    def modulated(module: nn.Module, args: Any, kwargs: Any) -> None:
        truths["time"] = kwargs["temb"]

    if isinstance(transformer, (diffusers.CogVideoXTransformer3DModel, diffusers.ConsisIDTransformer3DModel)):
        transformer.transformer_blocks[0].register_forward_pre_hook(modulated, with_kwargs=True)
    else:
        names = ("condition_embedder", "t_embedder", "time_caption_embed")
        next(getattr(transformer, n) for n in names if hasattr(transformer, n)).register_forward_hook(embedded)
    transformer(**inputs)
    return truths


@pytest.mark.parametrize("name", OF_TIME)
@torch.no_grad()
def test_a_time_signal_is_what_the_model_computes_from_its_timestep(name: str) -> None:
    transformer = MODELS[name].build()
    inputs = MODELS[name].inputs(batch=2)
    timesteps = inputs[MODELS[name].timestep].flatten().float()
    truths = record_time_embeddings(transformer, inputs)
    for signal in get_family(transformer).signals:
        if signal.of_time is not None:
            rows = signal.of_time(transformer, timesteps)
            assert torch.equal(rows, truths[signal.name].reshape(rows.shape))


@torch.no_grad()
def test_time_signals_work_where_only_the_embedder_is_in_full_precision() -> None:
    transformer: Any = MODELS["WanTransformer3DModel"].build().to(torch.bfloat16)
    transformer.condition_embedder.time_embedder.float()
    timesteps = torch.linspace(999, 1, 7)
    dtypes = {
        signal.name: get_time_function(signal)(transformer, timesteps).dtype
        for signal in get_family(transformer).signals
    }
    assert dtypes == {"e": torch.float32, "e0": torch.bfloat16}


def get_time_function(signal: Signal) -> Any:
    assert signal.of_time is not None
    return signal.of_time


WRITING = {
    "Flux2Transformer2DModel[kv]": "extract",
    "QwenImage21Transformer2DModel[kv]": "extract",
    "GlmImageTransformer2DModel[kv]": "KV cache",
    "AnyFlowFARTransformer3DModel[kv]": "finished chunk",
    "WanAnimate2Transformer3DModel[kv]": "extract",
    "SanaWMLTX2RefinerTransformer3DModel[kv]": "capture_pre_rope",
}


@pytest.mark.parametrize("name", TINY)
def test_only_passes_that_write_state_must_be_computed(name: str) -> None:
    model = MODELS[name]
    must_compute = DECLARED[name.partition("[")[0]].must_compute
    reason = None if must_compute is None else must_compute(model.inputs())
    if name in WRITING:
        assert reason is not None
        assert WRITING[name] in reason
    else:
        assert reason is None


def test_models_that_receive_one_minus_t_declare_it() -> None:
    """Where the scheduler itself counts up (Mochi, OmniGen), the model receives t unchanged."""
    assert sorted(name for name, family in DECLARED.items() if family.time_runs_up) == [
        "Ideogram4Transformer2DModel",
        "Lumina2Transformer2DModel",
        "LuminaNextDiT2DModel",
        "ZImageTransformer2DModel",
    ]


def make_expert_pipeline(boundary: float | None, transformer: nn.Module, low: nn.Module) -> Any:
    config = {"boundary_ratio": boundary}
    return SimpleNamespace(config=config, transformer=transformer, transformer_2=low)


GRID = Grid(5, (1.0, 0.95, 0.9, 0.5, 0.1))


@pytest.mark.parametrize(
    ("boundary", "grid", "high", "low"),
    [
        (0.9, GRID, (0, 2), (3, 4)),  # a step at the boundary belongs to the first expert
        (None, GRID, (0, 4), (0, 4)),
        (1.1, GRID, (0, 4), (0, 4)),  # an expert without steps keeps the grid
        (0.9, Grid(5), (0, 4), (0, 4)),  # noise levels unknown
        (0.9, GRID.between(1, 3), (1, 2), (3, 3)),
    ],
)
def test_each_wan_expert_has_its_own_range(
    boundary: float | None, grid: Grid, high: tuple[int, int], low: tuple[int, int]
) -> None:
    first, second = nn.Identity(), nn.Identity()
    range_of = DECLARED["WanTransformer3DModel"].range_of
    ranges = [range_of(make_expert_pipeline(boundary, first, second), model, grid) for model in (first, second)]
    assert [(r.first, r.last) for r in ranges] == [high, low]


def test_a_wan_transformer_without_a_pipeline_handles_every_step() -> None:
    assert DECLARED["WanTransformer3DModel"].range_of(None, nn.Identity(), GRID) == GRID


@pytest.mark.parametrize("name", ["WanPipeline[2.2]", "WanImageToVideoPipeline[2.2]"])
def test_expert_ranges_are_the_steps_the_pipeline_gives_them(name: str) -> None:
    pipe = PIPELINES[name].build()
    called: dict[str, set[float]] = {"transformer": set(), "transformer_2": set()}
    for part, seen in called.items():

        def note(module: nn.Module, args: Any, kwargs: Any, seen: set[float] = seen) -> None:
            seen.add(float(kwargs["timestep"].max()))

        getattr(pipe, part).register_forward_pre_hook(note, with_kwargs=True)
    run(pipe, **PIPELINES[name].call(steps=12))
    timesteps = [float(t) for t in pipe.scheduler.timesteps]
    grid = Grid(len(timesteps), tuple(t / pipe.scheduler.config.num_train_timesteps for t in timesteps))
    for part, seen in called.items():
        transformer = getattr(pipe, part)
        own = get_family(transformer).range_of(pipe, transformer, grid)
        assert set(timesteps[own.first : own.last + 1]) == seen


def test_conditioning_is_found_or_declared_for_every_denoiser() -> None:
    """Kandinsky 6 SR, the protein model and parts of other models have a single branch."""
    single = {
        "Kandinsky6SRTransformer3DModel",
        "MiniMaxMusic3RVQDepthDecoder",
        "RFD4ProteinaTransformer",
        "T5FilmDecoder",
        "TransformerTemporalModel",
    }
    without = set()
    for name in {name.partition("[")[0] for name in MODELS}:
        model = next(MODELS[n] for n in MODELS if n.partition("[")[0] == name)
        transformer = model.build()
        arguments = ForwardSignature(transformer, get_family(transformer).conditioning)
        if not arguments.get_conditioning(arguments.bind((), model.inputs())):
            without.add(name)
    assert without == single
