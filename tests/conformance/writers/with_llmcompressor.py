"""Quantize a model with llm-compressor. Run in its own environment: JOBS (a JSON file).

Kinds: names of its schemes, and intBITS-GROUP|channel-sym|asym, with gptq- in front for GPTQ.
"""

import json
import sys
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from datasets import Dataset
from llmcompressor import oneshot
from llmcompressor.modifiers.quantization import GPTQModifier, QuantizationModifier
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def recipe_of(kind):
    """The modifier of a kind, and whether it needs data."""
    name = kind.removeprefix("gptq-")
    modifier = QuantizationModifier if name == kind else GPTQModifier
    if not name.startswith("int"):
        cut = ["re:.*down_proj"] if name == "FP8_BLOCK" else []  # its reader has no blocks that cross the last column
        return modifier(targets=["Linear"], scheme=name, ignore=["lm_head", *cut]), name in ("FP8", "NVFP4")
    bits, group, zeros = name.split("-")
    size = {"strategy": "channel"} if group == "channel" else {"strategy": "group", "group_size": int(group)}
    weights = QuantizationArgs(num_bits=int(bits.removeprefix("int")), symmetric=zeros == "sym", **size)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    return modifier(config_groups={"group_0": scheme}, ignore=["lm_head"]), name != kind


def write(source, folder, ids, kind):
    """Write a checkpoint."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokens = load_file(ids)["ids"][0].tolist()
    texts = [{"input_ids": tokens[i:] + tokens[:i], "attention_mask": [1] * len(tokens)} for i in range(32)]
    recipe, data = recipe_of(kind)
    options = {"dataset": Dataset.from_list(texts), "num_calibration_samples": len(texts)} if data else {}
    tokenizer = AutoTokenizer.from_pretrained(source)
    oneshot(model=model, tokenizer=tokenizer, recipe=recipe, **options)
    model.save_pretrained(folder, save_compressed=True)
    tokenizer.save_pretrained(folder)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(job["source"], job["folder"], job["ids"], job["kind"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
