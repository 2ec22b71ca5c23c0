"""Kernels of outlier-victim pairs against the dense weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, check, check_compiled, check_nan, random

from compress.kernels import dispatch
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.pairs import PairsPart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.pairs import fit, quantized

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]


def part_of(rows, width, group="channel", dtype=torch.float32, seed=0):
    weight = random(rows, width, seed=seed)
    weight.view(-1)[::13] *= 9  # outliers
    scale = fit(weight, group, dtype)
    return PairsPart.of(quantized(weight, scale.float(), group), scale, group)


def test_every_byte_stands_for_its_pair(chosen):
    """Also pairs that no pass writes: two victims, and an outlier of zero."""
    part = PairsPart.of(torch.arange(256)[:, None] // torch.tensor([1, 16]) % 16, torch.ones(256, 1), "channel")
    actual = dispatch.linear(torch.eye(2), [part], None, None)
    assert torch.equal(actual, part.dense(torch.float32).T)
    assert (
        actual[:, 0x87].tolist() == [96, 0]
        and actual[:, 0x98].tolist() == [0, -12]
        and actual[:, 0xF1].tolist() == [1, -1]
    )


@pytest.mark.few(17, slow=17)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, 8, 9, 40])
def test_each_instruction_set_batch_and_group(chosen, batch, dtype):
    for group in ("channel", "tensor", 16, 48, 96):
        part = part_of(50, 192, group)
        assert KERNEL.supports(part, random(1, 192), None)
        check(part, random(batch, 192, seed=batch).to(dtype), random(50, seed=1).to(dtype))


@settings(max_examples=60)
@given(
    st.integers(1, 40),
    st.integers(1, 60),
    st.sampled_from(["channel", "tensor"]),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(0, 12),
    st.integers(0, 99),
)
def test_any_shape(rows, pairs, group, dtype, stored, batch, seed):
    part = part_of(rows, 2 * pairs, group, stored, seed)
    check(part, random(batch, 2 * pairs, seed=seed).to(dtype))


def test_which_calls_the_kernel_computes():
    part, x = part_of(20, 64), random(2, 64)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    assert dispatch.kernel_name(part_of(20, 64, 8), x, None) == "torch"  # groups that are no whole vectors
    assert not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    assert part.prepared(KERNEL).words.data_ptr() == part.words.data_ptr()


def test_nan_reaches_the_outputs_of_its_row_alone(chosen):
    check_nan(part_of(20, 64, 16))


@pytest.mark.parametrize(
    ("name", "value"), [("groups", 3), ("group", 8), ("stride", 31), ("entries", 100), ("units", 1)]
)
def test_the_library_checks_the_sizes_of_a_weight(name, value):
    packed = part_of(20, 64, 16).prepared(KERNEL)
    setattr(packed.weight, name, value)
    with pytest.raises(RuntimeError, match="do not fit together"):
        product(random(1, 64), packed, None)


def test_a_compiled_layer_calls_the_kernel():
    check_compiled(CompressedLinear(part_of(40, 32), random(40)), random(2, 32), rotated=False)
