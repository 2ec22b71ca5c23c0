"""Quantize a model with AutoAWQ. Run in its own environment: JOBS (a JSON file). Kinds: int4-GROUP-asym."""

import json
import sys
from pathlib import Path

from awq import AutoAWQForCausalLM
from safetensors.torch import load_file
from transformers import AutoConfig, PreTrainedTokenizerFast


def write(source, folder, ids, kind):
    """Write a checkpoint."""
    config = AutoConfig.from_pretrained(source)
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", config.rope_theta)
    model = AutoAWQForCausalLM.from_pretrained(source, device_map="cpu", rope_theta=theta)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(source) / "tokenizer.json"))
    tokens = load_file(ids)["ids"][0].tolist()
    texts = [tokens[i:] + tokens[:i] for i in range(32)]
    settings = {"zero_point": True, "q_group_size": int(kind.split("-")[1]), "w_bit": 4, "version": "GEMM"}
    model.quantize(tokenizer, quant_config=settings, calib_data=texts, max_calib_seq_len=64, apply_clip=False)
    model.save_quantized(folder)
    tokenizer.save_pretrained(folder)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        write(job["source"], job["folder"], job["ids"], job["kind"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
