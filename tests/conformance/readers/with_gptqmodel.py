"""Read checkpoints with GPTQModel's torch kernels, in float16. Run in its own environment: JOBS (a JSON file)."""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel
from gptqmodel.quantization.awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file


def weight_of(module):
    """The dequantized weight [in, out] of a layer."""
    if hasattr(module, "dequantize_weight"):
        return module.dequantize_weight()
    return dequantize_gemm(module.qweight, module.qzeros, module.scales, module.bits, module.group_size)


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    method = json.loads((Path(folder) / "config.json").read_text())["quantization_config"]["quant_method"]
    backend = BACKEND.AWQ_TORCH if method == "awq" else BACKEND.GPTQ_TORCH
    model = GPTQModel.load(folder, backend=backend, device="cpu", dtype=torch.float16).model.eval()
    layers = {name: module for name, module in model.named_modules() if hasattr(module, "qweight")}
    with torch.no_grad():
        found = {"logits": model(load_file(ids)["ids"]).logits.float().contiguous()}
        for name, module in layers.items():
            found[f"{name}.weight"] = weight_of(module).T.contiguous()
    save_file(found, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
