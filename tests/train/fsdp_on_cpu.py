"""Runs a script or `-m module` as FSDP is run on GPUs, but on the CPU, for which accelerate does not set it up by itself.

accelerate launch --use_fsdp --fsdp_version 2 --num_processes 2 tests/train/fsdp_on_cpu.py SCRIPT [ARGUMENT ...]

Of every model that is trained, the first process tells on stderr what share of its numbers it holds.
"""

import runpy
import sys

from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType

from compress.train import student


def main() -> None:
    assert PartialState(cpu=True).distributed_type == DistributedType.MULTI_CPU
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # for these, and not for CPUs
    accelerator, split = Accelerator(cpu=True), student.split
    assert accelerator.distributed_type == DistributedType.FSDP

    def record(model, *others):
        split(model, *others)
        held = sum(p.to_local().numel() for p in model.parameters()), sum(p.numel() for p in model.parameters())
        if accelerator.is_main_process:
            print(f"split: {held[0] / held[1]:.2f}", file=sys.stderr)

    student.split = record
    del sys.argv[0]
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
