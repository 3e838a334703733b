"""A small substitute for vLLM-Omni, imported again for each test that uses it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

STANDIN = Path(__file__).with_name("standin")


class Omni:
    """The modules of the substitute, imported at first use."""

    @property
    def plugins(self) -> ModuleType:
        return importlib.import_module("vllm_omni.plugins")

    @property
    def selector(self) -> ModuleType:
        return importlib.import_module("vllm_omni.diffusion.cache.selector")

    @property
    def runner_module(self) -> ModuleType:
        return importlib.import_module("vllm_omni.diffusion.worker.diffusion_model_runner")

    @property
    def data(self) -> ModuleType:
        return importlib.import_module("vllm_omni.diffusion.data")

    def runner(self, pipeline: Any, cache_backend: str = "none", cache_config: Any = None) -> Any:
        """A worker's runner with the pipeline loaded, started as the command line would start it."""
        self.plugins.load_omni_general_plugins()
        config = self.data.OmniDiffusionConfig(cache_backend, cache_config)
        runner = self.runner_module.DiffusionModelRunner(config)
        runner.load_model(pipeline)
        return runner

    def request(self, announced: int | None = None, extra: dict[str, Any] | None = None, **call: Any) -> Any:
        """A request; `announced` is the number of steps the runner knows of."""
        module = importlib.import_module("vllm_omni.diffusion.request")
        return module.OmniDiffusionRequest(module.OmniDiffusionSamplingParams(announced, extra or {}, call))


@pytest.fixture
def omni(monkeypatch: pytest.MonkeyPatch) -> Iterator[Omni]:
    for name in _loaded():
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(STANDIN)
    yield Omni()
    for name in _loaded():
        del sys.modules[name]


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] in ("vllm", "vllm_omni")]
