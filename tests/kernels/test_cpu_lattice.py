"""Kernels of points of a lattice, and of rotated rows, against the dense weight."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, check, check_compiled, check_nan, not_contiguous, random

from compress.kernels import dispatch, reference
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.lattice import LatticePart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.hadamard import exists, largest_block, signs_of
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.lattice import count_bytes

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]


def part_of(rows, runs, bits=2, rotated=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (rows, runs, count_bytes(bits)), generator=generator, dtype=torch.uint8)
    return LatticePart.of(codes, (random(rows, seed=seed) * 0.02).to(dtype), bits, rotated, seed)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_every_code_stands_for_its_point(chosen, bits):
    """A product with the identity gives the decoded weights; all 2^16 points of E8P in one weight."""
    first_result, second = torch.arange(256).repeat_interleave(256), torch.arange(256).repeat(256)
    codes = torch.stack([first_result, second, second.flip(0), first_result.roll(7)], dim=1)[:, : count_bytes(bits)].to(
        torch.uint8
    )
    part = LatticePart.of(codes.view(4096, 16, -1), torch.ones(4096), bits)
    x = torch.eye(128)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    actual = torch.cat([dispatch.linear(piece, [part], None, None) for piece in (x[:1], x[1:4], x[4:12], x[12:])])
    expected = part.decoded().T
    assert torch.equal(actual, expected) if bits == 2 else float((actual - expected).abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, 8, 9, 40])
def test_each_instruction_set_and_batch(chosen, batch, dtype):
    for bits in (2, 3, 4):
        check(part_of(50, 23, bits), random(batch, 184, seed=batch).to(dtype), random(50, seed=1).to(dtype))


@settings(max_examples=80)
@given(
    st.integers(1, 70),
    st.integers(1, 40),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape(rows, runs, bits, dtype, stored, batch, biased, seed):
    part = part_of(rows, runs, bits, dtype=stored, seed=seed)
    check(part, random(batch, runs * 8, seed=seed + 1).to(dtype), random(rows, seed=2).to(dtype) if biased else None)


@settings(max_examples=60)
@given(
    st.sampled_from([12, 16, 20, 24, 48, 64, 96, 112]),
    st.integers(1, 3),
    st.integers(1, 20),
    st.sampled_from([2, 3, 4]),
    st.sampled_from(DTYPES),
    st.integers(0, 10),
    st.booleans(),
    st.integers(0, 99),
)
def test_rotated_rows(order, times, runs, bits, dtype, batch, biased, seed):
    part = part_of(order * times, runs, bits, rotated=order, seed=seed)
    x = random(batch, runs * 8, seed=seed).to(dtype)
    assert dispatch.kernel_name(part, x, None) == "cpu_rotated"
    check(part, x, random(order * times, seed=2).to(dtype) if biased else None)


@pytest.mark.parametrize("rows", [50, 48])
def test_inputs_that_are_not_contiguous(rows):
    part = part_of(rows, 8, rotated=48 if rows == 48 else None)
    for x in not_contiguous():
        check(part, x)


def test_more_threads_than_rows():
    original = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        check(part_of(3, 512), random(1, 4096))
        check(part_of(4, 512, rotated=4), random(2, 4096))
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize("rotated", [None, 16])
def test_nan_reaches_the_outputs_of_its_row_alone(chosen, rotated):
    check_nan(part_of(32, 9, 3, rotated))


def test_which_calls_the_kernels_compute():
    part, x = part_of(20, 4), random(2, 32)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    assert not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    x = x.detach()
    assert dispatch.kernel_name(part_of(20, 4, rotated=20), x, None) == "cpu_rotated"
    assert exists(1032) and dispatch.kernel_name(part_of(1032, 4, rotated=1032), x, None) == "torch"  # 1032 = 1031 + 1
    with dispatch.plain_torch():
        assert torch.equal(dispatch.linear(x, [part], None, None), reference.linear(x, [part], None, None))


def test_codes_are_not_copied():
    for bits in (2, 3, 4):
        part = part_of(20, 8, bits)
        assert part.prepared(KERNEL).words.data_ptr() == part.codes.data_ptr()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("entries", 255),
        ("length", 4),
        ("books", 3),
        ("tables", 2),
        ("stride", 15),
        ("table", None),
        ("codec", 17),
        ("codec", 19),
        ("groups", 2),
        ("width", 68),
        ("units", 1),
        ("zero_point", 1.0),
    ],
)
def test_the_library_checks_the_sizes_of_a_weight(name, value):
    packed = part_of(20, 8).prepared(KERNEL)
    setattr(packed.weight, name, value)
    with pytest.raises(RuntimeError, match="do not fit together"):
        product(random(1, 64), packed, None)


@pytest.mark.parametrize("rotated", [None, largest_block(40)])
def test_a_compiled_layer_calls_the_kernel(rotated):
    check_compiled(CompressedLinear(part_of(40, 4, 3, rotated), random(40)), random(2, 32), rotated is not None)


def test_signs_of_rotated_rows_are_those_of_the_part():
    """Worked out by hand: H of order 2 over its root, on the outputs of two rows."""
    part = part_of(2, 1, rotated=2)
    x = random(1, 8)
    (a, b), signs = (x @ part.decoded().T * part.scale)[0], signs_of(2, 0)
    expected = torch.stack([a + b, a - b]) / 2**0.5 * signs
    torch.testing.assert_close(dispatch.linear(x, [part], None, None)[0], expected)
