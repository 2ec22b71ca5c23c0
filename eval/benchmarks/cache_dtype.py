"""What it costs to keep keys and values in bfloat16 where activations are float32: real text, decoded token by token.

    python eval/benchmarks/cache_dtype.py CHECKPOINT --test IDS.npy [--windows 2] [--length 512]

CHECKPOINT: of a bfloat16 model. One JSON line:

    tokens, loss (keys and values in float32), difference (of the loss in bfloat16) and its standard error over tokens,
    kl (nats per token)
"""

from __future__ import annotations

import argparse
import json

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

import compress
from compress.decode.caches import DecodingCache


@torch.no_grad()
def decoded(model: PreTrainedModel, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """The log probabilities behind each token, with keys and values in a dtype."""
    cache = DecodingCache(model, ids.shape[1], dtype)
    steps = [model(input_ids=token, past_key_values=cache, use_cache=True).logits for token in ids.split(1, 1)]
    return torch.cat(steps, 1).log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkpoint")
    parser.add_argument("--test", required=True)
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    given = parser.parse_args()
    model, _ = compress.load(given.checkpoint, compile=False)
    ids = torch.from_numpy(np.load(given.test)[: given.windows, : given.length].astype(np.int64))
    wide, narrow = (decoded(model, ids, dtype)[:, :-1] for dtype in (torch.float32, torch.bfloat16))
    losses = [-found.gather(-1, ids[:, 1:, None]).flatten() for found in (wide, narrow)]
    difference = losses[1] - losses[0]
    print(
        json.dumps(
            {
                "tokens": difference.numel(),
                "loss": round(float(losses[0].mean()), 4),
                "difference": round(float(difference.mean()), 5),
                "standard_error": round(float(difference.std() / difference.numel() ** 0.5), 5),
                "kl": float(f"{(wide.exp() * (wide - narrow)).sum(-1).mean():.2g}"),
            }
        )
    )


if __name__ == "__main__":
    main()
