"""Rows against each other on the same windows: loss, KL and seconds, paired standard errors, and the spread over orders.

    python eval/benchmarks/paired.py ROW|RECIPE.yaml... --model PATH --test TEXT --calibration TEXT... \
        [--windows 8] [--sequences 16] [--length 512] [--bos calibration test] [--orders 5] [--threads 1]

ROW: a row of rows.py. TEXT: token ids (.npy), or a source with --length: embedded, the path of a text file, ...
A calibration may also be a value of `calibration:` in a recipe, such as '{source: embedded, self_share: 0.5}', and is
then read as recipes read it. So may the test; what the model samples differs there, because the seed does. Each row is
run with each calibration. The first row with the first calibration is the base of the paired differences (row minus
base, mean over windows, and its standard error) in loss and in KL.
--bos: texts whose sequences begin with the tokens that the tokenizer adds before a text, as those of recipes do;
none by default. KL: of the uncompressed next-token distribution to the model's, nats per token. --orders N runs each row
N times: the calibration sequences as given, then permuted, in other batches, and with another number of threads; spread
is the largest perplexity over the smallest, minus 1. Models are compressed in memory, for format native. One JSON line
per row and order; seconds are those of the process for compression.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import torch
import yaml
from divergence import log_probabilities, opened
from rows import ROWS
from torch import Tensor
from transformers import AutoTokenizer

import compress
from compress.data.ids import sample
from compress.data.opening import special_tokens_around
from compress.data.text_source import Part
from compress.models.kinds.batch import IDS, joined
from compress.numerics.statistics import mean
from compress.pipeline.sources import in_memory
from compress.pipeline.texts import calibration_examples

BATCH = 4
SEEDS: dict[Part, int] = {"calibration": 0, "test": 1}


@dataclass(frozen=True)
class Order:
    """How a run differs from another that should give the same. seed: of the permutation; 0: none."""

    seed: int = 0
    batch: int = BATCH
    threads: int = 0

    @property
    def text(self) -> str:
        """The order in words."""
        return f"seed {self.seed}, batches of {self.batch}, {self.threads} more threads"


ORDERS = [Order(), Order(seed=1), Order(seed=2, batch=2), Order(threads=1), Order(seed=3, batch=8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("rows", nargs="+", metavar="ROW")
    for name in ("model", "test"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--calibration", required=True, nargs="+", metavar="TEXT")
    parser.add_argument("--orders", type=int, default=1, choices=range(1, len(ORDERS) + 1))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--windows", type=int, help="of the test; all if not given")
    parser.add_argument("--sequences", type=int, help="of the calibration; all if not given")
    parser.add_argument("--length", type=int, help="of both; that of the stored ids if not given")
    parser.add_argument("--bos", nargs="*", default=[], choices=("calibration", "test"))
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    prefix = {part: special_tokens_around(tokenizer)[0] for part in arguments.bos}

    def ids_of(source: str, part: Part, count: int | None) -> Tensor:
        return sample(source, part, tokenizer, count, arguments.length, 0, prefix.get(part, ()))[0]

    def read(text: str, part: Part, count: int | None) -> Tensor:
        values = yaml.safe_load(text)
        if isinstance(values, str):
            return ids_of(text, part, count)
        shape = {"sequences": count, "length": arguments.length}
        stated = {name: value for name, value in shape.items() if value is not None}
        options = {"calibration": stated | values, "seed": SEEDS[part], "eval": None}
        recipe = compress.Recipe.from_data({"model": arguments.model, "passes": ["rtn"], **options})
        examples, _ = calibration_examples(recipe, in_memory(model, tokenizer))
        return joined(examples.sequences).inputs[IDS]

    model: Any = opened(arguments.model)
    windows = read(arguments.test, "test", arguments.windows)
    calibrations = {text: read(text, "calibration", arguments.sequences) for text in arguments.calibration}
    reference = [log_probabilities(model, window).half() for window in windows]
    first: tuple[list[float], list[float]] | None = None
    for name, text in product(arguments.rows, calibrations):
        found, calibration = [], calibrations[text]
        for order in ORDERS[: arguments.orders]:
            losses, kls, seconds = measure(arguments, name, order, calibration, windows, reference)
            first = first or (losses, kls)
            found.append(sum(losses) / len(losses))
            row = {
                "row": name,
                "calibration": text,
                "order": order.text,
                "loss": found[-1],
                "perplexity": float(np.exp(found[-1])),
            }
            rise, kl_rise = (
                [a - b for a, b in zip(*both, strict=True)] for both in zip((losses, kls), first, strict=True)
            )
            for key, values in (("kl", kls), ("difference", rise), ("kl_difference", kl_rise)):
                row[key], row[f"{key}_stderr"] = mean(values)
            print(json.dumps(row | {"seconds": round(seconds, 1)}), flush=True)
        if len(found) > 1:
            spread = float(np.exp(max(found) - min(found)) - 1)
            print(
                json.dumps({"row": name, "calibration": text, "mean_loss": sum(found) / len(found), "spread": spread}),
                flush=True,
            )


def measure(
    arguments: argparse.Namespace,
    name: str,
    order: Order,
    calibration: Tensor,
    windows: Tensor,
    reference: list[Tensor],
) -> tuple[list[float], list[float], float]:
    """(loss of each window, KL of each window, seconds) of a row."""
    passes = compress.Recipe.from_yaml(name).passes if Path(name).suffix == ".yaml" else ROWS[name]
    if order.seed:
        generator = torch.Generator().manual_seed(order.seed)
        calibration = calibration[torch.randperm(len(calibration), generator=generator)]
    torch.set_num_threads(arguments.threads + order.threads)
    model, begin = opened(arguments.model), process_time()
    model = compress.apply(model, passes, calibration, batch=order.batch)
    seconds = process_time() - begin
    torch.set_num_threads(arguments.threads)
    losses, kls = [], []
    for window, wanted in zip(windows, reference, strict=True):
        logs, known = log_probabilities(model, window), wanted.float()
        losses.append(float(-logs[:-1].gather(1, window[1:, None]).mean()))
        kls.append(float((known.exp() * (known - logs)).sum(-1)[:-1].mean()))
    return losses, kls, seconds


if __name__ == "__main__":
    main()
