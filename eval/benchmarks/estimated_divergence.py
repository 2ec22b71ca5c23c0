"""The estimated KL divergence of `compress eval` against the exact one over the whole vocabulary.

    python eval/benchmarks/estimated_divergence.py BASE VARIANT... --ids IDS.npy [--windows 4] [--length 256]

BASE, VARIANT: folders. The estimate has the base's 128 most likely tokens and 32 drawn from the others, in 16 bits
(`compress/evaluation/divergence.py`). One JSON line per variant: the exact and the estimated mean over all targets, their
difference, the error of drawing that the targets' own spread predicts, and the standard error over windows that
`compress eval` prints; how many errors of drawing the difference is.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from compress import load
from compress.evaluation.divergence import SAMPLES, SampledDistribution
from compress.numerics.statistics import ratio

TOP_K = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("base")
    parser.add_argument("variants", nargs="+", metavar="VARIANT")
    parser.add_argument("--ids", required=True, help="token ids, .npy [windows, length]")
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    ids = torch.from_numpy(np.load(arguments.ids).astype(np.int64))[: arguments.windows, : arguments.length]
    base = logits_of(arguments.base, ids)
    kept = [SampledDistribution.of(logits, TOP_K, seed=i) for i, logits in enumerate(base)]
    for variant in arguments.variants:
        print(json.dumps({"variant": Path(variant).name, **compared(base, kept, logits_of(variant, ids))}), flush=True)


@torch.no_grad()
def logits_of(source: str, ids: Tensor) -> list[Tensor]:
    model, _ = load(source, "float32")
    return [model(input_ids=row[None], use_cache=False).logits[0, :-1].float() for row in ids]


def compared(base: list[Tensor], kept: list[SampledDistribution], variant: list[Tensor]) -> dict[str, float]:
    exact, estimated, drawing = [], [], []
    for wanted, known, found in zip(base, kept, variant, strict=True):
        p, q = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
        exact.append((p.exp() * (p - q)).sum(-1))
        estimated.append(known.divergence(found)[0])
        tail = p.exp().scatter(-1, known.ids, 0.0)
        mass = tail.sum(-1)
        mean = (tail * (p - q)).sum(-1) / mass
        spread = (tail * (p - q - mean[:, None]) ** 2).sum(-1) / mass
        drawing.append(mass**2 * spread / SAMPLES)
    count = sum(map(len, exact))
    whole, guess = float(torch.cat(exact).mean()), float(torch.cat(estimated).mean())
    error = math.sqrt(float(torch.cat(drawing).sum())) / count
    stated = ratio([float(one.sum()) for one in estimated], [len(one) for one in estimated]).stderr
    return {
        "targets": count,
        "exact": round(whole, 6),
        "estimated": round(guess, 6),
        "difference": round(guess - whole, 6),
        "drawing_error": round(error, 6),
        "stated_error": round(stated or math.nan, 6),
        "errors_of_drawing": round((guess - whole) / error, 2),
    }


if __name__ == "__main__":
    main()
