"""Quantize a model with transformers and bitsandbytes. Run in its own environment: MODEL OUT IDS LOGITS KIND.

KIND: int8, nf4, fp4, nf4-dq or fp4-dq. The logits are those of the writer, in float32.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

source, out, ids, logits, kind = sys.argv[1:]
if kind == "int8":
    config = BitsAndBytesConfig(load_in_8bit=True)
else:
    config = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type=kind[:3], bnb_4bit_use_double_quant=kind.endswith("dq")
    )
model = AutoModelForCausalLM.from_pretrained(
    source, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
).eval()
with torch.no_grad():
    save_file({"logits": model(load_file(ids)["ids"]).logits.float().contiguous()}, logits)
model.save_pretrained(out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
