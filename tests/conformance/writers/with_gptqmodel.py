"""Quantize a model with GPTQModel. Run in its own environment: MODEL OUT IDS LOGITS KIND.

KIND: BITS-GROUP-sym|asym-plain|desc. The logits are those of GPTQModel's torch kernels, reloaded, in float16.
"""

import sys

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

source, out, ids, logits, kind = sys.argv[1:]
bits, group, zeros, order = kind.split("-")
config = QuantizeConfig(
    bits=int(bits), group_size=int(group), sym=zeros == "sym", desc_act=order == "desc", act_group_aware=False
)
model = GPTQModel.load(source, config)
tokens = load_file(ids)["ids"][0].tolist()
texts = [{"input_ids": tokens[i:] + tokens[:i], "attention_mask": [1] * len(tokens)} for i in range(32)]
model.quantize(texts, batch_size=1)
model.save(out)
AutoTokenizer.from_pretrained(source).save_pretrained(out)
read = GPTQModel.load(out, backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16).model.eval()
with torch.no_grad():
    save_file({"logits": read(load_file(ids)["ids"]).logits.float().contiguous()}, logits)
