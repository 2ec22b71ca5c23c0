"""Kernels of weights that are looked up in codebooks, against the dense weight."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.kernels import dispatch
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codebook import CodebookPart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.grids import GRIDS

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the sizes of the terms, in the dtype of the output


def part_of(rows, runs, bits, length=1, count=1, own_values=True, scaled=False, dtype=torch.float32, seed=0):
    books = random(rows if own_values else 1, count, 2**bits, length, seed=seed).to(dtype)
    generator = torch.Generator().manual_seed(seed + 1)
    indices = torch.randint(2**bits, (rows, runs, count), generator=generator)
    return CodebookPart.of(indices, books, random(rows, seed=seed + 2).to(dtype) if scaled else None)


def check(part, batch, dtype, bias=False, seed=0):
    rows, width = part.shape
    x, added = random(batch, width, seed=seed).to(dtype), random(rows, seed=seed + 3).to(dtype) if bias else None
    assert KERNEL.supports(part, x, None)
    weight = part.dense(torch.float32).double()
    expected = x.double() @ weight.T + (0 if added is None else added.double())
    actual = KERNEL.product(x, part, part.prepared(KERNEL), None, added)
    assert actual.dtype == dtype and actual.shape == expected.shape
    size = float(weight.abs().max()) * max(1.0, 3 * width**0.5)
    assert float((actual - expected).abs().max() if batch else 0) <= NEAR[dtype] * max(1.0, size)


SHAPES = [
    (4, 1, 1, True),  # SqueezeLLM: a dictionary per row
    (3, 1, 1, True),
    (3, 1, 1, False),  # GOBO: one dictionary
    (5, 1, 1, False),
    (8, 1, 1, True),
    (8, 4, 1, False),  # AQLM
    (8, 8, 2, False),
    (6, 2, 3, False),
    (8, 16, 1, False),
    (4, 4, 1, False),
    (4, 1, 2, True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, 8, 9, 40])
def test_products_of_all_kinds_of_books_and_batch_sizes(chosen, batch, dtype):
    for bits, length, count, own_values in SHAPES:
        check(part_of(50, 176 // length, bits, length, count, own_values, scaled=length > 1), batch, dtype, bias=True)


@settings(max_examples=80)
@given(
    st.sampled_from(SHAPES),
    st.integers(1, 70),
    st.integers(1, 90),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape(shape, rows, runs, dtype, stored, batch, scaled, seed):
    check(part_of(rows, runs, *shape, scaled, stored, seed), batch, dtype, bias=scaled, seed=seed)


def test_which_calls_the_kernel_computes():
    part, x = part_of(20, 16, 4), random(2, 16)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    assert not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    assert not KERNEL.supports(part_of(20, 16, 4, length=3), random(2, 48), None)


def test_indexes_of_four_and_eight_bits_are_not_copied():
    for part in (part_of(20, 64, 4), part_of(20, 64, 8, 4, 2, own_values=False)):
        assert part.prepared(KERNEL).words.data_ptr() == part.words.data_ptr()
    assert part_of(20, 64, 3).prepared(KERNEL).words.shape == (20, 32)


def test_nan_stays_nan(chosen):
    part = part_of(20, 64, 4)
    for batch in (1, 8, 30):
        x = random(batch, 64)
        x[0, 3] = float("nan")
        actual = dispatch.linear(x, [part], None, None)
        assert bool(actual[0].isnan().all()) and not bool(actual[1:].isnan().any())


def test_the_library_checks_the_sizes_of_books():
    wrong = {"entries": 3, "length": 3, "books": 0, "tables": 7, "stride": 1, "table": None}
    for name, value in wrong.items():
        packed = part_of(20, 64, 8, 4, own_values=False).prepared(KERNEL)
        setattr(packed.weight, name, value)
        with pytest.raises(RuntimeError, match="do not fit together"):
            product(random(1, 256), packed, None)
    assert ctypes.sizeof(packed.weight) % 8 == 0


def test_a_compiled_layer_calls_the_kernel():
    layer = CompressedLinear(part_of(32, 32, 4), None)
    x = random(1, 32)
    with torch.no_grad():
        expected = layer(x)
        compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
