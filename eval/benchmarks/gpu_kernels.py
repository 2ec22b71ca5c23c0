"""GPU kernels against torch in bfloat16, and torchao where it is installed: correctness, then medians of times, in one run.

    python eval/benchmarks/gpu_kernels.py [--shape 4096x4096] [--batch 1 16 512] [--scheme W4A16 W8A8]

Prints the GPU and its ceilings as measured here: GB/s of reading, Tflop/s of bfloat16 products, Top/s of int8 products. Then a
row per shape, scheme and batch: the largest error relative to the largest output, microseconds of torch, of the kernel and of
torchao, the ratio of torch to the kernel, and the kernel's share of the read ceiling (by the bytes of the weight) and of the
ceiling of products. Calls are timed in a CUDA graph of several calls, each with a weight of its own, so that none is in the
GPU's cache; `call` is the time of one call from Python. An error above that of the dtype ends the run.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from compress.kernels import dispatch
from compress.layers.base import WeightPart
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.parts.sparse import SparsePart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import GroupSize, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask

ROUNDS, WARM = 15, 3  # replays that are timed, and replays before them
CACHE = 256 << 20  # bytes, more than the cache of any GPU: the weights of the calls of a graph
LARGEST_ERROR = 2e-2  # of bfloat16
SCHEMES: dict[str, tuple[str, GroupSize, bool, str]] = {  # grid, group, symmetric, grid of the inputs
    "W4A16": ("int4", 128, True, ""),
    "W4A16_ASYM": ("int4", 128, False, ""),
    "W4A16_G32": ("int4", 32, True, ""),
    "W3A16": ("int3", 128, True, ""),
    "W8A16": ("int8", "channel", True, ""),
    "W8A8": ("int8", "channel", True, "int8"),
    "W4A8": ("int4", 128, True, "int8"),
    "FP8": ("fp8_e4m3", "channel", True, "fp8_e4m3"),
    "FP8A16": ("fp8_e4m3", "channel", True, ""),
    "NVFP4A16": ("nvfp4", 16, True, ""),
    "MXFP4A16": ("mxfp4", 32, True, ""),
    "NF4A16": ("nf4", 64, True, ""),
}
PEERS = {
    "W4A16": ("Int4WeightOnlyConfig", {"group_size": 128}),
    "W8A16": ("Int8WeightOnlyConfig", {}),
    "W8A8": ("Int8DynamicActivationInt8WeightConfig", {}),
    "FP8": ("Float8DynamicActivationFloat8WeightConfig", {}),
    "FP8A16": ("Float8WeightOnlyConfig", {}),
}
"""The configurations of torchao that compute the same."""


def events(call: Callable[[], object], rounds: int = ROUNDS, warm: int = WARM) -> float:
    """Median microseconds of a call on the GPU."""
    found = []
    for i in range(warm + rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= warm:
            found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found)


def replayed(calls: list[Callable[[], object]]) -> float:
    """Median microseconds of one of some calls, replayed as a CUDA graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return events(graph.replay) / len(calls)


def from_python(call: Callable[[], object]) -> float:
    """Microseconds of a call from Python, the work of the GPU included: of 50 calls one after the other."""
    call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(50):
        call()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / 50 * 1e6


def ceilings() -> dict[str, float]:
    """The limits of the GPU, as torch reaches them."""
    large = torch.empty(1 << 30, dtype=torch.float32, device="cuda").normal_()
    found = {"read_gb_s": large.nbytes / 1e3 / events(large.sum)}
    other = torch.empty_like(large)
    found["copy_gb_s"] = 2 * large.nbytes / 1e3 / events(partial(other.copy_, large))
    del large, other
    size = 8192
    work = 2 * size**3 / 1e6  # of one microsecond at 10^12 operations per second
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bfloat16_tflop_s"] = work / events(partial(torch.mm, a, b))
    codes = [torch.randint(-127, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(2)]
    found["int8_top_s"] = work / events(partial(torch._int_mm, codes[0], codes[1].T))
    return {name: round(value, 1) for name, value in found.items()}


def part_of(weight: torch.Tensor, scheme: str) -> tuple[WeightPart, InputRounding | None]:
    """The weight and the rounding of inputs of a scheme; "2:4": the larger half of the weights, in bfloat16."""
    if scheme == "2:4":
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask.unflatten(1, (-1, 4)).scatter_(2, weight.abs().unflatten(1, (-1, 4)).topk(2).indices, True)
        return SparsePart.of(DensePart.of((weight * mask).bfloat16()), PackedMask.of(mask, (2, 4))), None
    grid, group, symmetric, inputs = SCHEMES[scheme]
    part = CodesPart.of(quantize(weight, GRIDS[grid], group, symmetric)).in_storage(torch.bfloat16)
    return part, InputRounding.of(GRIDS[inputs]) if inputs else None


def copies(part: WeightPart) -> Sequence[WeightPart]:
    """So many parts like this one that they do not fit into the cache together, on the GPU."""
    size = sum(tensor.nbytes for tensor in part.tensors().values())
    return [copy.deepcopy(part).cuda() for _ in range(max(2, -(-CACHE // size)))]


def peer(weight: torch.Tensor, scheme: str) -> torch.nn.Module | None:
    """A linear of torchao, or None."""
    if scheme not in PEERS or importlib.util.find_spec("torchao") is None:
        return None
    name, options = PEERS[scheme]
    try:
        quantization: Any = importlib.import_module("torchao.quantization")
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
        linear.weight.data.copy_(weight)
        quantization.quantize_(linear, getattr(quantization, name)(**options))
    except Exception as error:  # it asks for further packages for some
        print(f"torchao {name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        return None
    return linear


def of_peer(weight: torch.Tensor, scheme: str, x: torch.Tensor) -> dict[str, float]:
    """Microseconds of torchao, or nothing; from Python where it rounds inputs, which no graph can capture."""
    linears = [peer(weight, scheme)]
    if linears[0] is None:
        return {}
    linears += [peer(weight, scheme) for _ in range(7)]
    try:
        calls: list[Callable[[], object]] = [partial(linear, x) for linear in linears if linear is not None]
        graph = "WeightOnly" in PEERS[scheme][0]
        return {"torchao": replayed(calls) if graph else statistics.mean(map(from_python, calls))}
    except Exception as error:
        print(f"torchao {scheme}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
        torch.cuda.synchronize()
        return {}


@torch.no_grad()
def row(
    weight: torch.Tensor,
    parts: Sequence[WeightPart],
    rounding: InputRounding | None,
    scheme: str,
    batch: int,
    limits: dict[str, float],
) -> dict[str, Any]:
    """Error, times and shares of one scheme and batch."""
    part = parts[0]
    x = torch.randn(batch, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    kernel = dispatch.kernel_name(part, x, rounding)
    calls: list[Callable[[], object]] = [partial(dispatch.linear, x, [each], rounding, None) for each in parts]
    wanted = (x if rounding is None else rounding(x)).double() @ part.dense(torch.float32).double().T
    error = float((dispatch.linear(x, [part], rounding, None).double() - wanted).abs().max() / wanted.abs().max())
    if not error <= LARGEST_ERROR:
        raise SystemExit(f"{scheme}, batch {batch}: the error is {error:.2g} of the largest output")
    dense = [weight.to("cuda", torch.bfloat16) for _ in range(max(2, -(-CACHE // (2 * weight.numel()))))]
    times = {
        "torch": replayed([partial(torch.nn.functional.linear, x, each) for each in dense]),
        "kernel": replayed(calls),
        "call": from_python(calls[0]),
    } | of_peer(weight, scheme, x)
    size = sum(tensor.nbytes for tensor in part.tensors().values())
    unit = "int8_top_s" if scheme == "W8A8" else "bfloat16_tflop_s"
    shares = {
        "ratio": times["torch"] / times["kernel"],
        "share_read": size / 1e3 / times["kernel"] / limits["read_gb_s"],
        "share_products": 2 * batch * weight.numel() / 1e6 / times["kernel"] / limits[unit],
    }
    numbers = {name: round(value, 2) for name, value in (times | shares).items()}
    return {"scheme": scheme, "batch": batch, "kernel_name": kernel, "error": float(f"{error:.2g}"), **numbers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shape", nargs="+", default=["4096x4096", "14336x4096", "4096x14336"], help="out x in")
    parser.add_argument("--scheme", nargs="+", default=[*SCHEMES, "2:4"], choices=[*SCHEMES, "2:4"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 2, 16, 128, 512])
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a GPU, and torch finds none")
    print(json.dumps({"gpu": torch.cuda.get_device_name()} | (limits := ceilings())), flush=True)
    for shape in arguments.shape:
        rows, width = map(int, shape.split("x"))
        weight = torch.randn(rows, width) * 0.02
        for scheme in arguments.scheme:
            part, rounding = part_of(weight, scheme)
            parts = copies(part)
            for batch in arguments.batch:
                print(json.dumps({"shape": shape} | row(weight, parts, rounding, scheme, batch, limits)), flush=True)


if __name__ == "__main__":
    main()
