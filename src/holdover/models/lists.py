"""The lists of blocks a transformer iterates over."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

# Lists of small helper modules that some models keep beside their blocks; they run live.
_NOT_BLOCKS = ("proj", "embed", "norm")


def block_lists(transformer: nn.Module) -> dict[str, nn.ModuleList]:
    """The direct children that hold blocks: ModuleLists, and the ModuleLists inside a ModuleDict, by attribute name.

    Deeper lists are internals of embedders and blocks.
    """
    return {name: blocks for name, blocks in _candidates(transformer) if len(blocks) and _holds_blocks(name)}


def _candidates(transformer: nn.Module) -> Iterator[tuple[str, nn.ModuleList]]:
    for name, child in transformer.named_children():
        if isinstance(child, nn.ModuleList):
            yield name, child
        elif isinstance(child, nn.ModuleDict):
            for key, inner in child.items():
                if isinstance(inner, nn.ModuleList):
                    yield f"{name}.{key}", inner


def _holds_blocks(name: str) -> bool:
    return not any(word in name for word in _NOT_BLOCKS)
