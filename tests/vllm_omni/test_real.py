"""The same against vLLM-Omni itself, where it is installed."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from holdover.selector import config_class
from holdover.vllm_omni import method_names


def installed() -> bool:
    """This test folder is itself importable as vllm_omni, so look for a module inside the real package."""
    return all(importlib.util.find_spec(name) is not None for name in ("vllm", "vllm_omni")) and (
        importlib.util.find_spec("vllm_omni.plugins") is not None
    )


pytestmark = [
    pytest.mark.vllm_omni,
    pytest.mark.skipif(not installed(), reason="vLLM-Omni is not installed: pip install 'holdover[vllm-omni]'"),
]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, target = Path(__file__).with_name("real_script.py"), tmp_path_factory.mktemp("real") / "results.json"
    done = subprocess.run(
        [sys.executable, str(script), str(target)],
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        env=os.environ | {"VLLM_TARGET_DEVICE": "cpu"},
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(target.read_text())
    return found


@pytest.mark.parametrize("name", method_names())
def test_with_nothing_held_its_own_flux_generates_the_same_bits(results, name):
    assert results["same"][name]


@pytest.mark.parametrize("name", method_names())
def test_steps_of_its_own_flux_are_held_whether_or_not_it_refreshes(results, name):
    refreshed, not_refreshed = results["held"][name]
    assert len(refreshed) == 8
    assert refreshed.startswith("C")
    assert "h" in refreshed
    assert not_refreshed == refreshed


def test_its_own_backends_its_errors_and_its_functions_are_untouched(results):
    assert results["own"].startswith("vllm_omni.")
    assert "Did you mean 'budget'" in results["unknown"]
    assert results["restored"]


@pytest.mark.parametrize("method", method_names().values())
def test_its_defaults_and_ours_agree_where_both_have_a_setting(method):
    from vllm_omni.diffusion.data import DiffusionCacheConfig

    theirs, ours = DiffusionCacheConfig(), config_class(method)()
    both = {f.name for f in dataclasses.fields(theirs)} & set(ours.field_names())
    assert [n for n in both if getattr(theirs, n) is not None and getattr(theirs, n) != getattr(ours, n)] == []
