"""Quantize a model with GPTQModel. Run in its own environment: JOBS (a JSON file).

Kinds: intBITS-GROUP-sym|asym-plain|desc|dynamic|v1.
"""

import json
import sys
from pathlib import Path

import torch
from gptqmodel import GPTQModel, QuantizeConfig
from gptqmodel.quantization import FORMAT
from safetensors.torch import load_file
from transformers import AutoTokenizer


def config_of(kind):
    """The settings of a kind."""
    bits, group, zeros, more = kind.split("-")
    dynamic = {r"+:.*\.down_proj": {"bits": 8}, r"-:.*\.o_proj": {}} if more == "dynamic" else None
    return QuantizeConfig(
        bits=int(bits.removeprefix("int")),
        group_size=int(group),
        sym=zeros == "sym",
        desc_act=more == "desc",
        act_group_aware=False,
        dynamic=dynamic,
        format=FORMAT.GPTQ if zeros == "sym" or more == "v1" else FORMAT.GPTQ_V2,
    )


def write(source, folder, ids, kind):
    """Write a checkpoint."""
    model = GPTQModel.load(source, config_of(kind), dtype=torch.float32)
    tokens = load_file(ids)["ids"][0].tolist()
    texts = [{"input_ids": tokens[i:] + tokens[:i], "attention_mask": [1] * len(tokens)} for i in range(32)]
    model.quantize(texts, batch_size=1)
    model.save(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(job["source"], job["folder"], job["ids"], job["kind"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
