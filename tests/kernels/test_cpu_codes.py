"""The C++ kernels compute what plain torch computes, on every instruction set of this machine."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from products import INT8, SETS, exact, near, part_of, random, size_of_terms

from compress.errors import RecipeError
from compress.kernels import dispatch, reference
from compress.kernels.cpu import KERNEL
from compress.kernels.cpu.codes import product
from compress.kernels.cpu_packed import KERNEL as SPARSE
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.layers.transforms.rounding import InputRounding
from compress.native.library import instruction_set, library
from compress.numerics.dtypes import DTYPES
from compress.numerics.quant.codes import Codes, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("rounded", [None, "token", "static", "clipped"])
def test_products_of_all_batch_sizes(chosen, bits, dtype, rounded):
    part = part_of(50, 160, bits, 64, symmetric=bits % 2 == 0)  # 2 1/2 groups, 3 1/8 tiles
    bias = random(50, seed=2).to(dtype)
    rounding = {
        None: None,
        "token": InputRounding.of(INT8),
        "static": InputRounding.of(INT8, torch.tensor([0.02])),
        "clipped": InputRounding.of(GRIDS["int4"], clip=0.9),
    }[rounded]
    for batch in (0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 13, 30):
        x = random(batch, 160, seed=1).to(dtype)
        assert KERNEL.supports(part, x, rounding)
        assert near(dispatch.linear(x, [part], rounding, bias), exact(part, x, rounding, bias), dtype)


@settings(max_examples=80)
@given(
    st.integers(1, 70),
    st.integers(1, 200),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([1, 7, 16, 32, 48, 64, 128, "channel", "tensor"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(1, 9),
    st.integers(0, 999),
)
def test_any_shape_and_group(rows, width, bits, group, symmetric, indexed, rounded, dtype, batch, seed):
    group = min(group, width) if isinstance(group, int) else group
    part = part_of(rows, width, bits, group, symmetric, indexed and isinstance(group, int), seed=seed)
    x, rounding = random(batch, width, seed=seed + 1).to(dtype), InputRounding.of(INT8) if rounded else None
    assert KERNEL.supports(part, x, rounding)
    terms = size_of_terms(part, x) if dtype is torch.bfloat16 else 1e-6  # rounding rounds to bfloat16, too
    assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), dtype, terms)


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(100, 1400),
    st.sampled_from([2, 3, 4, 8]),
    st.sampled_from([7, 16, 48, 64, 512, 528, "channel"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(7, 40),
    st.integers(0, 999),
)
def test_many_rows_take_panels(rows, width, bits, group, symmetric, indexed, rounded, dtype, batch, seed):
    """Panels of 128 elements: groups that begin, end and go on in each; an odd number of tiles; blocks of 1 to 6 rows."""
    group = min(group, width) if isinstance(group, int) else group
    part = part_of(rows, width, bits, group, symmetric, indexed and isinstance(group, int), seed=seed)
    x, rounding = random(batch, width, seed=seed + 1).to(dtype), InputRounding.of(INT8) if rounded else None
    assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), dtype)


@pytest.mark.parametrize("symmetric", [True, False])
def test_float32_inputs_are_rounded_to_bfloat16_where_torch_may_do_so(chosen, symmetric):
    """As `torch.set_float32_matmul_precision("medium")` allows; other processors compute in float32."""
    part, original = part_of(50, 320, 4, 64, symmetric), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        for batch in (1, 5, 30):
            x = random(batch, 320, seed=batch)
            actual = dispatch.linear(x, [part], None, None)
            assert near(actual, exact(part, narrowed(x, chosen), None, None), x.dtype)
    finally:
        torch.set_float32_matmul_precision(original)


FEW = 8  # rows of inputs that are not multiplied in tile registers


@pytest.mark.skipif("amx_bf16" not in SETS, reason="the processor has no tile registers")
@settings(max_examples=100)
@given(
    st.integers(1, 70),
    st.integers(1, 700),
    st.integers(2, 8),
    st.sampled_from([16, 32, 48, 64, 96, 512, "channel"]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(FEW + 1, 200),
    st.integers(0, 999),
)
def test_tile_registers_multiply_as_vectors_do(
    rows, width, bits, group, symmetric, rounded, grouped, dtype, batch, seed
):
    """Blocks of 1 to 32 rows; steps of 16 and of 32 columns; sums of groups that panels divide, with zero points."""
    width = -(-width // group) * group if grouped and group != "channel" else width
    part = part_of(rows, width, bits, group if group == "channel" else min(group, width), symmetric, seed=seed)
    quantizer = InputRounding.of(INT8, group=group if grouped and group != "channel" else None)
    rounding = quantizer if rounded else None
    x = random(batch, width, seed=seed + 1).bfloat16().to(dtype)
    part.narrow_inputs = True
    found = {}
    try:
        for name in ("amx_bf16", "generic"):
            library().compress_use(name.encode())
            found[name] = dispatch.linear(x, [part], rounding, None)
    finally:
        library().compress_use(SETS[0].encode())
    assert near(found["amx_bf16"], found["generic"], dtype, size_of_terms(part, x))


def narrowed(x, chosen):
    """Float32 inputs as an instruction set multiplies them where it may round them to bfloat16."""
    if not chosen.endswith("_bf16") or (chosen == "amx_bf16" and len(x) <= FEW):
        return x
    return x.bfloat16().float()


@pytest.mark.parametrize("clip", [1.0, 0.85])
@pytest.mark.parametrize("bits", range(2, 9))
def test_integers_are_those_of_the_reference(chosen, bits, clip):
    """Codes of inputs equal those of torch in both dtypes: with an identity as the weight the output is code * scale."""
    eye, rounding = torch.eye(64), InputRounding.of(GRIDS[f"int{bits}"], clip=clip)
    part = CodesPart.of(Codes(eye.to(torch.int8), torch.ones(64, 1), None, INT8, "channel"))
    for dtype in (torch.float32, torch.bfloat16):
        x = random(40, 64, seed=3).to(dtype)
        assert KERNEL.supports(part, x, rounding)
        assert torch.equal(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None))


@pytest.mark.parametrize(("bits", "clip"), [(1, 1.0), (9, 1.0), (8, 0.0), (4, 1.5), (4, float("nan"))])
def test_the_library_checks_what_inputs_are_rounded_to(bits, clip):
    packed = KERNEL.prepare(part_of(20, 64, 4, 32, True))
    assert library().compress_product(packed.address, 0, 0, None, None, 1, 64, 0, 1, bits, clip, 1) == -1


TABLES = [name for name, grid in GRIDS.items() if not name.startswith("int")]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("grid", "table", "in_integers"), [("ternary", False, True), ("binary", False, False), ("nf4", True, False)]
)
def test_grids_with_steps_of_one_size_are_integers(chosen, grid, table, in_integers, dtype):
    """Ternary weights times rounded inputs are products of integers; the zero point of binary ones is one half."""
    part, rounding = CodesPart.of(quantize(random(50, 160), GRIDS[grid], 32)), InputRounding.of(INT8)
    assert (part.prepared(KERNEL).table is not None) == table
    assert KERNEL.supports(part, random(1, 160), rounding) == in_integers
    for batch in (1, 2, 12):
        x = random(batch, 160, seed=1).to(dtype)
        for by in (None, rounding):
            assert near(dispatch.linear(x, [part], by, None), exact(part, x, by, None), dtype)


SIGNED = ["int4_signed", "int5_signed", "int3_k", "int6_k"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("grid", TABLES)
def test_grids_that_are_no_integers(chosen, grid, dtype):
    kind = GRIDS[grid]
    width = 256 if kind.block > 1 else 160  # super-blocks take 256 columns
    weight = random(50, width)
    weight[0, :32] = 3  # a minimum equal to the maximum
    part = CodesPart.of(
        quantize(weight, kind, kind.group_size or 32, not kind.offset, "mse" if kind.offset else "absmax")
    )
    for batch in (1, 2, 5, 12, 13):
        x, bias = random(batch, width, seed=1).to(dtype), random(50, seed=2).to(dtype)
        assert KERNEL.supports(part, x, None)
        assert near(dispatch.linear(x, [part], None, bias), exact(part, x, None, bias), dtype)


@pytest.mark.parametrize(
    ("grid", "rounded"),
    [*((name, rounded) for name in SIGNED for rounded in (False, True)), ("iq4_nl", False), ("iq4_xs", False)],
)
def test_numbers_with_scales_of_either_sign(chosen, grid, rounded):
    part = CodesPart.of(quantize(random(50, 256), GRIDS[grid], GRIDS[grid].group_size or 32, search="mse"))
    assert bool((part.scales() < 0).any())
    rounding = InputRounding.of(INT8) if rounded else None
    for batch in (1, 5, 13):
        x = random(batch, 256, seed=1)
        assert KERNEL.supports(part, x, rounding)
        assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), x.dtype)


@pytest.mark.parametrize("grid", ["uint4", "uint4_k"])
def test_kept_weights_alone_are_not_for_grids_with_minima(grid):
    part = CodesPart.of(quantize(random(50, 256), GRIDS[grid], 32, False))
    sparse = SparsePart.of(part, PackedMask.of(torch.ones(50, 256, dtype=torch.bool), None))
    assert not KERNEL.supports(sparse, random(1, 256), None)


def test_all_numbers_of_8_bit_floats(chosen):
    """Every code times one, subnormal numbers included, equals torch's number."""
    for grid in ("fp8_e4m3", "fp8_e5m2"):
        numbers = torch.arange(256, dtype=torch.uint8).view(GRIDS[grid].dtype).float()
        finite = torch.arange(256)[numbers.isfinite()]
        part = CodesPart.of(Codes(finite[:, None].expand(-1, 32), torch.ones(len(finite), 1), None, GRIDS[grid], 32))
        x = torch.zeros(1, 32)
        x[0, 7] = 1
        assert torch.equal(dispatch.linear(x, [part], None, None)[0], numbers[finite])


@pytest.mark.parametrize("pattern", ["2:4", "bitmask"])
@pytest.mark.parametrize(
    "grid,symmetric", [("int4", True), ("int4", False), ("int8", True), ("nf4", True), ("mxfp4", True)]
)
def test_kept_weights_alone(chosen, pattern, grid, symmetric):
    weight = random(40, 96)
    mask = weight.abs() >= weight.abs().unflatten(1, (-1, 4)).topk(2, dim=-1).values[..., -1:].expand(
        -1, -1, 4
    ).flatten(1)
    part = CodesPart.of(quantize(weight * mask, GRIDS[grid], GRIDS[grid].group_size or 32, symmetric, mask=mask))
    sparse = SparsePart.of(part, PackedMask.of(mask, (2, 4) if pattern == "2:4" else None))
    x = random(5, 96, seed=1)
    assert KERNEL.supports(sparse, x, None)
    assert near(dispatch.linear(x, [sparse], None, None), exact(sparse, x, None, None), x.dtype)


@settings(max_examples=40)
@given(
    st.integers(1, 70),
    st.integers(1, 600),
    st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    st.sampled_from(["float32", "bfloat16", "float16"]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.integers(0, 20),
    st.integers(0, 999),
)
def test_kept_floats(rows, width, density, stored, dtype, batch, seed):
    """Whole panels and pieces, columns without weights and full ones; computed without the dense weight."""
    mask = torch.rand(rows, width, generator=torch.Generator().manual_seed(seed)) < density
    weight = (random(rows, width, seed=seed) * mask).to(DTYPES[stored])
    part = SparsePart.of(DensePart.of(weight), PackedMask.of(mask))
    x, bias = random(batch, width, seed=seed + 1).to(dtype), random(rows, seed=seed).to(dtype)
    assert not KERNEL.supports(part, x, None) and SPARSE.supports(part, x, None)
    assert near(dispatch.linear(x, [part], None, bias), exact(part, x, None, bias), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("pattern", [(2, 4), None])
def test_kept_floats_of_all_batch_sizes(chosen, pattern, dtype):
    weight = random(50, 300)
    mask = weight.abs() >= weight.abs().unflatten(1, (-1, 4)).topk(2, -1).values[..., -1:].repeat(1, 1, 4).flatten(1)
    for stored in (torch.float32, torch.bfloat16):
        part = SparsePart.of(DensePart.of((weight * mask).to(stored)), PackedMask.of(mask, pattern))
        for m in (0, 1, 2, 6, 7, 30):
            x = random(m, 300, seed=m).to(dtype)
            assert SPARSE.supports(part, x, None)
            assert near(dispatch.linear(x, [part], None, None), exact(part, x, None, None), dtype)


def test_what_the_kernel_of_kept_floats_leaves_to_torch():
    mask = random(20, 64) > 0
    part, x = SparsePart.of(DensePart.of(random(20, 64) * mask), PackedMask.of(mask)), random(2, 64)
    assert not SPARSE.supports(part, x, InputRounding.of(INT8))
    assert not SPARSE.supports(part, x.half(), None)
    assert not SPARSE.supports(part, x.requires_grad_(), None)
    packed = SPARSE.prepare(part)
    assert packed.words.numel() == int(mask.sum()) + 16
    native, words = library(), torch.zeros(1, dtype=torch.int32)
    assert native.compress_pack(packed.address, words.data_ptr(), words.data_ptr(), 1) == -1  # is for codes
    assert native.compress_codes(packed.address, words.data_ptr(), 1, words.data_ptr(), 1) == -1
    packed.weight.masks = None
    assert native.compress_product(packed.address, 0, 0, None, None, 1, 64, 0, 0, 8, 1, 1) == -1  # without positions


def changed(tensor, at, value):
    found = tensor.clone()
    found.view(-1)[at] = value
    return found


@pytest.mark.parametrize(
    "change",
    [
        lambda packed: {"offsets": changed(packed.offsets, 1, 2**62)},
        lambda packed: {"offsets": changed(packed.offsets, 1, -1)},
        lambda packed: {"offsets": packed.offsets[:1]},
        lambda packed: {"masks": torch.full_like(packed.masks, -1)},
        lambda packed: {"words": packed.words[:-1]},
    ],
)
def test_kept_floats_that_are_elsewhere_are_refused(change):
    mask = random(20, 64) > 0
    packed = SPARSE.prepare(SparsePart.of(DensePart.of(random(20, 64) * mask), PackedMask.of(mask)))
    with pytest.raises(ValueError, match="outside of it|do not fit together"):
        product(random(1, 64), replace(packed, **change(packed)), None)


@pytest.mark.parametrize("column", [64, 2**31 - 1, -2, -(2**31)])
def test_columns_of_groups_outside_of_the_inputs_are_refused(column):
    packed = part_of(20, 64, 4, 7, True).prepared(KERNEL)
    wrong = replace(packed, order=changed(packed.order, 3, column))
    with pytest.raises(ValueError, match="outside of it"):
        product(random(1, 64), wrong, None)


def test_kept_floats_compile_to_one_graph():
    mask = random(64, 64) > 0
    layer = CompressedLinear([SparsePart.of(DensePart.of(random(64, 64) * mask), PackedMask.of(mask))], None)
    with torch.no_grad():
        expected = layer(random(2, 64))
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(random(2, 64)), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("threshold,columns", [(3.0, False), (None, True), (3.0, True), (100.0, False)])
def test_outlier_columns_are_floats(chosen, threshold, columns, indexed, dtype):
    """LLM.int8 (Dettmers 2022): the columns with outliers are not rounded; the others are products of integers."""
    part = part_of(50, 96, 8, 32, True, indexed)
    remaining = torch.zeros(96, dtype=torch.bool)
    remaining[[3, 50]] = True
    rounding = InputRounding.of(INT8, threshold=threshold, columns=remaining if columns else None, shape=(50, 96))
    for batch in (1, 7):
        x = random(batch, 96, seed=4).to(dtype)
        x[:, 3] *= 20
        assert KERNEL.supports(part, x, rounding)
        expected = exact(part, x, rounding, None)
        assert near(dispatch.linear(x, [part], rounding, None), expected, dtype)


@settings(max_examples=40)
@given(st.integers(1, 40), st.integers(1, 100), st.integers(1, 8), st.sampled_from([1, 7, 16, 48, 64]), st.booleans())
def test_columns_are_read_back(rows, width, bits, group, indexed):
    grid = GRIDS["binary" if bits == 1 else f"int{bits}"]
    codes = quantize(random(rows, width), grid, min(group, width))
    if indexed:
        groups = codes.scale.shape[1]
        codes = replace(codes, group_index=torch.arange(width, dtype=torch.int32).flip(0) % groups)
    part = CodesPart.of(codes)
    if bits > 1:
        assert torch.equal(KERNEL.prepare(part).columns(torch.arange(width)), part.dense(torch.float32))


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("end", [-1.28, 1.27])
def test_the_largest_integers_do_not_overflow(chosen, bits, symmetric, end):
    """Partial sums have 16 bits on some processors."""
    codes = quantize(random(20, 288), GRIDS[f"int{bits}"], 96, symmetric)
    rounding = InputRounding.of(INT8, torch.tensor([0.01]))
    for value in (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1):
        part = CodesPart.of(replace(codes, codes=torch.full_like(codes.codes, value)))
        for batch in (1, 3, 12):
            x = torch.full((batch, 288), end)
            assert near(dispatch.linear(x, [part], rounding, None), exact(part, x, rounding, None), x.dtype)


def test_infinite_inputs_are_not_numbers_after_rounding(chosen):
    part, x = part_of(20, 64, 4, 32, True), random(2, 64)
    x[0, 5] = float("inf")
    y = dispatch.linear(x, [part], InputRounding.of(INT8), None)
    assert bool(y[0].isnan().all()) and not bool(y[1].isnan().any())


def test_float_zero_points(chosen):
    codes = quantize(random(20, 96), GRIDS["int4"], 32, False)
    part = CodesPart.of(replace(codes, zero=codes.zero + 0.3, float_zeros=True))
    x = random(3, 96, seed=1)
    assert near(dispatch.linear(x, [part], None, None), exact(part, x, None, None), x.dtype)


def test_inputs_of_other_layouts():
    part = part_of(20, 64, 4, 32, True)
    wide = random(6, 2, 128)
    for x in (wide[..., :64], wide[..., ::2], wide.transpose(0, 1)[:, :, 64:], random(64), random(2, 3, 4, 64)):
        assert near(dispatch.linear(x, [part], None, None), reference.linear(x, [part], None, None), x.dtype)


def test_threads_do_not_change_a_bit():
    part, x, original, actual = part_of(2000, 1024, 4, 64, True), random(40, 1024), torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 64):  # more threads than tiles, too
            torch.set_num_threads(threads)
            actual.append([dispatch.linear(x[:m], [part], None, None) for m in (1, 7, 40)])
    finally:
        torch.set_num_threads(original)
    assert all(torch.equal(a, b) for alternative in actual[1:] for a, b in zip(actual[0], alternative, strict=True))


@pytest.mark.parametrize("rounding", [None, InputRounding.of(INT8), InputRounding.of(INT8, torch.tensor([0.1]))])
@pytest.mark.parametrize("batch", [1, 9])
def test_nan_stays_nan(chosen, rounding, batch):
    part, x = part_of(20, 64, 4, 32, True), random(batch, 64)
    x[0, 5] = float("nan")
    y = dispatch.linear(x, [part], rounding, None)
    assert bool(y[0].isnan().all()) and not bool(y[1:].isnan().any())


def test_what_the_kernel_leaves_to_torch():
    part, x = part_of(20, 64, 4, 32, True), random(2, 64)
    nf4 = CodesPart.of(quantize(random(20, 64), GRIDS["nf4"], 32))
    assert not KERNEL.supports(nf4, x, InputRounding.of(INT8))
    assert not KERNEL.supports(part, x.half(), None)
    assert not KERNEL.supports(part, x.double(), None)
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["fp8_e4m3"]))
    assert not KERNEL.supports(part, x, InputRounding.of(INT8, group=16))
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int4"], symmetric=False))
    assert not KERNEL.supports(part, x, InputRounding.of(GRIDS["int4_signed"]))
    assert not KERNEL.supports(part, x.requires_grad_(), None)
    y = dispatch.linear(x, [part], None, None)
    y.sum().backward()
    torch.testing.assert_close(x.grad, part.dense(torch.float32).sum(0).expand(2, -1), rtol=1e-4, atol=1e-4)


def test_a_weight_is_packed_once_and_again_after_a_cast(monkeypatch):
    part, x, calls = part_of(20, 64, 4, 32, True), random(2, 64), []
    prepare = KERNEL.prepare
    monkeypatch.setattr(type(KERNEL), "prepare", lambda self, part: calls.append(1) or prepare(part))
    assert not part.is_prepared(KERNEL)
    for _ in range(3):
        dispatch.linear(x, [part], None, None)
    assert len(calls) == 1 and part.is_prepared(KERNEL)
    cast = part.to(torch.bfloat16)
    assert not cast.is_prepared(KERNEL)
    dispatch.linear(x, [cast], None, None)
    assert len(calls) == 2


def test_the_operator_is_seen_by_tracers():
    part, x = part_of(20, 64, 4, 32, True), random(3, 64)
    p = KERNEL.prepare(part)
    arguments = (x, None, 0, 8, 1.0, None, None, None, *p.tensors, *p.numbers)
    torch.library.opcheck(torch.ops.compress.codes_linear, arguments, test_utils=("test_schema", "test_faketensor"))
    torch.testing.assert_close(torch.ops.compress.codes_linear(*arguments), dispatch.linear(x, [part], None, None))


def test_a_layer_compiles_to_one_graph():
    layer, x = CompressedLinear(quantize(random(64, 64), GRIDS["int4"], 32), None), random(2, 64)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)


def test_the_instruction_set_can_be_chosen(monkeypatch):
    library.cache_clear()
    try:
        monkeypatch.setenv("COMPRESS_KERNELS", "none")
        assert library() is None and instruction_set() == "none"
        library.cache_clear()
        monkeypatch.setenv("COMPRESS_KERNELS", "generic")
        assert library() is not None and instruction_set() == "generic"
        library.cache_clear()
        monkeypatch.setenv("COMPRESS_KERNELS", "mmx")
        with pytest.raises(
            RecipeError, match="COMPRESS_KERNELS=mmx is not available here; use one of .*generic, or none"
        ):
            library()
    finally:
        monkeypatch.undo()
        library.cache_clear()
        library().compress_use(SETS[0].encode())
