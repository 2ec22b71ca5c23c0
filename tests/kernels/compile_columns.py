"""Compile the Triton programs for columns for GPUs that need not be there, and print what they take, as JSON lines.

    python tests/kernels/compile_columns.py CAPABILITY... < CASES

A case is {"columns": n, "zeros": bool, "masked": bool, "descent": bool} of `round_columns`, or {"size": n, "zeros": bool} of
`sum_groups`; "tile": [rows, warps, leaf, before] tries another tile. As `compile_programs.py`, without Triton's interpreter.
"""

import json
import sys

import torch
from compile_programs import Compiler
from triton.backends.compiler import GPUTarget

from compress.native import gpu_columns
from compress.native.gpu_columns import ColumnTile

PROGRAMS = gpu_columns.programs()
LIMITS = (-8, 7)


def numbers(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


def rounding(columns, zeros, masked, descent, tile=None, rows=4096):
    """Launch `round_columns` as GPTQ does."""
    gpu_columns.TILE = gpu_columns.TILE if tile is None else ColumnTile(*tile)
    state, zero = numbers(columns, rows), numbers(columns, rows) if zeros else None
    keep = numbers(columns, rows, dtype=torch.bool) if masked else None
    old, pivots = (numbers(columns, rows), numbers(columns)) if descent else (None, None)
    gpu_columns.round_columns(
        state,
        numbers(columns, rows)[:, :columns],
        state,
        zero,
        keep,
        old,
        pivots,
        LIMITS,
        state,
        state,
        state,
        state if masked else None,
    )


def sums(size, zeros):
    """Launch `sum_groups` as the search for scales does."""
    scale = numbers(4096, 8)
    gpu_columns.sum_groups(
        numbers(4096, 8, size), numbers(8, size), scale, scale if zeros else None, LIMITS, [scale] * 3
    )


def main():
    for line in sys.stdin:
        for capability in map(int, sys.argv[1:]):
            compiler = Compiler(PROGRAMS, GPUTarget("cuda", capability, 32))
            gpu_columns.programs = lambda actual=compiler: actual
            case = json.loads(line)
            (sums if "size" in case else rounding)(**case)
            for actual in compiler.found:
                print(json.dumps({**case, "capability": capability, **actual}), flush=True)


if __name__ == "__main__":
    main()
