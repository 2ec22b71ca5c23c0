"""Read a checkpoint with transformers, and the package of its owner. Run in an own environment: FOLDER IDS OUT DTYPE.

Weights are written where the package dequantizes them: bitsandbytes and compressed-tensors.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

folder, ids, out, dtype = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), device_map={"": "cpu"}).eval()
found = {}
with torch.no_grad():
    found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind == "Linear4bit":
            from bitsandbytes.functional import dequantize_4bit

            weight = dequantize_4bit(module.weight.data, module.weight.quant_state)
            found[f"{name}.weight"] = weight.reshape(module.out_features, module.in_features).contiguous()
        elif kind == "Linear8bitLt":
            from bitsandbytes.functional import int8_vectorwise_dequant

            scb = module.weight.SCB if module.weight.SCB is not None else module.state.SCB
            found[f"{name}.weight"] = int8_vectorwise_dequant(module.weight.data, scb).contiguous()
        elif hasattr(module, "quantization_scheme") and isinstance(getattr(module, "weight", None), torch.Tensor):
            found[f"{name}.weight"] = module.weight.detach().contiguous()
save_file(found, out)
