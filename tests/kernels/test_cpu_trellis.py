"""Kernels of paths through a trellis, also of rotated rows, against the dense weight."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import SETS, check, check_compiled, check_nan, not_contiguous, random

import compress
from compress.kernels import dispatch, reference
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL
from compress.layers.linear import CompressedLinear
from compress.layers.parts.trellis import BITS, TrellisPart, TrellisScheme
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.hadamard import largest_block, signs_of
from compress.numerics.quant.gaussian_codes import CODES, DEVIATION, length_of, values_of
from compress.numerics.quant.grids import GRIDS
from compress.passes.quantize.qtip import QTIP

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")

DTYPES = [torch.float32, torch.bfloat16]
TILES = [(16, 16), (32, 8), (8, 8), (4, 32), (1, 16), (16, 4), (2, 12), (8, 2), (3, 64), (1, 8)]


def part_of(
    rows, columns, bits=2, states=12, code="3inst", tile=(16, 16), rotated=None, dtype=torch.float32, seed=0, codes=None
):
    """Random walks; rows, columns: how many tiles. codes: of the tiles."""
    scheme = TrellisScheme(bits, states, code, *tile, rotated)
    shape = rows * tile[0], columns * tile[1]
    generator = torch.Generator().manual_seed(seed)
    if codes is None:
        codes = torch.randint(256, (rows, columns * scheme.tile_bytes), generator=generator, dtype=torch.uint8)
    stored = {"codes": codes, "scale": (random(shape[0], seed=seed) * 0.02).to(dtype)}
    if code == "hyb":
        stored["table"] = random(512, 2, seed=seed + 1).to(dtype)
    if rotated is not None:
        stored["signs"] = signs_of(shape[0], seed)
    return TrellisPart(scheme, shape, stored)


def suited(bits, code, tile):
    """The bits, or whole ones, where a state has one weight or where bits of a tile are no bytes."""
    return math.ceil(bits) if length_of(code) == 1 or tile[0] * tile[1] % 16 else bits


def decoded(part):
    """The weights that the kernel reads: products with the identity, of one row, some, and as many as fill panels."""
    x = torch.eye(part.shape[1])
    pieces = x.split([1, 3, 8, len(x) - 12])
    return torch.cat([dispatch.linear(piece, [part], None, None) for piece in pieces]).T


def check_decoded(part):
    """Bit for bit. The factor of 1mad is in the scales of the kernel, which reads sums of bytes."""
    step = DEVIATION if part.scheme.code == "1mad" else 1
    part.scale.fill_(step)
    expected = part.decoded() * step
    assert torch.equal(decoded(part), expected.round() if step != 1 else expected)


@pytest.mark.parametrize("code", CODES)
def test_every_state_has_its_value(chosen, code):
    """All 2^16 states, each at the first place of a tile."""
    states = torch.arange(2**16)
    remainder = torch.randint(256, (2**16, 2), generator=torch.Generator().manual_seed(0))
    codes = torch.cat([states[:, None] >> 8, states[:, None] & 255, remainder], dim=1).to(torch.uint8)
    part = part_of(4096, 16, 2, 16, code, (1, 16), codes=codes.view(4096, -1))
    assert torch.equal(part.decoded()[:, ::16].flatten(), values_of(code, 16, part.table)[:, 0])
    check_decoded(part)


@pytest.mark.parametrize("tile", TILES)
def test_walks_are_circles(chosen, tile):
    """The last states of a row of a tile go on in its next row, and those of the last row in the first one."""
    for code in CODES:
        for bits in sorted({suited(bits, code, tile) for bits in BITS}):
            for states in (int(bits * length_of(code)), 11, 16):
                check_decoded(part_of(2, 16 if tile[1] < 32 else 2, bits, states, code, tile, seed=states))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [0, 1, 3, 4, 8, 9, 40])
def test_each_instruction_set_and_batch(chosen, batch, dtype):
    for code in CODES:
        part = part_of(3, 5, 2, 12, code, (16, 16))
        check(part, random(batch, 80, seed=batch).to(dtype), random(48, seed=1).to(dtype))


@settings(max_examples=80)
@given(
    st.integers(1, 5),
    st.integers(1, 9),
    st.sampled_from(TILES),
    st.sampled_from(BITS),
    st.sampled_from(CODES),
    st.integers(4, 16),
    st.sampled_from(DTYPES),
    st.sampled_from(DTYPES),
    st.integers(0, 20),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_shape(rows, columns, tile, bits, code, states, dtype, stored, batch, biased, seed):
    bits = suited(bits, code, tile)
    states = max(states, int(bits * length_of(code)))
    part = part_of(rows, columns, bits, states, code, tile, dtype=stored, seed=seed)
    x = random(batch, part.shape[1], seed=seed + 1).to(dtype)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    check(part, x, random(part.shape[0], seed=2).to(dtype) if biased else None)


@settings(max_examples=40)
@given(
    st.sampled_from([12, 16, 20, 24, 48, 64, 96, 112]),
    st.integers(1, 9),
    st.sampled_from(BITS),
    st.sampled_from(CODES),
    st.sampled_from(DTYPES),
    st.integers(0, 10),
    st.booleans(),
    st.integers(0, 99),
)
def test_rotated_rows(order, columns, bits, code, dtype, batch, biased, seed):
    part = part_of(order // 4, columns, suited(bits, code, (4, 16)), 12, code, (4, 16), rotated=order, seed=seed)
    x = random(batch, columns * 16, seed=seed).to(dtype)
    assert dispatch.kernel_name(part, x, None) == "cpu_rotated"
    check(part, x, random(order, seed=2).to(dtype) if biased else None)


@pytest.mark.parametrize("rotated", [None, 48])
def test_inputs_that_are_not_contiguous(rotated):
    part = part_of(3, 4, rotated=rotated)
    for x in not_contiguous():
        check(part, x)


def test_more_threads_than_rows():
    original = torch.get_num_threads()
    try:
        torch.set_num_threads(7)
        check(part_of(3, 256, tile=(1, 16)), random(1, 4096))
        check(part_of(1, 256, tile=(4, 16), rotated=4), random(2, 4096))
    finally:
        torch.set_num_threads(original)


@pytest.mark.parametrize("rotated", [None, 16])
@pytest.mark.parametrize("code", CODES)
def test_nan_reaches_the_outputs_of_its_row_alone(chosen, code, rotated):
    check_nan(part_of(2, 9, 3, 12, code, (16, 8), rotated))


def test_which_calls_the_kernels_compute():
    part, x = part_of(2, 2), random(2, 32)
    assert dispatch.kernel_name(part, x, None) == "cpu_packed"
    assert not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int8"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    x = x.detach()
    assert dispatch.kernel_name(part_of(2, 2, rotated=32), x, None) == "cpu_rotated"
    odd = part_of(2, 4, tile=(8, 1), code="hyb"), part_of(2, 4, tile=(8, 1))  # a state of two weights of two rows
    assert [dispatch.kernel_name(part, x[:, :4], None) for part in odd] == ["torch", "cpu_packed"]
    with dispatch.plain_torch():
        assert torch.equal(dispatch.linear(x, [part], None, None), reference.linear(x, [part], None, None))


def test_codes_are_not_copied():
    for code in CODES:
        part = part_of(2, 8, code=code)
        assert part.prepared(KERNEL).words.data_ptr() == part.codes.data_ptr()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("entries", 512),
        ("length", 4),
        ("books", 2),
        ("tables", 2),
        ("stride", 255),
        ("table", None),
        ("codec", 19),
        ("codec", 22),
        ("groups", 2),
        ("width", 72),
        ("rows", 24),
        ("units", 1),
        ("zero_point", 1.0),
        ("step_bits", 1),
        ("step_bits", 5),
        ("step_bits", 9),
        ("states", 3),
        ("states", 17),
        ("tile_rows", 0),
        ("tile_rows", 32),
        ("tile_columns", 0),
        ("tile_columns", 3),
        ("tile_columns", -16),
    ],
)
def test_the_library_checks_the_sizes_of_a_weight(name, value):
    packed = part_of(1, 4, code="hyb").prepared(KERNEL)
    setattr(packed.weight, name, value)
    with pytest.raises(RuntimeError, match="do not fit together"):
        product(random(1, 64), packed, None)


@pytest.mark.parametrize("rotated", [None, largest_block(48)])
def test_a_compiled_layer_calls_the_kernel(rotated):
    check_compiled(CompressedLinear(part_of(3, 2, 3, rotated=rotated), random(48)), random(2, 32), rotated is not None)


@pytest.mark.parametrize(("rotate", "kernel"), [("inputs", "cpu_packed"), ("both", "cpu_rotated")])
@torch.no_grad()
def test_a_checkpoint_is_computed_by_the_kernels(recipe, one_block, tmp_path, rotate, kernel):
    requested = recipe(QTIP(states=6, rotate=rotate), model=one_block("llama"), eval=None, save={"format": "native"})
    compress.run(requested, tmp_path, progress=False)
    model, _ = compress.load(tmp_path)
    parts = [part for layer in model.modules() if isinstance(layer, CompressedLinear) for part in layer.parts]
    assert parts and all(part.kind == "trellis" for part in parts)
    ids = torch.arange(12)[None]
    actual = model(ids).logits
    for part in parts:
        x = torch.zeros(1, part.shape[1])
        assert dispatch.kernel_name(part, x, None) == kernel and part.is_prepared(dispatch.kernel_for(part, x, None))
    with dispatch.plain_torch():
        torch.testing.assert_close(actual, model(ids).logits, rtol=1e-3, atol=1e-4)
