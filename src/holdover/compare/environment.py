"""What a comparison ran on: figures from two environments do not belong in one table."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

_PACKAGES = ("holdover", "torch", "diffusers", "transformers", "cache-dit")


def environment(pipe: Any) -> dict[str, Any]:
    """The model, the device and the versions, as plain JSON values."""
    transformer = pipe.components.get("transformer")
    return {
        "pipeline": type(pipe).__name__,
        "transformer": type(transformer).__name__,
        "model": _model_name(str(pipe.config.get("_name_or_path") or "")),
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "device": device_name(torch.device(pipe.device)),
        "python": platform.python_version(),
        "versions": versions(),
    }


def device_name(device: torch.device) -> str:
    """The device in words: a GPU's name, or the processor's with the threads in use."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"{_processor()}, {threads} thread{'' if threads == 1 else 's'}"
    return str(device)


def versions() -> dict[str, str]:
    """Versions of the packages that matter, those that are installed."""
    found = {}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def _model_name(name: str) -> str:
    """A checkpoint's id; of a folder, its own name alone."""
    return Path(name).parent.name if Path(name).name == "weights" else Path(name).name if Path(name).is_dir() else name
