"""Quantize a model with AutoRound. Run in its own environment: JOBS (a JSON file).

Kinds: intBITS-GROUP-sym|asym-gptq|awq|llmcompressor, the layout that it exports.
"""

import json
import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

LAYOUTS = {"gptq": "auto_gptq", "awq": "auto_awq", "llmcompressor": "llm_compressor"}


def write(source, folder, ids, kind):
    """Write a checkpoint."""
    bits, group, zeros, layout = kind.split("-")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source)
    tokens = load_file(ids)["ids"][0]
    texts = [
        {"input_ids": tokens.roll(i)[None], "attention_mask": torch.ones(1, len(tokens), dtype=torch.int64)}
        for i in range(8)
    ]
    scheme = {"bits": int(bits.removeprefix("int")), "group_size": int(group), "sym": zeros == "sym"}
    rounding = AutoRound(
        model,
        tokenizer,
        **scheme,
        dataset=texts,
        nsamples=len(texts),
        seqlen=len(tokens),
        iters=4,
        batch_size=4,
        device_map="cpu",
        enable_torch_compile=False,
    )
    rounding.quantize_and_save(f"{folder}.made", format=LAYOUTS[layout])
    next(Path(f"{folder}.made").rglob("config.json")).parent.rename(folder)  # it names a folder inside
    tokenizer.save_pretrained(folder)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(job["source"], job["folder"], job["ids"], job["kind"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
