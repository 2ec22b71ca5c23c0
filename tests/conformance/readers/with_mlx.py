"""Read checkpoints with mlx-lm on the CPU, in float32. Run in an environment of its own: JOBS (a JSON file)."""

import json
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import torch
from mlx_lm.utils import load_model
from safetensors.torch import load_file, save_file

STACK = "switch_mlp"  # the experts of a layer in one tensor


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    model, config = load_model(Path(folder))
    tensors = {}
    for name, module in model.named_modules():
        if "scales" not in module:
            continue
        weight = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
        stacked = STACK in name
        for number, matrix in enumerate(weight if stacked else [weight]):
            full = name.replace(STACK, f"experts.{number}") if stacked else name
            tensors[f"{full}.weight"] = torch.from_numpy(np.array(matrix.astype(mx.float32)))
    if config["tie_word_embeddings"] and "model.embed_tokens.weight" in tensors:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    logits = model(mx.array(load_file(ids)["ids"].numpy()))
    tensors["logits"] = torch.from_numpy(np.array(logits.astype(mx.float32)))
    save_file(tensors, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
