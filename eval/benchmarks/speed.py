"""Time of evaluating a packed checkpoint against its dense model: the same windows, in turns, in one process.

    python eval/benchmarks/speed.py CHECKPOINT --model PATH --test IDS.npy [--windows 2] [--rounds 5]

Prints one JSON line: checkpoint, dense_seconds, packed_seconds (medians per window), ratio (median of the rounds'
ratios), ratios.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from statistics import median

import numpy as np
import torch

import compress
from compress.checkpoint.opening import open_model
from compress.evaluation.perplexity import perplexity


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--model", required=True, help="the dense model: hub id, local folder or .gguf file")
    parser.add_argument("--test", required=True, help="token ids of the windows, .npy [windows, length]")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, help="threads of torch; all cores if not given")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    ids = torch.from_numpy(np.load(arguments.test)).long()[: arguments.windows]
    opened = open_model(arguments.model, arguments.dtype)
    for block in opened.blocks:
        opened.weights.bring(block)
    packed, _ = compress.load(arguments.checkpoint, arguments.dtype)
    perplexity(opened.model, ids[:1])  # pages are read, caches are warm
    perplexity(packed, ids[:1])
    times: dict[str, list[float]] = {"dense": [], "packed": []}
    for _ in range(arguments.rounds):
        for name, model in (("dense", opened.model), ("packed", packed)):
            times[name].append(perplexity(model, ids).seconds / len(ids))
    ratios = [p / d for p, d in zip(times["packed"], times["dense"], strict=True)]
    result = {
        "checkpoint": Path(arguments.checkpoint).name,
        "dense_seconds": round(median(times["dense"]), 3),
        "packed_seconds": round(median(times["packed"]), 3),
        "ratio": round(median(ratios), 3),
        "ratios": [round(ratio, 3) for ratio in ratios],
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
