"""Read checkpoints with transformers, and the package of their owner, in float32. Run in an own environment: JOBS.

Weights are written where the package dequantizes them: bitsandbytes and compressed-tensors.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def weight_of(module):
    """The dequantized weight [out, in] of a quantized layer; None for other modules."""
    kind = type(module).__name__
    if kind == "Linear4bit":
        from bitsandbytes.functional import dequantize_4bit

        weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
        return weight.reshape(module.out_features, module.in_features)
    if kind == "Linear8bitLt":
        from bitsandbytes.functional import int8_vectorwise_dequant

        scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
        codes = module.weight.data if module.weight.data.dtype == torch.int8 else module.state.CB
        return int8_vectorwise_dequant(codes, scb)
    if hasattr(module, "quantization_scheme") and isinstance(getattr(module, "weight", None), torch.Tensor):
        return module.weight.detach()
    return None


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}).eval()
    found = {}
    with torch.no_grad():
        for name, module in model.named_modules():  # first: some CPUs repack the codes of bitsandbytes when they run
            weight = weight_of(module)
            if weight is not None:
                found[f"{name}.weight"] = weight.clone().contiguous()
        found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
    save_file(found, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
