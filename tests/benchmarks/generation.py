"""Decoding and prefill of packed checkpoints against transformers and torchao, in turns in one run.

    python tests/benchmarks/generation.py DENSE PACKED... [--compile] [--torchao]

DENSE: a folder with the dense model, measured by transformers in float32 and bfloat16. PACKED: folders of `compress run`.
--torchao: also int8 and int4 weights of torchao, if it is installed. Prints the table of `compress bench`, and tokens per
second relative to the better dense dtype. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from compress.checkpoint.sources.load import load
from compress.cli.show import print_table
from compress.decode.acceleration import compile_generation
from compress.evaluate import speed


def dense(folder: str, dtype: torch.dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval().requires_grad_(False)


def torchao_models(folder: str):
    from torchao.quantization import Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
    from torchao.quantization.granularity import PerGroup

    kinds = {"torchao int8": Int8WeightOnlyConfig(), "torchao int4": IntxWeightOnlyConfig(torch.int4, PerGroup(64))}
    for name, config in kinds.items():
        model = dense(folder, torch.bfloat16)
        quantize_(model, config)
        yield name, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dense")
    parser.add_argument("packed", nargs="+")
    parser.add_argument("--compile", action="store_true", help="also measure every model compiled")
    parser.add_argument("--torchao", action="store_true")
    args = parser.parse_args()
    models = {f"dense {name}": dense(args.dense, getattr(torch, name)) for name in ("float32", "bfloat16")}
    models |= {Path(folder).name: load(folder)[0] for folder in args.packed}
    models |= dict(torchao_models(args.dense)) if args.torchao else {}
    if args.compile:
        models = {f"{name} compiled": model for name, model in models.items()}
        for model in models.values():
            compile_generation(model)
    found = speed.measure(models, {})
    title = f"{found.instruction_set} kernels, threads: {found.threads}, read bandwidth: {found.read_bandwidth / 1e9:.1f} GB/s"
    print_table(title, ("", *found.models), speed.table(found))
    best = max(model.decode[1] for name, model in found.models.items() if name.startswith("dense"))
    print({name: round(model.decode[1] / best, 2) for name, model in found.models.items()})


if __name__ == "__main__":
    main()
