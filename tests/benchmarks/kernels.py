"""CPU kernels against torch: medians of a product's time, in one run, with the ceilings of the machine.

    python tests/benchmarks/kernels.py [--threads N] [--shape 4096x4096] [--batch 1 8 128] [--set avx2]

Prints the instruction set, the read bandwidth (sum of a large tensor) and torch's float32 and bfloat16 products per
second; then a row per shape, grid and batch: microseconds of torch in float32 and bfloat16, of the kernel with float32
and bfloat16 inputs, and with inputs rounded to int8; the ratio of the better torch time to the kernel; and the share of the
read bandwidth that the packed weight takes at batch 1. The calls of a row take turns. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch

from compress.kernels import dispatch
from compress.kernels.cpu import KERNEL
from compress.kernels.cpu.library import instruction_set, library
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.weights.codes import CodesPart
from compress.weights.transforms.rounding import InputRounding

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


def ceilings() -> dict[str, float]:
    """GB/s of reading, and Gop/s of torch's products of 1024 x 1024 matrices."""
    data = torch.ones(1 << 26)
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    a16, b16 = a.bfloat16(), b.bfloat16()
    times = medians({"read": lambda: data.sum(), "float32": lambda: a @ b, "bfloat16": lambda: a16 @ b16})
    return {"read_gb_s": data.nbytes / times["read"] / 1e3} | {
        f"torch_{name}_gop_s": 2 * 1024**3 / times[name] / 1e3 for name in ("float32", "bfloat16")
    }


def compared(
    part: CodesPart, dense: dict[str, torch.Tensor], batch: int, rounding: InputRounding
) -> tuple[dict[str, float], dict[str, float]]:
    """Median microseconds of each call for a batch; and the same rounded, with ratios to the better torch time."""
    calls: dict[str, Callable[[], object]] = {}
    for name, weight in dense.items():
        x = torch.randn(batch, weight.shape[1]).to(weight.dtype)
        calls[f"torch_{name}"] = partial(torch.nn.functional.linear, x, weight)
        calls[f"kernel_{name}"] = partial(dispatch.linear, x, [part], None, None)
    x = torch.randn(batch, part.shape[1])
    if KERNEL.supports(part, x, rounding):
        calls["kernel_int8_inputs"] = partial(dispatch.linear, x, [part], rounding, None)
    with torch.no_grad():
        times = medians(calls)
    best = min(times["torch_float32"], times["torch_bfloat16"])
    ratios = {name.replace("kernel", "ratio"): round(best / times[name], 2) for name in times if "kernel" in name}
    return times, {name: round(value, 1) for name, value in times.items()} | ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "1536x576", "576x1536"], help="out x in")
    parser.add_argument("--grid", nargs="+", default=["int8", "int4", "int3", "int2"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8, 128, 512])
    parser.add_argument("--set", help="instruction set, such as avx2")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    native = library()
    if native is None:
        raise SystemExit("the kernels were not built; install the package with a C++ compiler")
    if arguments.set and native.compress_use(arguments.set.encode()):
        raise SystemExit(f"{arguments.set} is not among {native.compress_instruction_sets().decode()}")
    limit = ceilings()
    facts = {"set": arguments.set or instruction_set(), "threads": arguments.threads}
    print(json.dumps(facts | {name: round(value, 1) for name, value in limit.items()}), flush=True)
    rounding = InputRounding.of(GRIDS["int8"])
    for shape in arguments.shape:
        rows, width = map(int, shape.split("x"))
        weight = torch.randn(rows, width) * 0.02
        dense = {"float32": weight, "bfloat16": weight.bfloat16()}
        for grid in arguments.grid:
            part = CodesPart.of(quantize(weight, GRIDS[grid], GRIDS[grid].group_size or 64))
            packed = part.prepared(KERNEL)
            for batch in arguments.batch:
                times, row = compared(part, dense, batch, rounding)
                if batch == 1:
                    speed = (packed.words.nbytes + packed.scale.nbytes) / times["kernel_float32"] / 1e3
                    row["share_of_bandwidth"] = round(speed / limit["read_gb_s"], 2)
                print(json.dumps({"shape": shape, "grid": grid, "batch": batch} | row), flush=True)


if __name__ == "__main__":
    main()
