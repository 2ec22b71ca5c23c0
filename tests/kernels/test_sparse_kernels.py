"""Sparse layers: the reference is the product with the dense masked weight, made in parts; kernels of their own."""

from unittest.mock import patch

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from masks import random_mask, regular_mask
from tolerances import near

from compress.kernels import dispatch, reference
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse import positions as sparse
from compress.numerics.sparse.positions import PackedMask


def pruned(mask, grid, group_size, symmetric, seed=0):
    weight = torch.randn(mask.shape, generator=torch.Generator().manual_seed(seed))
    return CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric, mask=mask))


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 90), st.sampled_from([1, 64, 1 << 20]), st.integers(0, 99))
def test_the_reference_is_the_product_with_the_masked_weight(rows, width, part, seed):
    mask = random_mask(rows, width, 0.4, seed)
    x = torch.randn(3, 2, width, generator=torch.Generator().manual_seed(seed))
    bias = torch.arange(float(rows))
    weight = torch.randn(rows, width) * mask
    full = pruned(mask, "int3", 7, False, seed)
    with patch.object(sparse, "PART", part):
        floats = SparsePart.of(DensePart.of(weight), PackedMask.of(mask))
        assert near(dispatch.linear(x, [floats], None, bias), torch.nn.functional.linear(x, weight, bias))
        only = SparsePart.of(full, PackedMask.of(mask))
        assert near(dispatch.linear(x, [only], None, bias), dispatch.linear(x, [full], None, bias))


def test_temporaries_are_those_of_a_part(monkeypatch):
    """Apart from the dense weight, no tensor has more elements than a part and its kept weights."""
    mask = regular_mask(512, 256, 2, 4)
    only = SparsePart.of(pruned(mask, "int3", 32, False), PackedMask.of(mask))
    monkeypatch.setattr(sparse, "PART", 1024)
    expected = only.dense(torch.float32)

    class Sizes(torch.overrides.TorchFunctionMode):
        largest = 0

        def __torch_function__(self, function, types, arguments=(), options=None):
            actual = function(*arguments, **(options or {}))
            name = getattr(function, "__name__", "")
            if isinstance(actual, torch.Tensor) and not actual._is_view() and name not in ("empty", "__get__"):
                self.largest = max(self.largest, actual.numel())
            return actual

    with Sizes() as sizes:
        actual = only.dense(torch.float32)
    assert torch.equal(actual, expected)
    assert 0 < sizes.largest <= 512 * 8  # the scales are that many; the weight has 131072


class ForCodes:
    def supports(self, part, x, rounding):
        return part.kind == "codes"

    def prepare(self, part):
        return None

    def product(self, x, part, prepared, rounding, bias):
        return torch.full((x.shape[0], part.shape[0]), 7.0)


def test_kernels_for_whole_codes_never_see_kept_ones(monkeypatch):
    mask = regular_mask(3, 8, 2, 4)
    full = pruned(mask, "int4", 4, True)
    only, x = SparsePart.of(full, PackedMask.of(mask, (2, 4))), torch.ones(2, 8)
    monkeypatch.setattr(dispatch, "KERNELS", [ForCodes()])
    assert bool((dispatch.linear(x, [full], None, None) == 7).all())
    assert near(dispatch.linear(x, [only], None, None), reference.linear(x, [full], None, None))
