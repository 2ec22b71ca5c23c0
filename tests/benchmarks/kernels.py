"""CPU kernels against torch, and ONNX Runtime and ggml where they are installed: medians of times, in one run.

    GOMP_SPINCOUNT=1000 python tests/benchmarks/kernels.py [--threads N] [--shape 4096x4096] [--batch 1 8 128] [--set avx2]

Prints the instruction set and the ceilings of the machine on one and on all threads (`ceilings.cpp`, compiled here): GB/s
of reading, Gop/s of float32, bfloat16 and int8 products. Then a row per shape, grid and batch: microseconds of torch in
float32 and bfloat16; of the kernel with float32 inputs, with float32 inputs that it may round to bfloat16 (torch's matmul
precision "medium"), with bfloat16 inputs, and with inputs rounded to int8; of the layer itself in plain torch with float32
inputs; of the peers (`peer_kernels.py`). The ratios are those of the better torch time of the dense weight to the kernel.
The shares are those of the read ceiling that the packed weight takes at batch 1, and of the ceilings of products at larger
batches. The calls of a row take turns. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter

import peer_kernels
import torch

from compress.kernels import dispatch
from compress.kernels.cpu.packed import PackedCodes
from compress.native.library import instruction_set, library
from compress.numerics.hadamard import largest_block
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.gaussian_codes import first_table
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.lattice import count_bytes
from compress.numerics.sparse.positions import Kept
from compress.weights.base import InputTransform, WeightPart
from compress.weights.codebook import CodebookPart
from compress.weights.codes import CodesPart
from compress.weights.dense import DensePart
from compress.weights.lattice import LatticePart
from compress.weights.low_rank import LowRankPart
from compress.weights.outliers import OutliersPart
from compress.weights.pairs import PairsPart
from compress.weights.sparse import SparsePart
from compress.weights.transforms.hadamard import Hadamard
from compress.weights.transforms.rounding import InputRounding
from compress.weights.trellis import TrellisPart, TrellisScheme

ROUNDS, SECONDS = 30, 0.4  # calls of each at most, and the time that they may take


def medians(calls: dict[str, Callable[[], object]]) -> dict[str, float]:
    """Median microseconds of each call; they take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    begin = perf_counter()
    for i in range(ROUNDS):
        for name, call in calls.items():
            start = perf_counter()
            call()
            found[name].append(1e6 * (perf_counter() - start))
        if i >= 4 and perf_counter() - begin > SECONDS * len(calls):
            break
    return {name: statistics.median(times) for name, times in found.items()}


def ceilings(threads: int) -> list[dict[str, float]]:
    """The limits of the machine on one thread and on all."""
    source = Path(__file__).with_name("ceilings.cpp")
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "ceilings")
        options = ["-O3", "-std=c++17", "-march=native", "-pthread"]
        subprocess.run(["c++", *options, str(source), "-o", program], check=True)
        counts = sorted({1, threads})
        return [json.loads(subprocess.run([program, str(n)], check=True, capture_output=True).stdout) for n in counts]


def medium(call: Callable[[], object]) -> object:
    """A call that may round float32 inputs to bfloat16."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        return call()
    finally:
        torch.set_float32_matmul_precision(before)


@dataclass(frozen=True)
class Layer:
    """What a layer multiplies by: a sum of parts, after transforms of its inputs."""

    parts: list[WeightPart]
    transforms: Sequence[InputTransform] = ()

    def product(self, x: torch.Tensor, rounding: InputRounding | None = None) -> torch.Tensor:
        """The output as the package computes it."""
        for transform in self.transforms:
            x = transform(x)
        return dispatch.linear(x, self.parts, rounding, None)

    def plain(self, x: torch.Tensor) -> torch.Tensor:
        """The output in plain torch."""
        with dispatch.plain_torch():
            return self.product(x)

    @property
    def size_bytes(self) -> int:
        """The bytes that kernels read of the weight; those of the parts where plain torch computes."""
        return sum(sum(tensor.nbytes for tensor in _read_of(part)) for part in self.parts)


def _read_of(part: WeightPart) -> list[torch.Tensor]:
    kernel = dispatch.kernel_for(part, torch.zeros(1, part.shape[1]), None)
    packed = None if kernel is None else part.prepared(kernel)
    tensors = packed.tensors if isinstance(packed, PackedCodes) else part.tensors().values()
    return [tensor for tensor in tensors if tensor is not None]


def compared(
    layer: Layer, dense: dict[str, torch.Tensor], batch: int, rounding: InputRounding, peers: peer_kernels.Calls
) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of each call for a batch; and the same rounded, with ratios to the better torch time."""
    calls: dict[str, Callable[[], object]] = {}
    for name, weight in dense.items():
        x = torch.randn(batch, weight.shape[1]).to(weight.dtype)
        calls[f"torch_{name}"] = partial(torch.nn.functional.linear, x, weight)
        calls[f"kernel_{name}"] = partial(layer.product, x)
    x = torch.randn(batch, weight.shape[1])
    calls["plain_torch"] = partial(layer.plain, x)
    calls["kernel_medium"] = partial(medium, partial(layer.product, x))
    if all(dispatch.kernel_for(part, x, rounding) for part in layer.parts):
        calls["kernel_int8_inputs"] = partial(layer.product, x, rounding)
    with torch.no_grad():
        times = medians(calls | peers)
    best = min(times["torch_float32"], times["torch_bfloat16"])
    ratios = {name.replace("kernel", "ratio"): round(best / times[name], 2) for name in times if "kernel" in name}
    return times, {name: round(value, 1) for name, value in times.items()} | ratios


BOOKS = {"dictionary": (4, 1, True), "bytes": (8, 1, True), "books": (8, 4, False)}
"""Weights that are looked up: bits of an index, weights of a run, and whether each row has a table of its own."""


POINTS = {"lattice2": 2, "lattice3": 3, "lattice4": 4}
"""Random points of E8P, with so many bits per weight."""


WALKS = {
    "trellis2": ("3inst", 2),
    "trellis4": ("3inst", 4),
    "trellis2-1mad": ("1mad", 2),
    "trellis2-hyb": ("hyb", 2),
    "trellis1.5-hyb": ("hyb", 1.5),
}
"""Random walks through a trellis of 2^12 states: the code of their values, and bits per weight."""


def books_of(rows: int, width: int, grid: str) -> WeightPart:
    """Random indexes, as squeezellm with 4 bits and aqlm with one 8-bit index for 4 weights have."""
    bits, length, own = BOOKS[grid]
    indices = torch.randint(2**bits, (rows, width // length, 1))
    books = torch.randn(rows if own else 1, 1, 2**bits, length).bfloat16()
    return CodebookPart.of(indices, books, None if own else torch.ones(rows).bfloat16())


def points_of(rows: int, width: int, bits: int, rotated: int | None = None) -> WeightPart:
    """Random points, as quip_sharp has."""
    codes = torch.randint(256, (rows, width // 8, count_bytes(bits)), dtype=torch.uint8)
    return LatticePart.of(codes, torch.ones(rows).bfloat16(), bits, rotated)


def walks_of(rows: int, width: int, grid: str) -> WeightPart:
    """Random walks in tiles of 16 x 16, as qtip has."""
    code, bits = WALKS[grid]
    scheme = TrellisScheme(bits, 12, code)
    codes = torch.randint(256, (rows // 16, width // 16 * scheme.tile_bytes), dtype=torch.uint8)
    table = {"table": first_table().bfloat16()} if code == "hyb" else {}
    return TrellisPart(scheme, (rows, width), {"codes": codes, "scale": torch.ones(rows).bfloat16(), **table})


def rotated_of(weight: torch.Tensor, outputs: bool) -> Layer:
    """Random points of 2 bits with the transform of their inputs, as quip_sharp has; outputs: of their outputs, too."""
    rows, width = weight.shape
    part = points_of(rows, width, 2, largest_block(rows) if outputs else None)
    return Layer([part], [Hadamard.of(largest_block(width), 0, (rows, width))])


def halves_of(weight: torch.Tensor) -> WeightPart:
    """2:4: the larger half of the weights alone, in bfloat16."""
    mask = torch.zeros_like(weight, dtype=torch.bool)
    fours = weight.abs().unflatten(1, (-1, 4))
    mask.unflatten(1, (-1, 4)).scatter_(2, fours.topk(2).indices, True)
    return SparsePart.of(DensePart.of((weight * mask).bfloat16()), Kept.of(mask, (2, 4)))


def pairs_of(weight: torch.Tensor) -> WeightPart:
    """Random pairs without outliers, as olive has; their values do not matter to the time."""
    return PairsPart.of(torch.randint(8, weight.shape), torch.ones(len(weight), 1).bfloat16(), "channel")


def codes_of(weight: torch.Tensor, grid: str, group: int = 64) -> WeightPart:
    """Codes in groups, or in those of the grid."""
    return CodesPart.of(quantize(weight, GRIDS[grid], GRIDS[grid].group_size or group))


def low_rank_of(weight: torch.Tensor, rank: int = 64) -> WeightPart:
    """Two bfloat16 factors, as lorc has in addition to codes."""
    rows, width = weight.shape
    return LowRankPart.of(*(DensePart.of(torch.randn(*size).bfloat16()) for size in ((rank, width), (rows, rank))))


def outliers_of(weight: torch.Tensor, share: float, by_column: bool) -> WeightPart:
    """Some columns, as owq has, or some weights, as spqr has, in bfloat16."""
    if by_column:
        count = int(share * weight.shape[1])
        return OutliersPart.of_columns(torch.arange(count), weight[:, :count].bfloat16(), weight.shape[1])
    return OutliersPart.of_positions(weight.bfloat16(), torch.rand_like(weight) < share)


def layer_of(weight: torch.Tensor, grid: str) -> Layer:
    """A layer of codes on a grid, or of what KINDS names."""
    rows, width = weight.shape
    if grid in BOOKS:
        return Layer([books_of(rows, width, grid)])
    if grid in POINTS:
        return Layer([points_of(rows, width, POINTS[grid])])
    if grid in WALKS:
        return Layer([walks_of(rows, width, grid)])
    if grid in KINDS:
        return KINDS[grid](weight)
    return Layer([codes_of(weight, grid)])


KINDS: dict[str, Callable[[torch.Tensor], Layer]] = {
    "bfloat16": lambda w: Layer([DensePart.of(w.bfloat16())]),
    "2:4": lambda w: Layer([halves_of(w)]),
    "quip_sharp": lambda w: rotated_of(w, outputs=False),
    "quip_sharp-both": lambda w: rotated_of(w, outputs=True),
    "pairs": lambda w: Layer([pairs_of(w)]),
    "planes2": lambda w: Layer([codes_of(w, "binary", 128) for _ in range(2)]),
    "planes3": lambda w: Layer([codes_of(w, "binary", 128) for _ in range(3)]),
    "int4+low_rank": lambda w: Layer([codes_of(w, "int4"), low_rank_of(w)]),
    "int4+columns": lambda w: Layer([codes_of(w, "int4"), outliers_of(w, 0.01, True)]),
    "int4+positions": lambda w: Layer([codes_of(w, "int4"), outliers_of(w, 0.01, False)]),
}
"""Layers of other parts than codes alone: kept weights, points with the transforms of inputs (and of outputs), pairs of
outliers and victims, sums of binary planes, and codes with what is added to them (64 ranks, a hundredth of outliers).
"""


def shares(layer: Layer, batch: int, times: dict[str, float], limit: dict[str, float]) -> dict[str, float]:
    """Of the read ceiling for batch 1, else of the ceilings of products; for the inputs of each kind."""
    found: dict[str, float] = {}
    rows, width = layer.parts[0].shape
    for name, ceiling in (("float32", "float32"), ("bfloat16", "bfloat16"), ("int8_inputs", "int8")):
        if f"kernel_{name}" not in times or f"{ceiling}_gop_s" not in limit:
            continue
        thousands = 1e3 * times[f"kernel_{name}"]
        if batch == 1:
            found[f"share_read_{name}"] = layer.size_bytes / thousands / limit["read_gb_s"]
        else:
            operations = 2 * batch * rows * width
            found[f"share_{name}"] = operations / thousands / limit[f"{ceiling}_gop_s"]
    return {name: round(share, 2) for name, share in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "1536x576", "576x1536"], help="out x in")
    parser.add_argument("--grid", nargs="+", default=["int8", "int4", "int3", "int2", "2:4", *BOOKS, *POINTS, *WALKS])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 128, 512])
    parser.add_argument("--set", help="instruction set, such as avx2")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native = library()
    if native is None:
        raise SystemExit("the kernels were not built; install the package with a C++ compiler")
    if arguments.set and native.compress_use(arguments.set.encode()):
        raise SystemExit(f"{arguments.set} is not among {native.compress_instruction_sets().decode()}")
    print(json.dumps({"set": arguments.set or instruction_set()}), flush=True)
    limits = ceilings(arguments.threads)
    for found in limits:
        print(json.dumps(found), flush=True)
    rounding = InputRounding.of(GRIDS["int8"])
    for shape in arguments.shape:
        rows, width = map(int, shape.split("x"))
        weight = torch.randn(rows, width) * 0.02
        dense = {"float32": weight, "bfloat16": weight.bfloat16()}
        for grid in arguments.grid:
            layer = layer_of(weight, grid)
            bits = GRIDS[grid].bits if grid in GRIDS and grid.startswith("int") else 0
            for batch in arguments.batch:
                peers = peer_kernels.products(weight, bits, batch, arguments.threads)
                times, row = compared(layer, dense, batch, rounding, peers)
                row |= shares(layer, batch, times, limits[-1])
                print(json.dumps({"shape": shape, "grid": grid, "batch": batch} | row), flush=True)


if __name__ == "__main__":
    main()
