"""How far recipes take a model from itself: loss and KL divergence, each recipe at several group sizes.

    python eval/benchmarks/divergence.py RECIPE.yaml... --model PATH --test IDS.npy --calibration IDS.npy \
        [--groups 32 48 64 96] [--weights int4 --asymmetric]

On a small model one figure of perplexity says little: rounding to nearest with one group size more or less moves it as
much as a better method does. The divergence from the uncompressed model's next-token distribution averages over all
tokens and cannot gain by luck. Passes with a group size get each of --groups; --weights and --asymmetric set theirs.
Models are compressed in memory. One JSON line per recipe and group size: loss, base_loss, kl (nats per token), and the
standard errors over windows of the difference in loss and of kl; seconds of the processor for the compression.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import compress
from compress.numerics.statistics import mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("recipes", nargs="+", metavar="RECIPE.yaml")
    parser.add_argument("--model", required=True, help="local folder")
    parser.add_argument("--test", required=True, help="token ids, .npy [windows, length]")
    parser.add_argument("--calibration", required=True, help="token ids, .npy [sequences, length]")
    parser.add_argument("--groups", nargs="+", type=int, help="as the recipe has them if not given")
    parser.add_argument("--weights", help="grid; as the recipe has it if not given")
    parser.add_argument("--asymmetric", action="store_true", help="zero points in all passes that can have them")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    windows, calibration = (
        torch.from_numpy(np.load(p).astype(np.int64)) for p in (arguments.test, arguments.calibration)
    )
    dense = opened(arguments.model)
    reference = [log_probabilities(dense, window) for window in windows]
    base = [loss_of(p, window) for p, window in zip(reference, windows, strict=True)]
    for path in arguments.recipes:
        for group in arguments.groups or [None]:
            changes = {"group_size": group, "weights": arguments.weights}
            changes = {key: value for key, value in changes.items() if value is not None}
            if arguments.asymmetric:
                changes["symmetric"] = False
            passes = [changed(step, changes) for step in compress.Recipe.from_yaml(path).passes]
            begin = process_time()
            model = compress.apply(opened(arguments.model), passes, calibration)
            seconds = process_time() - begin
            found = [compared(model, window, wanted) for window, wanted in zip(windows, reference, strict=True)]
            rise, kl = (
                mean([loss - old for (loss, _), old in zip(found, base, strict=True)]),
                mean([k for _, k in found]),
            )
            base_loss = mean(base).value
            row = {"recipe": Path(path).name, **changes, "loss": base_loss + rise.value, "base_loss": base_loss}
            row |= {"loss_error": rise.stderr, "kl": kl.value, "kl_error": kl.stderr, "seconds": seconds}
            print(json.dumps({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()}), flush=True)


def opened(folder: str) -> nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def changed(step: Any, changes: dict[str, Any]) -> Any:
    """The pass with other options, those that it has."""
    known = {key: value for key, value in changes.items() if key in type(step).model_fields}
    return type(step).model_validate({**step.model_dump(mode="json"), **known})


def log_probabilities(model: nn.Module, window: Tensor) -> Tensor:
    with torch.no_grad():
        return model(input_ids=window[None], use_cache=False).logits[0].float().log_softmax(-1)


def loss_of(logs: Tensor, window: Tensor) -> float:
    return float(-logs[:-1].gather(1, window[1:, None]).mean())


def compared(model: nn.Module, window: Tensor, wanted: Tensor) -> tuple[float, float]:
    """(loss, KL of the uncompressed distribution to the model's) of a window, means over tokens."""
    found = log_probabilities(model, window)
    return loss_of(found, window), float((wanted.exp() * (wanted - found)).sum(-1).mean())


if __name__ == "__main__":
    main()
