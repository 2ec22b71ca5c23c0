"""Milliseconds of the passes' loops in C++ and in plain torch, in turns.

    python eval/benchmarks/loops.py [--threads 1] [--rounds 5] [--shape 576x576 1536x576 576x1536] [--code 3inst 2]

One row of a Markdown table per loop and shape: the medians, and how often C++ is faster. A sweep includes the products
between its parts, and so does the refinement; the search of paths is tail-biting, of 64 tiles of 256 weights.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch

from compress.native import columns
from compress.native import trellis as native_trellis
from compress.native.library import instruction_set
from compress.numerics.linalg import inverse_factor
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.gaussian_codes import values_of
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.refine import refined
from compress.numerics.quant.rounding import GridOptions, round_columns
from compress.numerics.quant.trellis import Trellis, Viterbi, decode, pack
from compress.numerics.quant.weighted_search import WeightedSearch

SHAPES = ("576x576", "1536x576", "576x1536")
TRELLISES = (("3inst", 1), ("3inst", 2), ("3inst", 3), ("3inst", 4), ("hyb", 1.5), ("hyb", 2))
INT4 = GRIDS["int4"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--shape", nargs="+", default=SHAPES, help="out x in")
    parser.add_argument("--code", nargs=2, metavar=("CODE", "BITS"), help="of the trellis; default: all of TRELLISES")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    torch.manual_seed(0)
    print(f"{instruction_set()}, threads {given.threads}\n")
    print("| loop | shape | plain torch, ms | C++, ms | ratio |\n|---|---|---|---|---|")
    for shape in given.shape:
        rows, width = map(int, shape.split("x"))
        for name, compute in of_columns(rows, width).items():
            show(name, f"{rows} x {width}", compute, given.rounds)
    for code, bits in [(given.code[0], float(given.code[1]))] if given.code else TRELLISES:
        for name, compute in of_trellis(code, bits).items():
            show(f"{name}, {code}", f"{bits} bits", compute, given.rounds)


def of_columns(rows: int, width: int) -> dict[str, Callable[[], object]]:
    """The loops over the columns of a weight."""
    weight, inputs = torch.randn(rows, width), torch.randn(2 * width, width)
    hessian = inputs.T @ inputs / len(inputs) + 0.01 * torch.eye(width)
    order = torch.arange(width)
    factor, _ = inverse_factor(hessian, 0.01)
    options = GridOptions(INT4, 64, True, "absmax", torch.float32)
    codes, parts = quantize(weight, INT4, 64), weight.view(rows, -1, 64)
    search = lambda: WeightedSearch(parts, torch.ones(parts.shape[1:]), INT4, True, torch.float32, None, True).best()  # noqa: E731
    return {
        "sweep": lambda: round_columns(weight, factor, options, order=order),
        "refinement": lambda: refined(weight, codes, hessian, 1, torch.float32, order=order, signed=True),
        "search for scales": search,
    }


def of_trellis(code: str, bits: float) -> dict[str, Callable[[], object]]:
    """The search of paths with 2^12 states, and their values."""
    values = values_of(code, 12, torch.randn(512, 2) if code == "hyb" else None)  # type: ignore[arg-type]
    trellis = Trellis(12, bits, values.shape[1])
    sequences, search = torch.randn(64, 256), Viterbi(values, trellis)
    codes = pack(search.tail_biting(sequences), trellis).repeat(50, 1)
    return {
        "search of paths": lambda: search.tail_biting(sequences),
        "values of 3200 tiles": lambda: decode(codes, values, trellis),
    }


def show(name: str, shape: str, compute: Callable[[], object], rounds: int) -> None:
    """Measure in turns, and print a row."""
    found: tuple[list[float], list[float]] = [], []
    for _ in range(rounds + 1):  # the first round warms up
        no = {"new": lambda *_: False}
        with (
            patch.object(columns, "usable", **no),
            patch.object(native_trellis, "can_search", **no),
            patch.object(native_trellis, "can_decode", **no),
        ):
            found[0].append(seconds(compute))
        found[1].append(seconds(compute))
    plain, native = (1000 * median(each[1:]) for each in found)
    print(f"| {name} | {shape} | {plain:.1f} | {native:.1f} | {plain / native:.1f} |", flush=True)


def seconds(compute: Callable[[], object]) -> float:
    begin = time.perf_counter()
    compute()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
