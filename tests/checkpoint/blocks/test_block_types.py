"""The block types of GGUF files, against the gguf package of the format's owners."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from compress.checkpoint.blocks import BLOCK_TYPES, block_type_of
from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

CASES = [(block.name, grid) for block in BLOCK_TYPES.values() for grid in block.grids]


def part_of(name: str, grid: str, rows: int, blocks: int, seed: int, search: str, scale: float) -> CodesPart:
    """A random weight on a grid, with some groups of zeros and some of equal values."""
    block = BLOCK_TYPES[name]
    weight = torch.randn(rows, blocks * block.size, generator=torch.Generator().manual_seed(seed)) * scale
    weight[0, : block.group] = 0
    weight[-1, -block.group :] = scale
    kind = GRIDS[grid]
    return CodesPart.of(quantize(weight, kind, block.group, not kind.offset, search, dtype=torch.float16))


@settings(max_examples=60)
@given(
    case=st.sampled_from(CASES),
    rows=st.integers(1, 5),
    blocks=st.integers(1, 3),
    seed=st.integers(0, 1 << 16),
    search=st.sampled_from(["absmax", "mse"]),
    scale=st.sampled_from([1e-7, 0.02, 1.0, 300.0]),
)
def test_the_owners_dequantizer_reads_our_weight_bit_for_bit(
    case: tuple[str, str], rows: int, blocks: int, seed: int, search: str, scale: float
) -> None:
    name, grid = case
    part = part_of(name, grid, rows, blocks, seed, search, scale)
    stored = BLOCK_TYPES[name].encode(part)
    assert stored.shape == (rows, BLOCK_TYPES[name].row_bytes(part.shape[1]))
    theirs = dequantize(stored.numpy(), gguf.GGMLQuantizationType[name])
    assert torch.equal(torch.from_numpy(theirs), part.dense(torch.float32))


@pytest.mark.parametrize(("name", "grid"), CASES)
def test_decode_is_the_inverse_of_encode(name: str, grid: str) -> None:
    part = part_of(name, grid, 4, 2, 1, "mse", 0.05).in_storage(torch.float16)
    block = BLOCK_TYPES[name]
    back = block.decode(block.encode(part), part.shape[1], GRIDS[grid])
    assert back.sha256() == part.sha256()


@pytest.mark.parametrize("name", list(BLOCK_TYPES))
def test_any_bytes_decode_as_the_owners_do(name: str) -> None:
    """Also bytes that our encoder never writes, such as negative scales; NaN and infinite scales are left out."""
    block, kind = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    stored = torch.randint(0, 256, (64, block.size_bytes), dtype=torch.uint8, generator=torch.manual_seed(0))
    theirs = torch.from_numpy(dequantize(stored.numpy(), kind))
    finite = theirs.isfinite().all(1)
    ours = block.decode(stored, block.size).dense(torch.float32)
    assert int(finite.sum()) > 30
    assert torch.equal(ours[finite], theirs[finite])
    again = block.encode(block.decode(stored, block.size))
    assert torch.equal(again[finite], stored[finite])  # a NaN may change its digits


@pytest.mark.parametrize("name", list(BLOCK_TYPES))
def test_sizes_are_those_of_the_owner(name: str) -> None:
    block, kind = BLOCK_TYPES[name], gguf.GGMLQuantizationType[name]
    assert (block.size, block.size_bytes) == gguf.GGML_QUANT_SIZES[kind]
    assert block_type_of(block.grids[0]) is block
    assert block.file_type in {int(member) for member in gguf.LlamaFileType if name in member.name}
