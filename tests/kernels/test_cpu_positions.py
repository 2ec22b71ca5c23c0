"""Kernels of single weights against the dense weight."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, check, check_compiled, exact, near, not_contiguous, part_of, random

from compress.kernels import dispatch
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.outliers import OutliersPart, OutliersScheme
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.grids import GRIDS

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]


def weights_of(rows, width, share=0.1, dtype=torch.float32, seed=0):
    chosen = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < share
    chosen[0, -1] = True
    return OutliersPart.of_positions(random(rows, width, seed=seed).to(dtype), chosen)


def test_each_weight_is_multiplied_at_its_place(chosen):
    """By hand: weight 2 at row 1, column 0, and 3 and 5 in row 2."""
    stored = {
        "columns": torch.tensor([0, 0, 2]),
        "rows": torch.tensor([0, 0, 1, 3, 3]),
        "values": torch.tensor([2.0, 3, 5]),
    }
    part = OutliersPart(
        OutliersScheme(3, "position"), (4, 3), {n: t if n == "values" else t.int() for n, t in stored.items()}
    )
    actual = dispatch.linear(torch.tensor([[1.0, 10, 100], [7, 8, 9]]), [part], None, torch.tensor([0.5, 0, 0, 0]))
    assert actual.tolist() == [[0.5, 2, 503, 0], [0.5, 14, 66, 0]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 2, 3, 4, 5, 16, 17, 40])
def test_each_instruction_set_and_batch(chosen, batch, dtype):
    for share, stored in ((0.0, torch.float32), (0.02, torch.bfloat16), (0.5, torch.float32)):
        part = weights_of(50, 192, share, stored)
        assert KERNEL.supports(part, random(1, 192), None)
        check(part, random(batch, 192, seed=batch).to(dtype), random(50, seed=1).to(dtype))


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(2, 100),
    st.floats(0, 1),
    st.sampled_from([*DTYPES, torch.float16]),
    st.sampled_from(DTYPES),
    st.integers(0, 20),
    st.integers(0, 99),
)
def test_any_shape(rows, width, share, stored, dtype, batch, seed):
    check(weights_of(rows, width, share, stored, seed), random(batch, width, seed=seed).to(dtype))


def test_inputs_that_are_not_contiguous():
    for x in not_contiguous():
        check(weights_of(20, 64), x)


def test_more_threads_than_tiles_give_the_same_bits():
    part, x, original = weights_of(2000, 300, 0.2), random(40, 300), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = dispatch.linear(x, [part], None, None)
        torch.set_num_threads(7)
        assert torch.equal(dispatch.linear(x, [part], None, None), expected)
    finally:
        torch.set_num_threads(original)


def test_which_calls_the_kernel_computes():
    part, x = weights_of(20, 64), random(2, 64)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    columns = OutliersPart.of_columns(torch.tensor([3]), random(20, 1), 64)
    assert not KERNEL.supports(columns, x, None) and not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    prepared = part.prepared(KERNEL)
    assert prepared.words.data_ptr() == part.values.data_ptr() and prepared.order.data_ptr() == part.columns.data_ptr()


def test_beside_codes_whose_inputs_are_rounded():
    """The codes are multiplied by integers, the single weights by what these stand for."""
    parts, rounding, x = (
        [part_of(40, 64, 4, 32, True), weights_of(40, 64)],
        InputRounding.of(GRIDS["int8"]),
        random(5, 64),
    )
    actual = dispatch.linear(x, parts, rounding, None)
    assert near(actual, sum(exact(part, x, rounding, None) for part in parts), torch.float32)


@pytest.mark.parametrize(("name", "index", "value"), [("columns", 0, 64), ("columns", 0, -1), ("rows", 20, 10**6)])
def test_a_weight_outside_of_the_layer_is_an_error(name, index, value):
    part = weights_of(20, 64, 0.5)
    part.tensors()[name][index] = value
    with pytest.raises(ValueError, match=f"weight_{name}|weight.{name}"):
        dispatch.linear(random(1, 64), [part], None, None)


STARTS = [
    [0, 2**31, 2**32, 2],
    [0, -1, 1, 2],
    [0, 2, 1, 2],
    [1, 1, 2, 2],
    [0, 1, 2, 3],
    [0, 2**62, -(2**62), 2],
    [0, 1, 2],
]


@pytest.mark.parametrize("starts", STARTS)
def test_the_library_refuses_rows_that_begin_elsewhere(starts):
    packed = weights_of(3, 64).prepared(KERNEL)
    held = {"words": torch.ones(1, 2), "order": torch.tensor([0, 63], dtype=torch.int32)}
    right = replace(packed, **held, offsets=torch.tensor([0, 1, 2, 2]))
    assert product(torch.ones(1, 64), right, None).tolist() == [[1.0, 1.0, 0.0]]
    with pytest.raises(ValueError, match="outside of it|do not fit together"):
        product(torch.ones(1, 64), replace(right, offsets=torch.tensor(starts)), None)


@pytest.mark.parametrize("columns", [[0, 64], [-1, 0], [0, 2**31 - 1], [-(2**31), 0], [0], [0, 1, 2]])
def test_the_library_refuses_columns_outside_of_a_weight(columns):
    held = {"words": torch.ones(1, 2), "offsets": torch.tensor([0, 1, 2, 2])}
    wrong = replace(weights_of(3, 64).prepared(KERNEL), **held, order=torch.tensor(columns, dtype=torch.int32))
    with pytest.raises(ValueError, match="outside of it|do not fit together"):
        product(torch.ones(1, 64), wrong, None)


@pytest.mark.parametrize(("name", "value"), [("groups", 3), ("units", 1), ("order", None), ("offsets", None)])
def test_the_library_checks_the_sizes_of_a_weight(name, value):
    packed = weights_of(20, 64).prepared(KERNEL)
    setattr(packed.weight, name, value)
    with pytest.raises(RuntimeError, match="do not fit together"):
        product(random(1, 64), packed, None)


def test_a_nan_reaches_the_outputs_that_have_a_weight_for_its_column(chosen):
    part = weights_of(20, 64, 0.3)
    for batch in (1, 4, 30):
        x = random(batch, 64)
        x[0, 5] = torch.nan
        actual = dispatch.linear(x, [part], None, None)
        assert torch.equal(actual[0].isnan(), part.dense(torch.float32)[:, 5] != 0) and not bool(
            actual[1:].isnan().any()
        )


def test_a_compiled_layer_calls_the_kernel():
    layer = CompressedLinear([part_of(40, 32, 4, 16, True), weights_of(40, 32)], random(40))
    check_compiled(layer, random(2, 32), rotated=False)
