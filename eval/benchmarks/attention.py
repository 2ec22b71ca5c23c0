"""Attention of a prompt by the C++ library against torch's, in turns: medians of milliseconds.

    GOMP_SPINCOUNT=1000 python eval/benchmarks/attention.py [--threads 2] [--shape 9x3x512x64 32x8x512x128] [--rounds 21]

A shape: heads, heads of keys and values, tokens, width of a head. Prints the instruction set, and for each shape torch's
time in float32 and bfloat16 (causal) and with a mask in float32, the library's for the same, and the ratio of torch's best
time to each. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from time import perf_counter

import torch
from torch.nn.functional import scaled_dot_product_attention

from compress.kernels.cpu.attention import attend
from compress.native.library import available, instruction_set

SHAPES = "9x3x512x64", "9x3x2048x64", "32x8x512x128"


def medians(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of calls that take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            begin = perf_counter()
            call()
            if i:  # the first warms up
                found[name].append(1e3 * (perf_counter() - begin))
    return {name: statistics.median(times) for name, times in found.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--shape", nargs="+", default=SHAPES)
    parser.add_argument("--rounds", type=int, default=21)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    if not available():
        raise SystemExit(
            "this benchmark needs the kernels, which were not built; install the package with a C++ compiler"
        )
    print(json.dumps({"instruction_set": instruction_set(), "threads": given.threads}))
    for shape in given.shape:
        heads, groups, tokens, width = map(int, shape.split("x"))
        torch.manual_seed(0)
        q, k, v = torch.randn(1, heads, tokens, width), *torch.randn(2, 1, groups, tokens, width)
        whole = [q, *(one.repeat_interleave(heads // groups, 1) for one in (k, v))]
        seen = torch.ones(1, 1, tokens, tokens, dtype=torch.bool).tril()
        times = medians(
            {
                "torch float32": partial(scaled_dot_product_attention, *whole, is_causal=True),
                "torch bfloat16": partial(
                    scaled_dot_product_attention, *(one.bfloat16() for one in whole), is_causal=True
                ),
                "torch float32, mask": partial(scaled_dot_product_attention, *whole, attn_mask=seen),
                "library": partial(attend, q, k, v, None, True, width**-0.5),
                "library bfloat16": partial(attend, *(one.bfloat16() for one in (q, k, v)), None, True, width**-0.5),
                "library, mask": partial(attend, q, k, v, seen, False, width**-0.5),
            },
            given.rounds,
        )
        best = min(time for name, time in times.items() if "torch" in name)
        ratios = {f"{name}, ratio": round(best / time, 2) for name, time in times.items() if "library" in name}
        print(json.dumps({"shape": shape, **{name: round(time, 2) for name, time in times.items()}, **ratios}))


if __name__ == "__main__":
    main()
