"""CPU kernels against torch, and ONNX Runtime and ggml where they are installed: medians of times, in one run.

    GOMP_SPINCOUNT=1000 python eval/benchmarks/kernels.py [--threads N] [--shape 4096x4096] [--batch 1 8 128] [--set avx2]

Prints the instruction set and the ceilings of the machine on one and on all threads (`ceilings.cpp`, compiled here): GB/s
of reading, Gop/s of float32, bfloat16 and int8 products. Then a row per shape, grid and batch: microseconds of torch in
float32 and bfloat16; of the kernel with float32 inputs, with float32 inputs that it may round to bfloat16 (torch's matmul
precision "medium"), with bfloat16 inputs, and with inputs rounded to int8; of the layer itself in plain torch with float32
inputs; of the peers (`peer_kernels.py`). The ratios are those of the better torch time of the dense weight to the kernel.
The shares are those of the ceilings of products; at batch 1, where reading the packed weight rules, of `read_gb_s`, what
the machine reads at that time: it is measured in turns with the calls, since it changes on a machine that others use.

Up to 8 rows of inputs, each call is made on one copy of the weight after the other, 128 MiB of them and at most 32, as the
layers of a model follow each other: no weight is in a cache when it is read, and no thread has gone to sleep. The calls of
a row take turns. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import copy
import ctypes
import json
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import peer_kernels
import torch

from compress.kernels import dispatch
from compress.kernels.cpu.packed import PackedCodes
from compress.layers.base import InputTransform, WeightPart
from compress.layers.parts.codebook import CodebookPart
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.lattice import LatticePart
from compress.layers.parts.low_rank import LowRankPart
from compress.layers.parts.outliers import OutliersPart
from compress.layers.parts.pairs import PairsPart
from compress.layers.parts.sparse import SparsePart
from compress.layers.parts.trellis import TrellisPart, TrellisScheme
from compress.layers.transforms.hadamard import Hadamard
from compress.layers.transforms.rounding import InputRounding
from compress.native.library import instruction_set, library
from compress.numerics.hadamard import largest_block
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.gaussian_codes import first_table
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.lattice import count_bytes
from compress.numerics.sparse.positions import PackedMask

ROUNDS, SECONDS = 30, 0.4  # calls of each at most, and the time that they may take
FEW = 8  # rows of inputs up to which reading the weight may take longest
CHAIN_BYTES, MOST_COPIES = 128 << 20, 32

Chain = Sequence[Callable[[], object]]
"""The same call on each copy of a weight."""


def copies_of(layer: Layer | torch.Tensor, batch: int) -> list[Any]:
    """As many copies of a layer or a dense weight as no cache holds; with many rows of inputs, itself alone."""
    size = layer.nbytes if isinstance(layer, torch.Tensor) else layer.stored_bytes
    count = min(MOST_COPIES, -(-CHAIN_BYTES // size)) if batch <= FEW else 1
    return [layer, *(copy.deepcopy(layer) for _ in range(count - 1))]


def medians(chains: dict[str, Chain], read: Callable[[], float] | None) -> dict[str, float]:
    """Median microseconds of a call of each chain, and GB/s of `read`, if any; all take turns."""
    found: dict[str, list[float]] = {name: [] for name in chains}
    rates: list[float] = []
    for chain in chains.values():
        for call in chain:
            call()
    begin = perf_counter()
    for i in range(ROUNDS):
        if read is not None:
            rates.append(read())
        for name, chain in chains.items():
            start = perf_counter()
            for call in chain:
                call()
            found[name].append(1e6 * (perf_counter() - start) / len(chain))
        if i >= 4 and perf_counter() - begin > SECONDS * len(chains):
            break
    if read is not None:
        found["read_gb_s"] = rates
    return {name: statistics.median(times) for name, times in found.items()}


def ceilings(threads: int) -> tuple[list[dict[str, float]], Callable[[], float]]:
    """The limits of the machine on one thread and on all; and what reads once more on all, in GB/s."""
    source = str(Path(__file__).with_name("ceilings.cpp"))
    options = ["c++", "-O3", "-std=c++17", "-march=native", "-pthread", "-fPIC"]
    with tempfile.TemporaryDirectory() as folder:
        program, shared = str(Path(folder) / "ceilings"), str(Path(folder) / "ceilings.so")
        subprocess.run([*options, source, "-o", program], check=True)
        subprocess.run([*options, "-shared", source, "-o", shared], check=True)
        read = ctypes.CDLL(shared).read_all
        read.restype = ctypes.c_double
        counts = sorted({1, threads})
        limits = [json.loads(subprocess.run([program, str(n)], check=True, capture_output=True).stdout) for n in counts]
    return limits, partial(read, threads)


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
    def stored_bytes(self) -> int:
        """The bytes of a checkpoint."""
        return sum(tensor.nbytes for part in self.parts for tensor in part.tensors().values())

    @property
    def size_bytes(self) -> int:
        """The bytes that kernels read of the weight; those of the parts where plain torch computes."""
        return sum(sum(tensor.nbytes for tensor in _read_of(part)) for part in self.parts)


def _read_of(part: WeightPart) -> list[torch.Tensor]:
    kernel = dispatch.kernel_for(part, torch.zeros(1, part.shape[1]), None)
    packed = None if kernel is None else part.prepared(kernel)
    tensors = packed.tensors if isinstance(packed, PackedCodes) else part.tensors().values()
    return [tensor for tensor in tensors if tensor is not None]


def peers_of(weight: torch.Tensor, bits: int, batch: int, threads: int, count: int) -> dict[str, Chain]:
    """The peers' calls, each on so many weights of its own."""
    found = [peer_kernels.products(weight, bits, batch, threads) for _ in range(count)]
    return {name: [calls[name] for calls in found] for name in found[0]}


def compared(
    layers: list[Layer],
    dense: dict[str, list[torch.Tensor]],
    batch: int,
    rounding: InputRounding,
    peers: dict[str, Chain],
    read: Callable[[], float],
) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of each call for a batch; and the same rounded, with ratios to the better torch time."""
    chains: dict[str, Chain] = {}
    for name, weights in dense.items():
        x = torch.randn(batch, weights[0].shape[1]).to(weights[0].dtype)
        chains[f"torch_{name}"] = [partial(torch.nn.functional.linear, x, weight) for weight in weights]
        chains[f"kernel_{name}"] = [partial(layer.product, x) for layer in layers]
    x = torch.randn(batch, dense["float32"][0].shape[1])
    chains["plain_torch"] = [partial(layers[0].plain, x)]
    chains["kernel_medium"] = [partial(medium, partial(layer.product, x)) for layer in layers]
    if all(dispatch.kernel_for(part, x, rounding) for part in layers[0].parts):
        chains["kernel_int8_inputs"] = [partial(layer.product, x, rounding) for layer in layers]
    with torch.no_grad():
        times = medians(chains | peers, read if batch == 1 else None)
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
"""Random paths through a trellis of 2^12 states: the code of their values, and bits per weight."""


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
    return SparsePart.of(DensePart.of((weight * mask).bfloat16()), PackedMask.of(mask, (2, 4)))


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
            found[f"share_read_{name}"] = layer.size_bytes / thousands / times["read_gb_s"]
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
        raise SystemExit(
            "this benchmark needs the kernels, which were not built; install the package with a C++ compiler"
        )
    if arguments.set and native.compress_use(arguments.set.encode()):
        raise SystemExit(f"{arguments.set} is not among {native.compress_instruction_sets().decode()}")
    print(json.dumps({"set": arguments.set or instruction_set()}), flush=True)
    limits, read = ceilings(arguments.threads)
    for found in limits:
        print(json.dumps(found), flush=True)
    rounding = InputRounding.of(GRIDS["int8"])
    for shape in arguments.shape:
        rows, width = map(int, shape.split("x"))
        weight = torch.randn(rows, width) * 0.02
        for grid in arguments.grid:
            bits = GRIDS[grid].bits if grid in GRIDS and grid.startswith("int") else 0
            for batch in arguments.batch:
                layers = copies_of(layer_of(weight, grid), batch)
                dense = {"float32": copies_of(weight, batch), "bfloat16": copies_of(weight.bfloat16(), batch)}
                peers = peers_of(weight, bits, batch, arguments.threads, len(layers))
                times, row = compared(layers, dense, batch, rounding, peers, read)
                row |= shares(layers[0], batch, times, limits[-1])
                print(json.dumps({"shape": shape, "grid": grid, "batch": batch} | row), flush=True)


if __name__ == "__main__":
    main()
