"""The groups of processes that one request runs over."""

import torch.distributed
import vllm.distributed.parallel_state as tensor_state

_CFG = _SP = _PP = None


class GroupCoordinator:
    """The group among these in which this process is."""

    def __init__(self, group_ranks):
        for ranks in group_ranks:
            group = torch.distributed.new_group(ranks, backend="gloo")
            if torch.distributed.get_rank() in ranks:
                self.world_size, self.rank_in_group = len(ranks), ranks.index(torch.distributed.get_rank())
                self.device_group = group


def initialize_model_parallel(cfg=1, sp=1, pp=1):
    """One of the three may be as many as there are processes."""
    global _CFG, _SP, _PP
    world = list(range(torch.distributed.get_world_size()))
    alone = [[rank] for rank in world]
    _CFG, _SP, _PP = (GroupCoordinator([world] if size > 1 else alone) for size in (cfg, sp, pp))
    tensor_state._TP = GroupCoordinator(alone)


def model_parallel_is_initialized():
    return None not in (_CFG, _SP, _PP, tensor_state._TP)


def get_cfg_group():
    assert _CFG is not None, "there is no CFG group"
    return _CFG


def get_sp_group():
    assert _SP is not None, "there is no sequence parallel group"
    return _SP


def get_classifier_free_guidance_rank():
    return get_cfg_group().rank_in_group


def get_classifier_free_guidance_world_size():
    return get_cfg_group().world_size


def get_pipeline_parallel_world_size():
    assert _PP is not None, "there are no pipeline stages"
    return _PP.world_size
