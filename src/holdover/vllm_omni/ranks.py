"""The ranks one request runs over, read off vLLM-Omni's parallel state."""

from __future__ import annotations

import importlib
from typing import Any

from ..errors import EnableError
from ..runtime.ranks import Ranks

STATE = "vllm_omni.diffusion.distributed.parallel_state"
TENSOR_STATE = "vllm.distributed.parallel_state"


def current_ranks() -> Ranks:
    """The groups vLLM-Omni has set up; this process alone where it has set up none.

    Of a step's guidance branches the CFG group's rank `i` computes the `i`-th, so the branch is the rank's.
    """
    state: Any = importlib.import_module(STATE)
    if not state.model_parallel_is_initialized():
        return Ranks()
    stages = state.get_pipeline_parallel_world_size()
    if stages > 1:
        raise EnableError(
            f"The transformer is split into {stages} pipeline stages: no rank sees the whole of it, so no step can be "
            "held. Start with --pipeline-parallel-size 1, or without --cache-backend."
        )
    tensor: Any = importlib.import_module(TENSOR_STATE)
    return Ranks(
        cfg=state.get_cfg_group().device_group,
        sequence=state.get_sp_group().device_group,
        tensor=tensor.get_tp_group().device_group,
    )
