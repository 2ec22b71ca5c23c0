"""Products in integers of inputs that are rounded to int8 in the groups of the weight, and their memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import INT8, SETS, exact, near, part_of, random

from compress.kernels import dispatch
from compress.kernels.cpu import KERNEL
from compress.layers.parts.codes import CodesPart
from compress.layers.transforms.rounding import InputRounding
from compress.native.pages import CHUNK, PAGE, Pages
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")


@settings(max_examples=60)
@given(
    st.integers(1, 70),
    st.integers(1, 12),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([16, 32, 64, 128]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.sampled_from([0, 1, 2, 5, 8, 9, 33]),
    st.integers(0, 999),
)
def test_inputs_rounded_in_the_groups_of_the_weight(rows, groups, bits, group, symmetric, dtype, batch, seed):
    part = part_of(rows, groups * group, bits, group, symmetric, seed=seed)
    x, rounding = random(batch, groups * group, seed=seed + 1), InputRounding.of(INT8, group=group)
    x = (x * torch.logspace(0, 1, groups).repeat_interleave(group)).to(dtype)  # the scales differ
    bias = random(rows, seed=seed + 3).to(dtype)
    assert KERNEL.supports(part, x, rounding)
    assert near(dispatch.linear(x, [part], rounding, bias), exact(part, x, rounding, bias), dtype)


def test_groups_of_inputs_and_weight_that_differ_are_left_to_torch():
    x = random(3, 128)
    for part in (
        part_of(20, 128, 4, 64, True),
        part_of(20, 128, 4, "channel", True),
        part_of(20, 128, 4, 32, True, True),
    ):
        assert not KERNEL.supports(part, x, InputRounding.of(INT8, group=32))
    assert not KERNEL.supports(part_of(20, 126, 4, 7, True), random(3, 126), InputRounding.of(INT8, group=7))


def test_a_nan_in_a_group_reaches_the_outputs_of_its_row():
    part, x = part_of(20, 128, 4, 32, True), random(3, 128)
    x[1, 40] = torch.nan
    y = dispatch.linear(x, [part], InputRounding.of(INT8, group=32), None)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_each_instruction_set_rounds_in_groups(chosen, bits):
    part, rounding = part_of(50, 192, bits, 32, symmetric=bits % 2 == 0), InputRounding.of(INT8, group=32)
    for batch in (1, 3, 8, 20):
        x = random(batch, 192, seed=batch)
        assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), x.dtype)


@pytest.mark.parametrize("name", ["uint4", "uint4_k", "int6_k", "int4_signed"])
def test_grids_of_gguf_are_multiplied_in_integers(name):
    part = CodesPart.of(quantize(random(20, 512), GRIDS[name], 16 if name == "int6_k" else 32, not GRIDS[name].offset))
    x, rounding = random(3, 512, seed=1), InputRounding.of(INT8, group=part.scheme.group_size)
    assert KERNEL.supports(part, x, rounding)
    assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), x.dtype)


def test_tensors_stand_in_large_pages_side_by_side():
    pages = Pages()
    single, two = (pages.empty(3, 5, dtype=torch.float32) for _ in range(2))
    assert single.shape == (3, 5) and single.dtype == torch.float32
    assert two.data_ptr() - single.data_ptr() == 64 and single.data_ptr() % PAGE == 0
    single.fill_(1), two.fill_(2)
    assert float(single.sum()) == 15 and float(two.sum()) == 30
    large = pages.empty(CHUNK, dtype=torch.int32)
    assert large.untyped_storage().data_ptr() != single.untyped_storage().data_ptr() and large.data_ptr() % PAGE == 0
    for _ in range(9):
        last_result = pages.empty(CHUNK // 8, dtype=torch.uint8)
    assert last_result.untyped_storage().data_ptr() != single.untyped_storage().data_ptr()  # the next chunk
    assert pages.empty(0, 16, dtype=torch.float32).numel() == 0


def test_no_memory_for_pages(monkeypatch):
    def none(*_, **__):
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("compress.native.pages.mmap.mmap", none)
    with pytest.raises(MemoryError, match="can't allocate memory: 69206016 bytes for packed weights"):
        Pages().empty(2 * CHUNK, dtype=torch.uint8)
