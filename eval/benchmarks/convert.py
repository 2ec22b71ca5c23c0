"""A dense copy of a model with its weights rounded to another dtype, for protocols that were measured on such a copy.

    python eval/benchmarks/convert.py MODEL FOLDER --dtype bfloat16

MODEL: hub id, local folder or .gguf file.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file

from compress.checkpoint.opening import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--dtype", default="bfloat16")
    arguments = parser.parse_args()
    opened = open_model(arguments.model)
    for block in opened.blocks:
        opened.weights.bring(block)
    tied = set(getattr(opened.model, "all_tied_weights_keys", None) or {})
    dtype = getattr(torch, arguments.dtype)
    tensors = {n: t.to(dtype).contiguous() for n, t in opened.model.state_dict().items() if n not in tied}
    arguments.folder.mkdir(parents=True)
    save_file(tensors, arguments.folder / "model.safetensors", metadata={"format": "pt"})
    opened.config.architectures = [type(opened.model).__name__]
    opened.config.dtype = dtype
    opened.config.save_pretrained(arguments.folder)
    if opened.tokenizer is not None:
        opened.tokenizer.save_pretrained(arguments.folder)
    print(f"{arguments.folder}: {len(tensors)} tensors in {arguments.dtype}")


if __name__ == "__main__":
    main()
