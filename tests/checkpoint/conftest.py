"""Codes to store."""

import pytest
import torch

from compress.layers.parts.codes import CodesPart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


@pytest.fixture(scope="session")
def make():
    """make(grid, shape, group_size, symmetric, seed, dtype) -> CodesPart of a random weight, scales in dtype."""

    def build(grid="int4", shape=(6, 64), group_size=32, symmetric=True, seed=0, dtype=torch.float32):
        weight = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        codes = quantize(weight, GRIDS[grid], group_size, symmetric, dtype=dtype)
        return CodesPart.of(codes).in_storage(dtype)

    return build


@pytest.fixture(scope="session")
def same():
    """same(a, b): every tensor and every fact of two parts is equal."""

    def check(a, b):
        for name in ("words", "scale", "zero", "group_index", "shared"):
            left, right = getattr(a, name), getattr(b, name)
            assert (left is None) == (right is None), name
            assert left is None or (left.dtype == right.dtype and torch.equal(left, right)), name
        assert (a.grid, a.group_size, a.shape) == (b.grid, b.group_size, b.shape)
        assert a.sha256() == b.sha256()

    return check
