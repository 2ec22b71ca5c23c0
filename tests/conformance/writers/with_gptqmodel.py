"""Quantize a model with GPTQModel. Run in its own environment: JOBS (a JSON file).

Kinds: BITS-GROUP-sym|asym-plain|desc. The logits are those of GPTQModel's torch kernels, reloaded, in float16.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import BACKEND, GPTQModel, QuantizeConfig
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer


def write(source, folder, ids, out, kind):
    """Write a checkpoint and its logits."""
    bits, group, zeros, order = kind.split("-")
    config = QuantizeConfig(
        bits=int(bits), group_size=int(group), sym=zeros == "sym", desc_act=order == "desc", act_group_aware=False
    )
    model = GPTQModel.load(source, config)
    tokens = load_file(ids)["ids"][0].tolist()
    texts = [{"input_ids": tokens[i:] + tokens[:i], "attention_mask": [1] * len(tokens)} for i in range(32)]
    model.quantize(texts, batch_size=1)
    model.save(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    read = GPTQModel.load(folder, backend=BACKEND.GPTQ_TORCH, device="cpu", dtype=torch.float16).model.eval()
    with torch.no_grad():
        save_file({"logits": read(load_file(ids)["ids"]).logits.float().contiguous()}, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(**job)
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
