"""GPU kernels against torch in bfloat16, and torchao where it is installed: correctness, then medians of times, in one run.

    python tests/benchmarks/gpu_kernels.py [--shape 4096x4096] [--batch 1 16 512] [--scheme W4A16 W8A8]

Prints the GPU and its ceilings as measured here: GB/s of reading, Tflop/s of bfloat16 products, Top/s of int8 products. Then a
row per shape, scheme and batch: the largest error relative to the largest output, microseconds of torch, of the kernel and of
torchao, the ratio of torch to the kernel, and the kernel's share of the read ceiling (by the bytes of the weight) and of the
ceiling of products. An error above that of the dtype ends the run. Before every timed call, the cache of the GPU is overwritten.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from compress.kernels import dispatch
from compress.numerics.quant.codes import GroupSize, quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import Kept
from compress.weights.base import WeightPart
from compress.weights.codes import CodesPart
from compress.weights.dense import DensePart
from compress.weights.sparse import SparsePart
from compress.weights.transforms.rounding import InputRounding

ROUNDS, WARM = 30, 5  # calls that are timed, and calls before them
CACHE = 256 << 20  # bytes, more than the cache of any GPU
LARGEST_ERROR = 2e-2  # of bfloat16
SCHEMES: dict[str, tuple[str, GroupSize, bool, str]] = {  # grid, group, symmetric, grid of the inputs
    "W4A16": ("int4", 128, True, ""), "W4A16_ASYM": ("int4", 128, False, ""), "W3A16": ("int3", 128, True, ""),
    "W8A16": ("int8", "channel", True, ""), "W8A8": ("int8", "channel", True, "int8"), "W4A8": ("int4", 128, True, "int8"),
    "FP8": ("fp8_e4m3", "channel", True, "fp8_e4m3"), "FP8A16": ("fp8_e4m3", "channel", True, ""),
    "NVFP4A16": ("nvfp4", 16, True, ""), "MXFP4A16": ("mxfp4", 32, True, ""), "NF4A16": ("nf4", 64, True, ""),
}  # fmt: skip
PEERS = {"W4A16": ("Int4WeightOnlyConfig", {"group_size": 128}), "W8A16": ("Int8WeightOnlyConfig", {}),
         "W8A8": ("Int8DynamicActivationInt8WeightConfig", {}), "FP8": ("Float8DynamicActivationFloat8WeightConfig", {}),
         "FP8A16": ("Float8WeightOnlyConfig", {})}  # fmt: skip
"""The configurations of torchao that compute the same."""


def median(call: Callable[[], object]) -> float:
    """Median microseconds of a call on the GPU, with nothing of it in the cache."""
    cache, found = torch.empty(CACHE, dtype=torch.int8, device="cuda"), []
    for i in range(WARM + ROUNDS):
        cache.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        if i >= WARM:
            found.append(1e3 * start.elapsed_time(end))
    return statistics.median(found)


def ceilings() -> dict[str, float]:
    """The limits of the GPU, as torch reaches them."""
    large = torch.empty(1 << 28, dtype=torch.float32, device="cuda").normal_()
    found = {"read_gb_s": large.nbytes / 1e3 / median(large.sum)}
    size = 8192
    work = 2 * size**3 / 1e6  # of one microsecond at 10^12 operations per second
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    found["bfloat16_tflop_s"] = work / median(partial(torch.mm, a, b))
    codes = [torch.randint(-127, 128, (size, size), device="cuda", dtype=torch.int8) for _ in range(2)]
    found["int8_top_s"] = work / median(partial(torch._int_mm, codes[0], codes[1].T))
    return {name: round(value, 1) for name, value in found.items()}


def part_of(weight: torch.Tensor, scheme: str) -> tuple[WeightPart, InputRounding | None]:
    """The weight and the rounding of inputs of a scheme; "2:4": the larger half of the weights, in bfloat16."""
    if scheme == "2:4":
        mask = torch.zeros_like(weight, dtype=torch.bool)
        mask.unflatten(1, (-1, 4)).scatter_(2, weight.abs().unflatten(1, (-1, 4)).topk(2).indices, True)
        return SparsePart.of(DensePart.of((weight * mask).bfloat16()), Kept.of(mask, (2, 4))).cuda(), None
    grid, group, symmetric, inputs = SCHEMES[scheme]
    part = CodesPart.of(quantize(weight, GRIDS[grid], group, symmetric)).in_storage(torch.bfloat16)
    return part.cuda(), InputRounding.of(GRIDS[inputs]) if inputs else None


def peer(weight: torch.Tensor, scheme: str) -> torch.nn.Module | None:
    """A linear of torchao, or None."""
    if scheme not in PEERS or importlib.util.find_spec("torchao") is None:
        return None
    name, options = PEERS[scheme]
    quantization: Any = importlib.import_module("torchao.quantization")
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="cuda", dtype=torch.bfloat16)
    linear.weight.data.copy_(weight)
    quantization.quantize_(linear, getattr(quantization, name)(**options))
    return linear


@torch.no_grad()
def row(weight: torch.Tensor, scheme: str, batch: int, limits: dict[str, float]) -> dict[str, Any]:
    """Error, times and shares of one scheme and batch."""
    part, rounding = part_of(weight, scheme)
    x = torch.randn(batch, weight.shape[1], device="cuda", dtype=torch.bfloat16)
    kernel = dispatch.kernel_name(part, x, rounding)
    call = partial(dispatch.linear, x, [part], rounding, None)
    wanted = (x if rounding is None else rounding(x)).double() @ part.dense(torch.float32).double().T
    error = float((call().double() - wanted).abs().max() / wanted.abs().max())
    if error > LARGEST_ERROR:
        raise SystemExit(f"{scheme}, batch {batch}: the error is {error:.2g} of the largest output")
    times = {
        "torch": median(partial(torch.nn.functional.linear, x, weight.to("cuda", torch.bfloat16))),
        "kernel": median(call),
    }
    linear = peer(weight, scheme)
    if linear is not None:
        times["torchao"] = median(partial(linear, x))
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
            for batch in arguments.batch:
                print(json.dumps({"shape": shape} | row(weight, scheme, batch, limits)), flush=True)


if __name__ == "__main__":
    main()
