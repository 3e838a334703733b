"""One request over two processes, on gloo: the branch is the rank's, and the image is that of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).parent
METHODS = ["holdover_mag_cache", "holdover_tea_cache", "holdover_plan"]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two generated and decided; a rank that hangs is an error."""
    folder = tmp_path_factory.mktemp("ranks")
    paths = (HERE / "standin", HERE, HERE.parent, *filter(None, [os.environ.get("PYTHONPATH")]))
    path = os.pathsep.join(map(str, paths))
    environment = os.environ | {"PYTHONPATH": path}
    words = [sys.executable, str(HERE / "ranks_script.py"), str(folder)]
    running = [
        subprocess.Popen([*words, rank], stderr=subprocess.PIPE, text=True, env=environment) for rank in ("0", "1")
    ]
    try:
        for process in running:
            _, errors = process.communicate(timeout=400)
            assert process.returncode == 0, errors
    finally:
        for process in running:
            process.kill()
    return [torch.load(folder / f"{rank}.pt") for rank in ("0", "1")]


@pytest.mark.parametrize("name", METHODS)
def test_guidance_over_two_ranks_generates_what_one_process_generates(ranks, name):
    alone = ranks[0]["alone"][name]
    assert "h" in "".join(alone["decisions"].values())
    for branch, rank in zip("12", ranks, strict=True):
        assert rank["cfg"][name]["decisions"] == {branch: alone["decisions"][branch]}
        assert torch.equal(rank["cfg"][name]["image"], alone["image"])


@pytest.mark.parametrize("name", METHODS)
def test_ranks_that_share_tokens_decide_as_one(ranks, name):
    alone = ranks[0]["alone"][name]
    for rank in ranks:
        assert rank["sp"][name]["decisions"] == alone["decisions"]
        assert torch.equal(rank["sp"][name]["image"], alone["image"])


def test_a_transformer_split_into_stages_is_refused(ranks):
    for rank in ranks:
        assert "split into 2 pipeline stages" in rank["pp"]
        assert "--pipeline-parallel-size 1" in rank["pp"]
