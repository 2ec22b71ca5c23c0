"""Processor seconds of runs, predicted by `compress plan --hardware this` and measured, by width and depth.

    python eval/benchmarks/time_model.py [--passes NAME...] [--widths 384 640 896] [--depths 1 2 4] [--threads 1] \
        [--reference] [--write FILE]

The rates of this machine are measured first, with the trials of `--time`; other widths and depths than those are then
predicted. --reference takes the rates of the package instead, --write writes those that were measured (compress/roofline/
rates.yaml comes from it). Seconds are those of the processor, not of a clock, so that other programs matter less; they still share
caches. One thread, unless --threads says otherwise. Random Llamas in float32, 8 sequences of 128 tokens.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
import yaml

from compress.pipeline.rate_trials import Small, rates_of_samples, run_of, samples
from compress.roofline.rates import reference_rates

PASSES = {
    "rtn": ({"rtn": {"weights": "fp8_e4m3", "group_size": "channel"}},),
    "gptq": ({"gptq": {}},),
    "wanda-2:4": ({"wanda": {"pattern": "2:4"}},),
}
"""Passes by the name of their line."""
TOKENS = (8, 128)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES), metavar="NAME")
    parser.add_argument("--widths", nargs="+", type=int, default=[384, 640, 896])
    parser.add_argument("--depths", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--reference", action="store_true")
    parser.add_argument("--write", type=Path)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rates = reference_rates() if arguments.reference else rates_of_samples(list(samples()))
    if arguments.write is not None:
        arguments.write.write_text(yaml.safe_dump(rates.to_json(), sort_keys=False))
    print("| pass | width | blocks | predicted s | measured s | error |\n|---|---|---|---|---|---|")
    errors = []
    with tempfile.TemporaryDirectory() as work:
        for name in arguments.passes:
            for width in arguments.widths:
                for depth in arguments.depths:
                    small = Small(width, 3 * width, depth, TOKENS, PASSES[name])
                    counted_work, measured = run_of(small, Path(work) / f"{name}-{width}-{depth}".replace(":", "-"))
                    predicted = rates.of(counted_work)
                    errors.append(predicted / measured - 1)
                    print(
                        f"| {name} | {width} | {depth} | {predicted:.2f} | {measured:.2f} | {errors[-1]:+.0%} |",
                        flush=True,
                    )
    within = sum(abs(error) <= 0.2 for error in errors)
    print(f"\n{within} of {len(errors)} within 20%, the largest error {max(errors, key=abs):+.0%}")


if __name__ == "__main__":
    main()
