"""One run of AutoRound for versus_llmcompressor.py, by the Python of its own environment; prints one JSON line.

    python peer_autoround.py autoround --model FOLDER --test IDS.npy --calibration IDS.npy

int4, symmetric, groups of 32, 50 iterations per block; head and embedding are left alone.
"""

import argparse
import json
import resource
import sys
import time

sys.path.pop(0)  # the folder of this file, whose kernels.py hides a package of that name

import numpy as np
import torch
from auto_round import AutoRound
from transformers import AutoModelForCausalLM, AutoTokenizer

ITERATIONS = 50


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("method", choices=["autoround"])
    for name in ("model", "test", "calibration"):
        parser.add_argument(f"--{name}", required=True)
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    ids = torch.from_numpy(np.load(arguments.calibration)).long()
    rows = [{"input_ids": row[None], "attention_mask": torch.ones_like(row[None])} for row in ids]
    begin = time.perf_counter()
    rounding = AutoRound(
        model, tokenizer, bits=4, group_size=32, sym=True, iters=ITERATIONS, dataset=rows, nsamples=len(rows),
        seqlen=ids.shape[1], batch_size=min(8, len(rows)), device_map="cpu", amp=False,
    )  # fmt: skip
    model, _ = rounding.quantize()
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
