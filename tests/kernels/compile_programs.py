"""Compile the Triton programs of some products for GPUs that need not be there, and print what they take, as JSON lines.

    python tests/kernels/compile_programs.py CAPABILITY... < CASES

A case is {"grid": name, "group": size, "rounding": name or "", "dtype": name, "batch": n, "zeros": bool, "rows": n, "shared": n}. It runs in a process
without Triton's interpreter. The last two may be left out. Tensors have no data, and every launch compiles instead.
"""

import inspect
import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from compress.kernels.triton import codes, launch
from compress.layers.parts.codes import CodesPart
from compress.numerics.dtypes import DTYPES
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS

TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
}

PROGRAMS = launch.programs()


def type_of(value):
    if isinstance(value, torch.Tensor):
        return f"*{TYPES[value.dtype]}"
    return "fp32" if isinstance(value, float) else "i32"


def resources(cubin):
    """Registers per thread, and bytes of registers that are spilled to memory, from the tool that Triton brings."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {
        key: int(re.search(rf"{name}:(\d+)", text)[1]) for key, name in (("registers", "REG"), ("spilled", "STACK"))
    }


class Launch:
    """A program, to be called as `program[grid](...)`."""

    def __init__(self, start):
        self.start = start

    def __getitem__(self, grid):
        return self.start


class Compiler:
    """Stands for the module of the programs: a launch compiles the program."""

    def __init__(self, module, target):
        self.module, self.target, self.found = module, target, []
        self.tl = module.tl

    def __getattr__(self, name):
        program = getattr(self.module, name)

        def start(*arguments, num_warps=4, num_stages=2, enable_fp_fusion=True, **constants):
            names = list(inspect.signature(program.fn).parameters)
            inputs = dict(zip(names, arguments, strict=False))
            ones = {item: value for item, value in inputs.items() if type(value) is int and value == 1}
            constants |= ones  # as Triton does
            inputs = {item: value for item, value in inputs.items() if item not in ones}
            signature = {item: type_of(inputs[item]) if item in inputs else "constexpr" for item in names}
            exact = [item.name for item in program.params if not item.do_not_specialize]
            full = [
                i
                for i, item in enumerate(names)
                if item in inputs
                and not isinstance(inputs[item], float)
                and (isinstance(inputs[item], torch.Tensor) or (item in exact and inputs[item] % 16 == 0))
            ]
            source = ASTSource(program, signature, constants, {(i,): [["tt.divisibility", 16]] for i in full})
            options = {"num_warps": num_warps, "num_stages": num_stages, "enable_fp_fusion": enable_fp_fusion}
            completed = triton.compile(source, target=self.target, options=options)
            self.found.append(
                {"program": name, "shared": completed.metadata.shared, **resources(completed.asm["cubin"])}
            )

        return Launch(start)


def compiled(case, capability):
    """What the programs of one product take."""
    grid = GRIDS[case["grid"]]
    weight = torch.randn(case.get("rows", 128), 512)
    part = CodesPart.of(quantize(weight, grid, case["group"], not case["zeros"]))
    packed = codes.wrapped(part.to("meta"))
    compiler = Compiler(PROGRAMS, GPUTarget("cuda", capability, 32))
    launch.programs = lambda: compiler
    launch.shared_memory = lambda device: case.get("shared", 99 << 10)  # bytes of a block; those of capability 8.9
    x = torch.empty(case["batch"], 512, dtype=DTYPES[case["dtype"]], device="meta")
    codes.product(x, packed, torch.empty(len(weight), dtype=x.dtype, device="meta"), case["rounding"])
    return compiler.found


def main():
    for line in sys.stdin:
        for capability in map(int, sys.argv[1:]):
            for actual in compiled(json.loads(line), capability):
                print(json.dumps({**json.loads(line), "capability": capability, **actual}), flush=True)


if __name__ == "__main__":
    main()
