"""The block types of GGUF files: codes with their scales, for 32 weights or, in k-quants and i-quants, for 256."""

from __future__ import annotations

from compress.checkpoint.blocks.block import BlockType
from compress.checkpoint.blocks.i_quants import I_QUANTS
from compress.checkpoint.blocks.k_quants import K_QUANTS
from compress.checkpoint.blocks.of_32 import OF_32

BLOCK_TYPES: dict[str, BlockType] = {block.name: block for block in (*OF_32, *K_QUANTS, *I_QUANTS)}
"""Every block type by its name in llama.cpp."""


def block_type_of(grid: str) -> BlockType | None:
    """The block type that stores codes of a grid, or None."""
    return next((block for block in BLOCK_TYPES.values() if grid in block.grids), None)
