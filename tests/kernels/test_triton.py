"""The Triton programs compute what plain torch computes: on a GPU, or in Triton's interpreter (`tests/conftest.py`)."""

import gc
import importlib.util
import json
import os
import subprocess
import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draws import random
from hypothesis import given, settings
from hypothesis import strategies as st

import compress
from compress import RTN
from compress.kernels import dispatch
from compress.kernels.triton import KERNEL, launch
from compress.kernels.triton import codes as gpu
from compress.kernels.triton.counters import Counters
from compress.kernels.triton.launch import ProductTile
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.layers.transforms.rounding import InputRounding
from compress.native.choice import VARIABLE
from compress.native.library import library
from compress.numerics.quant.codes import Codes, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None, reason="triton is not installed; it is in the extra gpu, for Linux"
    ),
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),  # numpy's, in the interpreter
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
INT8, E4M3, E5M2 = (GRIDS[name] for name in ("int8", "fp8_e4m3", "fp8_e5m2"))
NEAR = {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # of the size of the terms of a sum


@pytest.fixture(autouse=True, scope="module")
def on_this_device():
    """Calls on this machine's device are computed by these programs alone."""
    library()  # the choice of the CPU's kernels stays
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(VARIABLE, raising=False)  # "none" would switch these off, too
        patch.setattr(KERNEL, "device", DEVICE.type)
        patch.setattr(dispatch, "KERNELS", [KERNEL])
        gpu.installed.cache_clear()
        yield
    gpu.installed.cache_clear()


def here(*shape, seed=0, dtype=torch.float32):
    return random(*shape, seed=seed).to(DEVICE, dtype)


def part_of(rows, width, grid, group, symmetric=True, seed=0, dtype=torch.float32):
    kind = GRIDS[grid]
    weight = random(rows, width, seed=seed)
    return CodesPart.of(quantize(weight, kind, kind.group_size or group, symmetric, dtype=dtype)).to(DEVICE)


def check(part, x, rounding=None, bias=None):
    """The call of the kernel is the product in float64 of the numbers that the reference multiplies."""
    assert KERNEL.supports(part, x, rounding)
    actual = dispatch.linear(x, [part], rounding, bias)
    inputs = (x if rounding is None else rounding(x)).double()
    weight = part.dense(torch.float32).double()
    expected = inputs @ weight.T + (0 if bias is None else bias.double())
    assert actual.dtype == x.dtype and actual.shape == expected.shape and actual.device == x.device
    if x.numel():
        terms = (inputs.square() @ weight.square().T).sqrt().max()
        apart = (actual.double() - expected).abs().max()
        # sums of products of 8-bit floats have some 14 bits on GPUs of compute capability 9.0
        near = 1e-3 if rounding is not None and rounding.scheme.grid.name.startswith("fp8") else 0
        assert float(apart) <= max(near, NEAR[x.dtype]) * max(float(expected.abs().max()), float(terms), 1e-6)


def test_a_product_by_hand():
    codes = torch.tensor([[-8, 7, 0, 1], [3, -3, 2, -2]], dtype=torch.int8)
    scale, zero = torch.tensor([[0.5, 2.0], [1.0, 0.25]]), torch.tensor([[1.0, 0.0], [-1.0, 2.0]])
    part = CodesPart.of(Codes(codes, scale, zero, GRIDS["int4"], 2)).to(DEVICE)  # [-4.5, 3, 0, 2], [4, -2, 0, -1]
    x, bias = torch.tensor([1.0, 0.0, 2.0, 1.0], device=DEVICE), torch.tensor([10.0, 20.0], device=DEVICE)
    assert dispatch.linear(x, [part], None, bias).tolist() == [7.5, 23.0]
    assert dispatch.linear(torch.stack([x, 2 * x]), [part], None, None).tolist() == [[-2.5, 3.0], [-5.0, 6.0]]


@settings(max_examples=30)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from(["int2", "int3", "int4", "int5", "int8"]),
    st.sampled_from([7, 16, 32, 64, 128, "channel", "tensor"]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    st.sampled_from([1, 2, 9, 17]),
    st.booleans(),
    st.integers(0, 999),
)
def test_integers_of_any_shape(rows, width, grid, group, symmetric, dtype, batch, biased, seed):
    part = part_of(rows, width, grid, min(group, width) if isinstance(group, int) else group, symmetric, seed)
    bias = here(rows, seed=seed + 2, dtype=dtype) if biased else None
    check(part, here(batch, width, seed=seed + 1, dtype=dtype), None, bias)


@settings(max_examples=15)
@given(
    st.integers(1, 70),
    st.integers(1, 300),
    st.sampled_from(["int3", "int4", "int8", "fp8_e4m3", "nf4"]),
    st.sampled_from([32, 64, "channel"]),
    st.booleans(),
    st.sampled_from([INT8, E4M3, E5M2]),
    st.booleans(),
    st.sampled_from([torch.float32, torch.float16]),
    st.sampled_from([1, 5, 17]),
    st.integers(0, 999),
)
def test_rounded_inputs_of_any_shape(rows, width, grid, group, symmetric, inputs, static, dtype, batch, seed):
    group = min(group, width) if isinstance(group, int) else group
    part = part_of(rows, width, grid, group, symmetric or not grid.startswith("int"), seed)
    scale = torch.tensor([0.02]) if static else None
    check(part, here(batch, width, seed=seed + 1, dtype=dtype), InputRounding.of(inputs, scale).to(DEVICE))


OTHERS = [name for name in GRIDS if not name.startswith("int")] + ["int4_signed", "int3_k", "int6_k"]


@pytest.mark.few(7)
@pytest.mark.parametrize("grid", OTHERS)
def test_grids_that_are_no_integers(grid):
    kind = GRIDS[grid]
    part = part_of(20, 256 if kind.block > 1 else 150, grid, 32, not kind.offset)
    for batch, dtype in ((1, torch.float32), (3, torch.bfloat16)):
        check(part, here(batch, part.shape[1], seed=1, dtype=dtype), None, here(20, seed=2, dtype=dtype))


@pytest.mark.few(1)
@pytest.mark.parametrize("grid", ["fp8_e4m3", "fp8_e5m2", "fp4_e2m1", "nf4"])
def test_all_numbers_of_a_grid(grid):
    """Every code times one equals torch's number, subnormal and infinite ones and NaN included."""
    kind = GRIDS[grid]
    codes = torch.arange(2**kind.bits, dtype=torch.uint8)
    part = CodesPart.of(Codes(codes[:, None], torch.ones(len(codes), 1), None, kind, "channel")).to(DEVICE)
    expected = part.dense(torch.float32)
    for batch in (1, 2):
        actual = dispatch.linear(torch.ones(batch, 1, device=DEVICE), [part], None, None)
        torch.testing.assert_close(actual, expected.T.expand(batch, -1), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("grid", ["mxfp4", "nvfp4"])
def test_the_smallest_scales_of_a_byte(grid):
    part = part_of(3, 64, grid, None)
    part = part.changed(scale=torch.arange(part.scale.numel(), dtype=torch.uint8, device=DEVICE).view_as(part.scale))
    x = torch.ones(1, 64, device=DEVICE)
    torch.testing.assert_close(dispatch.linear(x, [part], None, None), part.dense(torch.float32).sum(1)[None])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("inputs", [INT8, E4M3, E5M2])
def test_codes_of_inputs_are_those_of_the_reference(inputs, dtype):
    """An identity as the weight gives the rounded inputs, bit by bit; ties, zeros, tiny and huge numbers among them."""
    if DEVICE.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("Triton's interpreter cuts bits off in a conversion to bfloat16, where GPUs round")
    kind = INT8 if inputs is INT8 else inputs
    single = kind.encode(torch.eye(40), torch.ones(()), None).to(torch.int8 if kind is INT8 else torch.uint8)
    part = CodesPart.of(Codes(single, torch.ones(40, 1), None, kind, "channel")).to(DEVICE)
    x = random(12, 40, seed=3)
    x[1], x[2], x[3, :8] = 0, x[2] * 1e-7, torch.arange(8.0) + 0.5
    x[3, 9], x[4] = 127.5, x[4] * 3e4
    x = x.to(DEVICE, dtype)
    for rounding in (InputRounding.of(inputs), InputRounding.of(inputs, torch.tensor([0.25])).to(DEVICE)):
        assert torch.equal(dispatch.linear(x, [part], rounding, None), rounding(x))


@pytest.mark.parametrize("batch", [0, 1, 16, 17, 150])
@pytest.mark.parametrize("grid,rounding", [("int4", None), ("int8", InputRounding.of(INT8))])
def test_batches(grid, rounding, batch):
    check(part_of(33, 72, grid, "channel" if rounding else 32), here(batch, 72, seed=1), rounding, here(33))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "grid,group",
    [("int4", 16), ("int2", 64), ("int8", "channel"), ("int8", 32), ("fp8_e4m3", 32), ("mxfp4", 32), ("nvfp4", 16)],
)
@pytest.mark.parametrize("symmetric", [False, True])
def test_weights_of_many_inputs_are_dequantized_apart(grid, group, symmetric, dtype):
    """They are those of plain torch."""
    part = part_of(70, 130 if grid.startswith("int") else 128, grid, group, symmetric or not grid.startswith("int"))
    if DEVICE.type != "cpu" or dtype != torch.bfloat16:  # the interpreter cuts bits off in a conversion to bfloat16
        assert torch.equal(launch.dequantized(part.prepared(KERNEL), dtype), part.dense(torch.float32).to(dtype))
    check(part, here(launch.MOST + 1, part.shape[1], seed=1, dtype=dtype), None, here(70, dtype=dtype))


def test_inputs_of_other_layouts():
    part = part_of(20, 64, "int4", 32)
    wide = here(6, 2, 128)
    for x in (wide[..., :64], wide[..., ::2], wide.transpose(0, 1)[:, :, 64:], here(64), here(2, 3, 4, 64)):
        check(part, x)
        check(part, x, InputRounding.of(INT8))


def test_groups_by_an_index_and_float_zero_points():
    codes = quantize(random(20, 96), GRIDS["int4"], 32, False)
    index = torch.randint(3, (96,), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    parts = [replace(codes, group_index=index), replace(codes, zero=codes.zero + 0.3, float_zeros=True)]
    for part in parts:
        for batch in (1, 3):
            check(CodesPart.of(part).to(DEVICE), here(batch, 96, seed=1))


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
def test_scales_are_read_as_they_are_stored(stored):
    part = part_of(20, 64, "int4", 32, False, dtype=stored).in_storage(stored)
    packed = part.prepared(KERNEL)
    assert packed.scale.dtype == stored
    check(part, here(1, 64, seed=1))
    for mine, theirs in ((packed.words, part.words), (packed.scale, part.scale), (packed.zero, part.zero)):
        assert mine.data_ptr() == theirs.data_ptr()  # nothing is in memory twice


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(
    "rounding", [None, InputRounding.of(INT8), InputRounding.of(E4M3), InputRounding.of(INT8, torch.tensor([0.1]))]
)
def test_nan_stays_nan(rounding, batch):
    part, x = part_of(20, 64, "int8", "channel"), here(batch, 64)
    x[0, 5] = float("nan")
    y = dispatch.linear(x, [part], None if rounding is None else rounding.to(DEVICE), None)
    assert bool(y[0].isnan().all()) and not bool(y[1:].isnan().any())


def test_codes_after_the_last_column_do_not_count():
    """Files of others may have anything there."""
    for grid in ("fp8_e4m3", "int4"):
        part = part_of(5, 30, grid, "channel")
        part.words[:, -1] |= torch.tensor(-0x01010000 if grid == "int4" else 0x7F7F0000, device=DEVICE).int()
        for batch, rounding in ((1, None), (3, None), (3, InputRounding.of(E4M3))):
            check(part, here(batch, 30, seed=1), rounding)


def test_sums_of_splits():
    """A product of few tiles is divided among programs, and the parts are added in one order."""
    part, x = part_of(20, 2100, "int8", 128, False), here(3, 2100)
    weight = part.prepared(KERNEL)
    assert ProductTile.of(3, weight, torch.float32, DEVICE).split(3, 20, weight.units, DEVICE) < weight.units
    check(part, x, None, here(20, seed=4))
    check(part, x[:1], None, here(20, seed=4))
    assert torch.equal(dispatch.linear(x, [part], None, None), dispatch.linear(x, [part], None, None))


def test_counters_of_calls_that_may_run_at_once_are_apart():
    counters = Counters(DEVICE)
    first_result, second = counters.of_stream(1, 10), counters.of_stream(2, 10)
    assert (
        first_result.data_ptr() != second.data_ptr() and counters.of_stream(1, 7).data_ptr() == first_result.data_ptr()
    )
    assert len(counters.of_stream(1, 5000)) >= 5000  # more tiles
    graphs = [counters.of_graph(tiles) for tiles in (3, 4)]
    assert [len(item) for item in graphs] == [3, 4] and graphs[1].data_ptr() == graphs[0].data_ptr() + 3 * 4


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a GPU")
def test_replays_beside_other_calls():
    """A graph of split products gives the bits of its first call, while calls on another stream count, too."""
    part, x = part_of(300, 4096, "int4", 128), here(3, 4096, dtype=torch.bfloat16)
    expected, graph = dispatch.linear(x, [part], None, None), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        actual = [dispatch.linear(x, [part], None, None) for _ in range(5)]
    alternative = torch.cuda.Stream()
    for _ in range(50):
        graph.replay()
        with torch.cuda.stream(alternative):
            eager = dispatch.linear(x, [part], None, None)
        torch.cuda.synchronize()
        assert all(torch.equal(item, expected) for item in (*actual, eager))


def test_forgotten_weights_are_freed_at_once():
    part = part_of(20, 64, "int8", "channel")
    dispatch.linear(here(2, 64), [part], None, None)
    dispatch.linear(here(70, 64, dtype=torch.float16), [part], None, None)
    packed = weakref.ref(part.prepared(KERNEL))
    gc.disable()
    try:
        part.forget_prepared()
        assert packed() is None
    finally:
        gc.enable()


def test_plans_do_not_grow_with_every_length():
    part = part_of(20, 64, "int8", "channel")
    for batch in range(1, 200):
        launch.plan_of(part.prepared(KERNEL), batch, torch.float16, True, DEVICE)
    assert len(part.prepared(KERNEL).plans) < 12


def test_which_calls_are_left_to_torch(monkeypatch):
    part, x = part_of(8, 32, "int4", 16), here(2, 32)
    no = InputRounding.of
    for rounding in (
        no(GRIDS["int4"]),
        no(INT8, threshold=3.0),
        no(INT8, symmetric=False),
        no(E4M3, group=16),
        no(INT8, clip=0.9),
    ):
        assert not KERNEL.supports(part, x, rounding)
    assert not KERNEL.supports(part, x.double(), None)
    assert not KERNEL.supports(part, here(2, 32).requires_grad_(), None)
    assert not KERNEL.supports(DensePart.of(here(8, 32)), x, None)
    remaining = SparsePart.of(part_of(8, 32, "int4", 16).cpu(), PackedMask.of(torch.ones(8, 32, dtype=torch.bool)))
    assert not KERNEL.supports(remaining, x, None)
    monkeypatch.setattr(KERNEL, "device", "meta")
    assert not KERNEL.supports(part, x, None)


def test_the_kernel_is_for_gpus_alone():
    assert type(KERNEL).device == "cuda" and dispatch.find_kernels()[0][-1] is KERNEL


@pytest.mark.parametrize("reason", ["switched off", "not installed", "too old"])
def test_without_triton(reason, monkeypatch):
    part, x = part_of(8, 32, "int4", 16), here(2, 32)
    gpu.installed.cache_clear()
    if reason == "switched off":
        monkeypatch.setenv("COMPRESS_KERNELS", "none")
    elif reason == "not installed":
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(gpu, "capability", lambda device: (7, 5))
    try:
        assert not KERNEL.supports(part, x, None)
        assert torch.equal(dispatch.linear(x, [part], None, None), part.product(x))
    finally:
        monkeypatch.undo()
        gpu.installed.cache_clear()


def test_a_gpu_without_8_bit_floats_leaves_inputs_rounded_to_them_to_torch(monkeypatch):
    part, x = part_of(8, 32, "fp8_e4m3", "channel"), here(2, 32)
    monkeypatch.setattr(gpu, "capability", lambda device: (8, 0))
    assert KERNEL.supports(part, x, None) and not KERNEL.supports(part, x, InputRounding.of(E4M3))


@pytest.mark.parametrize("rounding", [None, InputRounding.of(INT8), InputRounding.of(E4M3)])
def test_a_layer_compiles_to_one_graph(rounding):
    layer, x = CompressedLinear(quantize(random(48, 64), GRIDS["int4"], 32), random(48)).to(DEVICE), here(2, 64)
    layer.round_inputs(rounding)
    with torch.no_grad():
        expected = layer(x)
        assert torch.equal(torch.compile(layer, fullgraph=True, backend="eager")(x), expected)


def test_the_operator_is_registered():
    packed, x = part_of(20, 64, "nf4", 32).prepared(KERNEL), here(2, 64)
    arguments = (x, None, "int8", None, *packed.tensors, *packed.values)
    torch.library.opcheck(torch.ops.compress.gpu_codes_linear, arguments, test_utils=("test_schema", "test_faketensor"))


@torch.no_grad()
@pytest.mark.parametrize("rounded", [False, True])
def test_a_packed_model(pico_model, monkeypatch, rounded):
    known_values = (
        {"weights": "int8", "group_size": "channel", "activations": "int8"}
        if rounded
        else {"weights": "int4", "group_size": 32}
    )
    model = compress.apply(pico_model, RTN(**known_values)).to(DEVICE)
    layers = [module for module in model.modules() if isinstance(module, CompressedLinear)]
    calls = []
    monkeypatch.setattr(type(KERNEL), "product", watched(type(KERNEL).product, calls))
    ids = torch.arange(1, 4, device=DEVICE).view(1, -1)
    with dispatch.plain_torch():
        expected = model(ids).logits
    assert not calls
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))
    assert len(calls) == len(layers) > 0


def watched(product, calls):
    def watching(self, x, *remainder):
        calls.append(x)
        return product(self, x, *remainder)

    return watching


CASES = {  # the programs of each way to compute a product
    "float inputs": {"grid": "int4", "group": 64, "rounding": "", "dtype": "bfloat16", "batch": 64, "zeros": True},
    "many inputs": {"grid": "int4", "group": 64, "rounding": "", "dtype": "bfloat16", "batch": 512, "zeros": True},
    "bytes": {"grid": "int8", "group": "channel", "rounding": "", "dtype": "float16", "batch": 64, "zeros": False},
    "integers of 4 bits": {
        "grid": "int4",
        "group": "channel",
        "rounding": "int8",
        "dtype": "bfloat16",
        "batch": 16,
        "zeros": False,
    },
    "integers of 3 bits": {
        "grid": "int3",
        "group": "channel",
        "rounding": "int8",
        "dtype": "bfloat16",
        "batch": 64,
        "zeros": False,
    },
    "codes of groups": {
        "grid": "int4",
        "group": 128,
        "rounding": "int8",
        "dtype": "bfloat16",
        "batch": 128,
        "zeros": False,
    },
    "one row": {"grid": "int4", "group": 64, "rounding": "", "dtype": "bfloat16", "batch": 1, "zeros": False},
    "one row of bytes": {"grid": "int8", "group": 128, "rounding": "", "dtype": "float16", "batch": 1, "zeros": True},
    "few rows": {"grid": "int4", "group": 64, "rounding": "", "dtype": "bfloat16", "batch": 3, "zeros": False},
    "integers": {
        "grid": "int8",
        "group": "channel",
        "rounding": "int8",
        "dtype": "float16",
        "batch": 1,
        "zeros": False,
    },
    "8-bit floats": {
        "grid": "fp8_e4m3",
        "group": "channel",
        "rounding": "fp8_e4m3",
        "dtype": "bfloat16",
        "batch": 64,
        "zeros": False,
    },
    "3 bits": {"grid": "int3", "group": 32, "rounding": "", "dtype": "float16", "batch": 64, "zeros": False},
    "block floats": {"grid": "nvfp4", "group": 16, "rounding": "", "dtype": "bfloat16", "batch": 8, "zeros": False},
    "float32": {"grid": "nf4", "group": 64, "rounding": "", "dtype": "float32", "batch": 64, "zeros": False},
}
SOME = "one row", "8-bit floats", "block floats", "integers of 4 bits"
SHARED_MEMORY = {80: 163 << 10, 89: 99 << 10, 90: 227 << 10}  # bytes of a block (CUDA C++ programming guide, table 30)


@pytest.mark.parametrize(
    "capability,names",
    [(89, SOME), *(pytest.param(item, CASES, marks=pytest.mark.exhaustive) for item in SHARED_MEMORY)],
)
def test_the_programs_compile_for_gpus(capability, names, tmp_path):
    """Triton compiles them to machine code without a GPU, which the interpreter does not; they fit into its memory.

    Hardly any register is spilled: the warps of a tile are chosen so.
    """
    cases = [CASES[name] for name in names if capability >= 89 or CASES[name]["rounding"] != "fp8_e4m3"]
    settings = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    settings["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[2]), settings.get("PYTHONPATH", "")])
    settings["TRITON_CACHE_DIR"] = str(tmp_path)
    completed = subprocess.run(
        [sys.executable, Path(__file__).with_name("compile_programs.py"), str(capability)],
        input="\n".join(json.dumps(case | {"shared": SHARED_MEMORY[capability]}) for case in cases),
        env=settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr[-3000:]
    actual = [json.loads(line) for line in completed.stdout.splitlines()]
    programs = {"product", "round_rows", "vector"}
    assert programs <= {item["program"] for item in actual} <= programs | {"weights"}
    assert all(item["shared"] <= SHARED_MEMORY[capability] and item["spilled"] <= 256 for item in actual), actual
