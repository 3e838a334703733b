"""The shipped model families: one entry each in `FAMILIES`, after the functions that the entries refer to.

An entry declares what a trace of one forward cannot show: the TeaCache signal, passes that write a KV cache, the steps
of each expert, conditioning arguments. A class without an entry is traced like any other and has the signal `input`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..grid import Grid
from .inputs import unwrap_module
from .registry import INPUT_SIGNAL, Arguments, BlockSignal, Family, Signal, read_block_input

# Signals read at the first block of the stack: the input of its attention, as the block itself computes it.


def modulate_flux(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's adaptive norm of the image stream."""
    return block.norm1(arguments["hidden_states"], emb=arguments["temb"])[0]


def modulate_chroma(block: Any, arguments: Arguments) -> torch.Tensor:
    """The same for a norm without weights; the first six rows of the embedding belong to the image stream."""
    return block.norm1(arguments["hidden_states"], emb=arguments["temb"][:, :6])[0]


def modulate_flux2(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's normalized image stream, with the scale and shift that all blocks share."""
    modulation = arguments["temb_mod_img"]
    shift, scale = (modulation.unsqueeze(1) if modulation.ndim == 2 else modulation).chunk(6, dim=-1)[:2]
    return (1 + scale) * block.norm1(arguments["hidden_states"]) + shift


def modulate_qwen(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's modulated stream; some tokens may have a modulation of their own. In 2.1 all blocks share one."""
    modulation = arguments["modulation"] if "modulation" in arguments else block.img_mod(arguments["temb"])
    selected = arguments.get("modulate_index", arguments.get("target_token_mask"))
    return block._modulate(block.img_norm1(arguments["hidden_states"]), modulation.chunk(2, dim=-1)[0], selected)[0]


def modulate_lumina(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's adaptive RMS norm; in Lumina-Image 2.0 of the joint sequence of text and image."""
    return block.norm1(arguments["hidden_states"], arguments["temb"])[0]


def modulate_hunyuan_video(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's adaptive norm; in image-to-video the first frame may have an embedding of its own."""
    if "token_replace_emb" not in arguments:
        return modulate_flux(block, arguments)
    first_frame = arguments["token_replace_emb"], arguments["num_tokens"]
    return block.norm1(arguments["hidden_states"], arguments["temb"], *first_frame)[0]


def modulate_z_image(block: Any, arguments: Arguments) -> torch.Tensor:
    """Layer 0's normalized sequence times (1 + scale); clean tokens may have a scale of their own."""

    def get_scale(embedding: torch.Tensor) -> torch.Tensor:
        return block.adaLN_modulation(embedding).unsqueeze(1).chunk(4, dim=-1)[0]

    mask, normed = arguments.get("noise_mask"), block.attention_norm1(arguments["x"])
    if mask is None:
        return normed * (1 + get_scale(arguments["adaln_input"]))
    noisy, clean = get_scale(arguments["adaln_noisy"]), get_scale(arguments["adaln_clean"])
    return normed * (1 + torch.where(mask.unsqueeze(-1) == 1, noisy, clean))


def modulate_by_table(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's normalized hidden states, with a scale and shift per token or per sample from a learned table.

    diffusers' BasicTransformerBlock calls the modulation `timestep`.
    """
    table, modulation = block.scale_shift_table, arguments["temb"] if "temb" in arguments else arguments["timestep"]
    per_token = modulation.unsqueeze(1) if modulation.ndim == 2 else modulation
    shift, scale = (table + per_token.unflatten(2, table.shape)).unbind(dim=2)[:2]
    return block.norm1(arguments["hidden_states"]) * (1 + scale) + shift


def modulate_cosmos(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's adaptive norm, after the learned positions that Cosmos 1 adds in every block."""
    hidden, positions = arguments["hidden_states"], arguments.get("extra_pos_emb")
    if positions is not None:
        hidden = hidden + positions
    return block.norm1(hidden, arguments["embedded_timestep"], arguments.get("temb"))[0]


def read_cosmos3_input(block: Any, arguments: Arguments) -> torch.Tensor:
    """The generated stream at block 0, not the stream of the understanding model."""
    return arguments["gen_seq"]


def normalize_stable_audio(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's norm of the latent and its timestep token; there is no modulation."""
    return block.norm1(arguments["hidden_states"])


def modulate_minimax(block: Any, arguments: Arguments) -> torch.Tensor:
    """Block 0's normalized rows, with the scale and shift selected by each row's timestep and kind."""
    table = block.adaln_proj(arguments["temb"])
    shift, scale = (values.index_select(0, arguments["adaln_indices"]) for values in table[:2])
    return block.norm1(arguments["hidden_states"]) * (1 + scale) + shift


def normalize_sensenova(block: Any, arguments: Arguments) -> torch.Tensor:
    """Layer 0's norm of the tokens that are generated."""
    return block.input_layernorm_mot_gen(read_block_input(block, arguments))


# Signals that depend on the timestep alone.


def embed_wan_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding e, in the precision of its embedder."""
    embedder = transformer.condition_embedder
    return _apply_in_own_dtype(embedder.time_embedder, embedder.timesteps_proj(timesteps))


def project_wan_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The projected timestep embedding e0, which modulates every block."""
    embedder = transformer.condition_embedder
    return _apply_in_own_dtype(embedder.time_proj, embedder.act_fn(embed_wan_time(transformer, timesteps)))


def _apply_in_own_dtype(module: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Cast the input to the dtype of the weights, unless these are quantized."""
    dtype = next(module.parameters()).dtype
    return module(values.to(dtype) if dtype.is_floating_point else values)


def embed_cogvideox_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding, plus the `ofs` embedding if the model has one (CogVideoX 1.5 image-to-video)."""
    embedding = transformer.time_embedding(transformer.time_proj(timesteps).to(transformer.dtype))
    if getattr(transformer, "ofs_embedding", None) is None:
        return embedding
    ofs = torch.full_like(timesteps[:1], 2.0)  # the constant that the image-to-video pipeline passes
    return embedding + transformer.ofs_embedding(transformer.ofs_proj(ofs).to(transformer.dtype))


def embed_lumina_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding, without the caption."""
    embedder = transformer.time_caption_embed
    return embedder.timestep_embedder(embedder.time_proj(timesteps).to(transformer.dtype))


def embed_hidream_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding, before the pooled prompt is added."""
    return transformer.t_embedder(timesteps, transformer.dtype)


def embed_hunyuan_image3_time(transformer: Any, timesteps: torch.Tensor) -> torch.Tensor:
    """The timestep embedding."""
    return transformer.time_embed(timesteps)


# Passes that write keys and values for later passes: they must be computed.


def check_cache_mode(arguments: Arguments) -> str | None:
    """Models whose argument `kv_cache_mode` selects writing or reading."""
    mode = arguments.get("kv_cache_mode")
    return None if mode in (None, "cached", "inject") else f"writes the KV cache ({mode})"


def check_glm_caches(arguments: Arguments) -> str | None:
    """GLM-Image, whose cache objects carry the mode; it is the same in every layer."""
    caches = arguments.get("kv_caches")
    return "writes the KV cache" if caches is not None and caches[0].mode == "write" else None


def check_anyflow_flag(arguments: Arguments) -> str | None:
    """AnyFlow FAR, which writes the keys and values of a finished chunk in a separate pass."""
    flag = arguments.get("kv_cache_flag") or {}
    return "writes the KV cache of a finished chunk" if flag.get("is_cache_step") else None


# Pipelines with two expert transformers.


def select_wan_steps(pipeline: Any, transformer: nn.Module, grid: Grid) -> Grid:
    """Wan 2.2: `transformer` handles the steps at or above the boundary noise level, `transformer_2` those below."""
    config: Any = getattr(pipeline, "config", None)
    boundary: float | None = config.get("boundary_ratio") if isinstance(config, Mapping) else None
    if boundary is None and pipeline is not None:
        boundary = vars(pipeline).get("boundary_ratio")  # a pipeline without a config
    if boundary is None or not grid.noise:
        return grid
    high, low = (
        unwrap_module(transformer) is unwrap_module(getattr(pipeline, name, None))
        for name in ("transformer", "transformer_2")
    )
    if high and low:  # one module in both places
        return grid
    steps = [i for i in range(grid.first, grid.last + 1) if (grid.noise[i] < boundary) == low]
    return grid.between(steps[0], steps[-1]) if steps else grid


def _modulated(of_block: BlockSignal) -> tuple[Signal, ...]:
    return (Signal("modulated", of_block),)


INPUT = (INPUT_SIGNAL,)
FLUX = _modulated(modulate_flux)
LUMINA = _modulated(modulate_lumina)
QWEN = _modulated(modulate_qwen)
WAN = (Signal("e", of_time=embed_wan_time), Signal("e0", of_time=project_wan_time))
ENCODER = "encoder_hidden_states"

FAMILIES = (
    # FLUX.1, and models whose first block normalizes the image stream in the same way
    Family("FLUX.1", ("FluxTransformer2DModel",), FLUX),
    Family("Stable Diffusion 3", ("SD3Transformer2DModel",), FLUX),
    Family("LongCat-Image", ("LongCatImageTransformer2DModel",), FLUX),
    Family("Ovis-Image", ("OvisImageTransformer2DModel",), FLUX),
    Family("Bria", ("BriaTransformer2DModel", "BriaFiboTransformer2DModel"), FLUX),
    Family("AuraFlow", ("AuraFlowTransformer2DModel",), FLUX),
    Family("Motif-Video", ("MotifVideoTransformer3DModel",), FLUX),
    Family("Chroma", ("ChromaTransformer2DModel",), _modulated(modulate_chroma)),
    # Other image models
    Family("FLUX.2", ("Flux2Transformer2DModel",), _modulated(modulate_flux2), must_compute=check_cache_mode),
    Family("Qwen-Image", ("QwenImageTransformer2DModel",), QWEN),
    Family("Qwen-Image 2.1", ("QwenImage21Transformer2DModel",), QWEN, must_compute=check_cache_mode),
    # HiDream's distilled models use the signal `input`
    Family(
        "HiDream-I1", ("HiDreamImageTransformer2DModel",), (Signal("time", of_time=embed_hidream_time), INPUT_SIGNAL)
    ),
    Family(
        "Lumina-Image 2.0",
        ("Lumina2Transformer2DModel",),
        (*LUMINA, Signal("time", of_time=embed_lumina_time)),
        head="layers",
        time_runs_up=True,
    ),
    Family("Lumina-Next", ("LuminaNextDiT2DModel",), LUMINA, time_runs_up=True),
    Family("Z-Image", ("ZImageTransformer2DModel",), _modulated(modulate_z_image), head="layers", time_runs_up=True),
    Family("FIBO 2", ("BriaFibo2Transformer2DModel",), _modulated(modulate_z_image), head="layers"),
    Family(
        "Latte, PixArt, Allegro",
        ("LatteTransformer3DModel", "PixArtTransformer2DModel", "AllegroTransformer3DModel"),
        _modulated(modulate_by_table),
    ),
    Family(
        "HunyuanImage 2.1, HunyuanVideo 1.5",
        ("HunyuanImageTransformer2DModel", "HunyuanVideo15Transformer3DModel"),
        FLUX,
        conditioning=(ENCODER, "encoder_hidden_states_2"),
    ),
    Family("Hunyuan-DiT", ("HunyuanDiT2DModel",), INPUT, conditioning=(ENCODER, "encoder_hidden_states_t5")),
    Family("GLM-Image", ("GlmImageTransformer2DModel",), INPUT, must_compute=check_glm_caches),
    Family("OmniGen", ("OmniGenTransformer2DModel",), INPUT, conditioning=("input_ids", "input_img_latents")),
    Family("Ideogram 4", ("Ideogram4Transformer2DModel",), INPUT, time_runs_up=True),
    # Video and audio models
    Family("Wan", ("WanTransformer3DModel",), WAN, range_of=select_wan_steps),
    Family("Wan-VACE", ("WanVACETransformer3DModel",), WAN, head="blocks", range_of=select_wan_steps),
    Family(
        "Wan-Animate, ChronoEdit, SkyReels-V2",
        ("WanAnimateTransformer3DModel", "ChronoEditTransformer3DModel", "SkyReelsV2Transformer3DModel"),
        WAN,
    ),
    Family(
        "Wan-Animate 2, Sana-WM refiner",
        ("WanAnimate2Transformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"),
        INPUT,
        must_compute=check_cache_mode,
    ),
    Family("AnyFlow FAR", ("AnyFlowFARTransformer3DModel",), INPUT, must_compute=check_anyflow_flag),
    Family(
        "HunyuanVideo",
        ("HunyuanVideoTransformer3DModel", "HunyuanVideoFramepackTransformer3DModel"),
        _modulated(modulate_hunyuan_video),
    ),
    Family(
        "CogVideoX",
        ("CogVideoXTransformer3DModel", "ConsisIDTransformer3DModel"),
        (Signal("time", of_time=embed_cogvideox_time),),
    ),
    Family("LTX-Video", ("LTXVideoTransformer3DModel",), _modulated(modulate_by_table)),
    Family(
        "Mochi",
        ("MochiTransformer3DModel",),
        LUMINA,
        notes="The scheduler itself counts up (invert_sigmas); the model is given its timesteps as they are.",
    ),
    Family(
        "Cosmos",
        ("CosmosTransformer3DModel",),
        _modulated(modulate_cosmos),
        notes="A ControlNet's residuals enter inside the blocks: a held step holds their effect too.",
    ),
    Family(
        "Cosmos 3", ("Cosmos3OmniTransformer",), (Signal("input", read_cosmos3_input),), conditioning=("input_ids",)
    ),
    Family("Kandinsky 5", ("Kandinsky5Transformer3DModel",), INPUT, conditioning=(ENCODER, "pooled_projections")),
    Family("Stable Audio", ("StableAudioDiTModel",), (Signal("normed", normalize_stable_audio),)),
    Family(
        "MiniMax-H3",
        ("MiniMaxH3Transformer3DModel",),
        _modulated(modulate_minimax),
        conditioning=(ENCODER,),
        notes="The scheduler itself counts up; conditioning rows are at timestep 1, which is clean.",
    ),
    # Models that vLLM-Omni has and diffusers has not
    Family("BAGEL", ("Bagel",), INPUT),
    Family("SenseNova-U1", ("SenseNovaU1ForCausalLM",), (Signal("normed", normalize_sensenova),)),
    Family("HunyuanImage 3", ("HunyuanImage3Pipeline",), (Signal("time", of_time=embed_hunyuan_image3_time),)),
)
