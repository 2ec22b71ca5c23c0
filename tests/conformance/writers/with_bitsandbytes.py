"""Quantize a model with transformers and bitsandbytes. Run in its own environment: JOBS (a JSON file).

Kinds: int8, nf4, fp4, nf4-dq and fp4-dq.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig

BLOCK = 64  # weights per scale; compress does not read blocks that cross rows


def write(source, folder, kind):
    """Write a checkpoint."""
    config = BitsAndBytesConfig(load_in_8bit=True)
    if kind != "int8":
        dense = AutoModelForCausalLM.from_pretrained(source)
        cut = {name for name, one in dense.named_modules() if getattr(one, "in_features", BLOCK) % BLOCK}
        config = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=kind[:3],
            bnb_4bit_use_double_quant=kind.endswith("dq"),
            llm_int8_skip_modules=["lm_head", *cut],
        )
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=torch.float32, quantization_config=config, device_map={"": "cpu"}
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source).save_pretrained(folder)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(job["source"], job["folder"], job["kind"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
