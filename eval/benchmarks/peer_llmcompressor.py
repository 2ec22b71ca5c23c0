"""One run of llm-compressor or AutoRound for versus_llmcompressor.py, by the Python of their environment; one JSON line.

    python eval/benchmarks/peer_llmcompressor.py gptq --model FOLDER --test IDS.npy --calibration IDS.npy

int4, symmetric, in groups of 64 (rtn, gptq) or of 32 with 50 iterations (autoround), or half of the weights pruned
(wanda); head and embedding are left alone.
"""

import argparse
import json
import resource
import sys
import time

sys.path.pop(0)  # the folder of this file, whose kernels.py hides a package of that name

try:
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.pruning import WandaPruningModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
except ImportError:
    sys.exit("this program needs llmcompressor; pip install llmcompressor into an environment of its own")
import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

INT4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 64}
GROUPS = {"group_0": {"targets": ["Linear"], "weights": INT4}}


def modifier(method):
    if method == "rtn":
        return QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
    if method == "gptq":
        return GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])
    if method == "gptq_noact":
        return GPTQModifier(config_groups=GROUPS, ignore=["lm_head"], actorder=None)
    # A plain "lm_head" is not matched by this modifier, and the tied embedding would be pruned.
    return WandaPruningModifier(sparsity=0.5, mask_structure="0:0", targets=["Linear"], ignore=["re:.*lm_head"])


def calibration(method, ids):
    if method == "rtn":
        return {}
    rows = Dataset.from_dict({"input_ids": ids.tolist(), "attention_mask": np.ones_like(ids).tolist()})
    return {
        "dataset": rows,
        "num_calibration_samples": len(rows),
        "max_seq_length": int(ids.shape[1]),
        "shuffle_calibration_samples": False,
    }


def rounded(model, tokenizer, ids):
    from auto_round import AutoRound  # it changes transformers when it is imported

    rows = [
        {"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in torch.from_numpy(ids).long()
    ]
    rounding = AutoRound(
        model,
        tokenizer,
        bits=4,
        group_size=32,
        sym=True,
        iters=50,
        dataset=rows,
        nsamples=len(rows),
        seqlen=ids.shape[1],
        batch_size=min(8, len(rows)),
        device_map="cpu",
        amp=False,
    )
    return rounding.quantize()[0]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method")
    for name in ("model", "test", "calibration"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = np.load(arguments.calibration)
    begin = time.perf_counter()
    if arguments.method == "autoround":
        model = rounded(model, tokenizer, ids)
    else:
        oneshot(
            model=model, recipe=modifier(arguments.method), tokenizer=tokenizer, **calibration(arguments.method, ids)
        )
    seconds = time.perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    losses = []
    with torch.no_grad():
        for window in torch.from_numpy(np.load(arguments.test)).long():
            logits = model(input_ids=window[None, :-1], use_cache=False).logits[0].float()
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    loss = float(np.mean(losses))
    row = {"method": arguments.method, "perplexity": float(np.exp(loss)), "loss": loss}
    print(json.dumps(row | {"seconds": round(seconds, 1), "peak_rss_mb": round(peak)}))


if __name__ == "__main__":
    main()
