"""Seconds that GPTQ takes per layer, apart from forward passes: the factorization of the Hessian, and the sweep.

    python tests/benchmarks/gptq_sweep.py [--shapes 576x576 1536x576 576x1536] [--repeat 5]

Shapes are out x in. Layers of one input (q, k, v; gate, up) share one factorization; it is timed by itself.
The least of `repeat` measurements of process time with one thread is printed, one JSON line per shape:

    shape, act_order, symmetric, factor_ms, sweep_ms
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from copy import copy
from time import process_time

import torch

from compress.passes.contract.layers import Layer
from compress.passes.contract.observers import Gram
from compress.passes.quantize.gptq import GPTQ


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["576x576", "1536x576", "576x1536"])
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for shape in arguments.shapes:
        for order in ("none", "static"):
            for symmetric in (True, False):
                pass_ = GPTQ(weights="int4", group_size=arguments.group_size, act_order=order, symmetric=symmetric)
                print(json.dumps(measure(pass_, *map(int, shape.split("x")), arguments.repeat)), flush=True)


def measure(pass_: GPTQ, rows: int, width: int, repeat: int) -> dict[str, object]:
    weight, seen = problem(rows, width)
    layer = Layer("layer", None, torch.bfloat16, lambda *_, **__: None)
    order = None if pass_.act_order == "none" else seen.hessian.diagonal().argsort(descending=True, stable=True)

    def refactor() -> None:
        copy(seen).factor(pass_.regularization, order)  # the factor is kept by the copy

    factor_ms = least(refactor, repeat)
    sweep_ms = least(lambda: pass_.codes(weight, seen, layer), repeat)
    facts = {"shape": f"{rows}x{width}", "act_order": pass_.act_order, "symmetric": pass_.symmetric}
    return facts | {"factor_ms": factor_ms, "sweep_ms": sweep_ms}


def problem(rows: int, width: int) -> tuple[torch.Tensor, Gram]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2 * width, width, generator=generator) + torch.randn(2 * width, 1, generator=generator)
    seen = Gram(width, torch.device("cpu"))
    seen.update(inputs)
    return torch.randn(rows, width, generator=generator), seen


def least(work: Callable[[], object], repeat: int) -> float:
    """Milliseconds of process time."""
    times = []
    for _ in range(repeat):
        begin = process_time()
        work()
        times.append(process_time() - begin)
    return round(min(times) * 1000, 1)


if __name__ == "__main__":
    main()
