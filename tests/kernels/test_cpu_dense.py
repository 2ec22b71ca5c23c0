"""Dense weights that kernels read where they are, and several products of one input in one call."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, random

from compress.kernels import dispatch
from compress.kernels.cpu_dense import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.transforms.rounding import InputRounding
from compress.native.library import library
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]
NEAR = {torch.float32: 1e-5, torch.bfloat16: 1e-2}  # of the sizes of the terms, in the dtype of the output


def check(rows, width, weight_dtype, dtype, batch, bias, seed=0):
    weight, x = random(rows, width, seed=seed).to(weight_dtype), random(batch, width, seed=seed + 1).to(dtype)
    part, added = DensePart.of(weight), random(rows, seed=seed + 2).to(dtype) if bias else None
    expected = x.double() @ weight.double().T + (0 if added is None else added.double())
    actual = KERNEL.product(x, part, part.prepared(KERNEL), None, added)
    assert actual.dtype == dtype and actual.shape == expected.shape
    assert float((actual - expected).abs().max() if batch else 0) <= NEAR[dtype] * max(1.0, 3 * width**0.5)


@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 4, 5, 7, 8, 9, 13, 40])
def test_products_of_all_batch_sizes(chosen, weight_dtype, dtype, batch):
    check(50, 170, weight_dtype, dtype, batch, bias=True)


@settings(max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(1, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape(rows, width, weight_dtype, dtype, batch, bias, seed):
    check(rows, width, weight_dtype, dtype, batch, bias, seed)


def test_which_calls_the_kernel_computes():
    """Few rows, or a weight that torch would have to widen; gradients and other dtypes are left to torch."""
    narrow, wide = DensePart.of(random(20, 64).bfloat16()), DensePart.of(random(20, 64))
    assert KERNEL.supports(narrow, random(100, 64), None) and KERNEL.supports(wide, random(8, 64), None)
    assert not KERNEL.supports(wide, random(9, 64), None)
    assert KERNEL.supports(narrow, random(2, 64).bfloat16(), None)
    assert not KERNEL.supports(narrow, random(3, 64).bfloat16(), None)
    assert not KERNEL.supports(narrow, random(2, 64).half(), None)
    assert not KERNEL.supports(DensePart.of(random(20, 64).half()), random(2, 64), None)
    assert not KERNEL.supports(wide, random(2, 64), InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(wide, random(2, 64).requires_grad_(), None)
    assert not KERNEL.supports(DensePart.of(random(64, 20).T), random(2, 64), None)  # not row by row
    learned = DensePart.of(random(20, 64))
    learned.weight.requires_grad_()
    assert not KERNEL.supports(learned, random(2, 64), None)


def test_a_weight_is_shared_and_may_be_replaced():
    part, x = DensePart.of(random(20, 64)), random(1, 64)
    assert part.prepared(KERNEL).words.data_ptr() == part.weight.data_ptr()
    part.weight.mul_(2)
    torch.testing.assert_close(dispatch.linear(x, [part], None, None), x @ part.weight.T)
    part.weight.data = random(20, 64, seed=7)
    torch.testing.assert_close(dispatch.linear(x, [part], None, None), x @ part.weight.T)


def test_narrow_inputs_are_rounded_to_bfloat16_where_the_processor_multiplies_them(chosen):
    weight, x = random(50, 320).bfloat16(), random(30, 320, seed=1)
    part = DensePart.of(weight)
    part.narrow_inputs = True
    inputs = x.bfloat16() if chosen.endswith("_bf16") else x
    expected = inputs.double() @ weight.double().T
    torch.testing.assert_close(dispatch.linear(x, [part], None, None).double(), expected, rtol=1e-4, atol=1e-4)


def test_nan_stays_nan(chosen):
    for batch in (1, 8, 30):
        x = random(batch, 64)
        x[0, 3] = float("nan")
        actual = dispatch.linear(x, [DensePart.of(random(20, 64).bfloat16())], None, None)
        assert bool(actual[0].isnan().all()) and not bool(actual[1:].isnan().any())


def code_part(rows, grid="int4", group=32, symmetric=True, seed=0):
    return CodesPart.of(quantize(random(rows, 64, seed=seed), GRIDS[grid], group, symmetric))


@pytest.mark.parametrize("rounding", [None, InputRounding.of(GRIDS["int8"])])
@pytest.mark.parametrize("batch", [0, 1, 3, 40])
def test_products_in_one_call_are_those_of_several_calls(chosen, rounding, batch):
    """Also of weights whose inputs are prepared in different ways: zero points, groups, and lengths of codes."""
    parts = [
        code_part(50),
        code_part(7, seed=1),
        code_part(20, symmetric=False),
        code_part(33, group=16),
        code_part(16, "int8"),
        code_part(40, group="channel"),
        code_part(3, symmetric=False, seed=4),
    ]
    x, biases = (
        random(batch, 64, seed=9),
        [random(len(p.dense(torch.float32))) if i % 2 else None for i, p in enumerate(parts)],
    )
    actual = dispatch.linears(x, parts, rounding, biases)
    for y, part, bias in zip(actual, parts, biases, strict=True):
        assert torch.equal(y, dispatch.linear(x, [part], rounding, bias))


def test_products_that_no_kernel_computes_together():
    x = random(2, 64)
    assert dispatch.linears(random(64, 2).T, [code_part(5)], None, [None]) is None  # not contiguous
    assert dispatch.linears(x, [DensePart.of(random(5, 64))] * 2, None, [None] * 2) is None
    assert dispatch.linears(x, [code_part(5), DensePart.of(random(5, 64))], None, [None] * 2) is None
    with dispatch.plain_torch():
        assert dispatch.linears(x, [code_part(5)], None, [None]) is None


def test_the_library_checks_the_number_of_products():
    native, packed = library(), code_part(5).prepared(dispatch.kernel_for(code_part(5), random(1, 64), None))
    for count in (0, 9):
        many = ctypes.c_void_p * 9
        weights, empty = many(*[packed.address] * 9), many()
        assert native.compress_products(count, weights, 0, empty, empty, None, 1, 64, 0, 0, 8, 1, 1) == -1


def test_a_number_stands_for_a_weight_while_it_is_in_memory():
    layer, x = CompressedLinear(quantize(random(20, 64), GRIDS["int4"], 32), None), random(2, 64)
    handle, rows, *mode = dispatch.traced(layer.all_parts[0], x, None)
    with torch.no_grad():
        assert torch.equal(dispatch.traced_linear(x, None, handle, rows, *mode), layer(x))
        arguments = (x, None, handle, rows, *mode)
        torch.library.opcheck(
            torch.ops.compress.packed_linear, arguments, test_utils=("test_schema", "test_faketensor")
        )
        layer.all_parts[0].forget_prepared()
        with pytest.raises(KeyError):
            dispatch.traced_linear(x, None, handle, rows, *mode)
    assert dispatch.traced(layer.all_parts[0], x, None)[0] != handle


def test_what_cannot_be_traced_by_a_number():
    x = random(2, 64)
    static = InputRounding.of(GRIDS["int8"], torch.tensor([0.1]))
    assert dispatch.traced(code_part(5), x, static) is None
    assert dispatch.traced(code_part(5), x.half(), None) is None
