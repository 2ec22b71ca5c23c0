"""Read checkpoints with AutoAWQ's layer in plain torch, in float32. Run in its own environment: JOBS (a JSON file).

AutoAWQ is archived: its layers run in transformers 4.51, which does not know rope_parameters of later ones.
"""

import json
import sys
from pathlib import Path

import torch
from awq.modules.linear.gemm import WQLinear_GEMM
from awq.utils.packing_utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM


def read(folder, ids, out):
    """Write the logits, and the dequantized weights as [out, in]."""
    config = AutoConfig.from_pretrained(folder)
    config.rope_theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", config.rope_theta)
    model = AutoModelForCausalLM.from_pretrained(folder, config=config, torch_dtype=torch.float16, device_map="cpu")
    model = model.eval().float()
    layers = {name: module for name, module in model.named_modules() if isinstance(module, WQLinear_GEMM)}
    found = {}
    for name, module in layers.items():
        weight = dequantize_gemm(module.qweight, module.qzeros, module.scales, module.w_bit, module.group_size)
        found[f"{name}.weight"] = weight.T.contiguous()
    with torch.no_grad():
        found["logits"] = model(load_file(ids)["ids"]).logits.float().contiguous()
    if not layers:
        raise RuntimeError("no layer of AutoAWQ was loaded")
    save_file(found, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
