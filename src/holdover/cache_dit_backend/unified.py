"""One block for each list of an adapter, of a class of one's own."""

from __future__ import annotations

from typing import Any

from cache_dit.caching import BlockAdapter
from torch import nn


def unified_blocks(blocks_cls: type[nn.Module], block_adapter: BlockAdapter) -> list[dict[str, nn.ModuleList]]:
    """What `collect_unified_blocks` returns, with `blocks_cls` for every list."""
    BlockAdapter.assert_normalized(block_adapter)
    lists = zip(
        block_adapter.transformer,
        block_adapter.blocks,
        block_adapter.blocks_name,
        block_adapter.unique_blocks_name,
        block_adapter.forward_pattern,
        strict=True,
    )
    return [
        {
            context: nn.ModuleList([_one(blocks_cls, block_adapter, transformer, blocks, (name, context, pattern))])
            for blocks, name, context, pattern in zip(*of_one, strict=True)
        }
        for transformer, *of_one in lists
    ]


def _one(
    blocks_cls: type[nn.Module], adapter: BlockAdapter, transformer: nn.Module, blocks: Any, named: tuple[str, str, Any]
) -> nn.Module:
    name, context, pattern = named
    return blocks_cls(
        blocks,
        transformer=transformer,
        forward_pattern=pattern,
        check_forward_pattern=adapter.check_forward_pattern,
        check_num_outputs=adapter.check_num_outputs,
        cache_prefix=name,
        cache_context=context,
        context_manager=adapter.pipe._context_manager,
    )
