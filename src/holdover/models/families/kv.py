"""Models that keep keys and values between passes: a pass that writes them is never held."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..family import Family
from ..registry import INPUT

_READING = (None, "cached", "inject")


def writes_cache(arguments: Mapping[str, Any]) -> str | None:
    """For models that are told by `kv_cache_mode` whether to write or to read."""
    mode = arguments.get("kv_cache_mode")
    return None if mode in _READING else f"writes the KV cache ({mode})"


def writes_layer_caches(arguments: Mapping[str, Any]) -> str | None:
    """For GLM-Image, whose caches carry the mode themselves, the same one in every layer."""
    caches = arguments.get("kv_caches")
    return "writes the KV cache" if caches is not None and caches[0].mode == "write" else None


def writes_chunk_cache(arguments: Mapping[str, Any]) -> str | None:
    """For AnyFlow FAR, which writes the keys and values of a finished chunk in a pass of its own."""
    flag = arguments.get("kv_cache_flag") or {}
    return "writes the KV cache of a finished chunk" if flag.get("is_cache_step") else None


FAMILIES = (
    Family("GLM-Image", ("GlmImageTransformer2DModel",), (INPUT,), must_compute=writes_layer_caches),
    Family("AnyFlow FAR", ("AnyFlowFARTransformer3DModel",), (INPUT,), must_compute=writes_chunk_cache),
    Family(
        "Wan-Animate 2, Sana-WM refiner",
        ("WanAnimate2Transformer3DModel", "SanaWMLTX2RefinerTransformer3DModel"),
        signals=(INPUT,),
        must_compute=writes_cache,
    ),
)
