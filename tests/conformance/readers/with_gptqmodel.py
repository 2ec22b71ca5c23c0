"""Read a checkpoint with GPTQModel's torch kernels, in float16. Run in its own environment: FOLDER IDS OUT."""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from safetensors.torch import load_file, save_file

folder, ids, out = sys.argv[1:]
method = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"]
backend = BACKEND.AWQ_TORCH if method == "awq" else BACKEND.GPTQ_TORCH
model = GPTQModel.load(folder, backend=backend, device="cpu", dtype=torch.float16).model.eval()
layers = {name: module for name, module in model.named_modules() if hasattr(module, "dequantize_weight")}
found = {}
with torch.no_grad():
    found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
    for name, module in layers.items():
        weight = module.dequantize_weight()
        found[f"{name}.weight"] = weight.T.contiguous()
save_file(found, out)
