"""The predicted and the measured decoding of this machine, in turns in one process.

    python eval/benchmarks/roofline.py MODEL... [--turns 3] [--context 32] [--threads 1] [--processor]

Each turn calibrates this machine (`compress roofline MODEL --on here`) and decodes with the loaded model. One JSON line
per model: milliseconds per token, predicted and measured, by turn, and the ratio of the medians. --processor: count the
processor time of this process instead of wall time, for a machine under other load (one thread).
"""

from __future__ import annotations

import argparse
import json
import statistics
from time import process_time

import torch

from compress import load
from compress.evaluation import speed
from compress.pipeline.rooflines import roofline
from compress.roofline import host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--context", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--processor", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.processor:
        host.perf_counter = speed.perf_counter = process_time
    for source in arguments.models:
        model, _ = load(source, compile=False)
        predicted, calls, measured = [], [], []
        for _ in range(arguments.turns):
            found = roofline(source, "here", 1, arguments.context)
            side = found.after or found.before
            assert side.decode is not None
            predicted.append(1e3 * side.decode.seconds)
            calls.append(1e6 * side.call_seconds)
            steps = speed.generate(model, 1, arguments.context - 16, 24)[speed.WARM_UP :]
            measured.append(1e3 * statistics.median(steps))
        ratio = statistics.median(predicted) / statistics.median(measured)
        row = {"model": source, "dtype": str(model.dtype), "predicted_ms": predicted, "measured_ms": measured}
        row |= {"call_us": calls, "gbps": found.device.bandwidth / 1e9, "ratio": ratio}
        print(json.dumps({k: rounded(v) for k, v in row.items()}), flush=True)


def rounded(value: object) -> object:
    if isinstance(value, list):
        return [round(one, 2) for one in value]
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    main()
