"""mlx-lm's side of runtimes.py, on the CPU; it may run in a virtual environment of its own.

    python eval/benchmarks/peer_mlx.py FOLDER

Answers runtimes.py, as peer_transformers.py does, for a folder of format mlx or a dense one.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from time import perf_counter

sys.path.pop(0)  # transformers would take kernels.py in this folder for a package

try:
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache
    from mlx_lm.utils import load_model
except ImportError:
    sys.exit("mlx-lm is not installed here; pip install 'mlx[cpu]' mlx-lm, or give --mlx-python PATH")

TOKENS, PREFILL, WARM_UP = 24, 512, 3  # as in compress.evaluation.speed, which another Python lacks


def main() -> None:
    model, config = load_model(Path(sys.argv[1]))

    def prompt(length: int) -> mx.array:
        return mx.array([[(7 * i + 11) % config["vocab_size"] for i in range(length)]])

    print("> ready", flush=True)
    for line in sys.stdin:
        figure, *context = line.split()
        cache = make_prompt_cache(model)
        if figure == "decode":
            token, times = mx.argmax(model(prompt(int(*context)), cache=cache)[:, -1], -1), []
            mx.eval(token)
            for _ in range(TOKENS):
                begin = perf_counter()
                token = mx.argmax(model(token[:, None], cache=cache)[:, -1], -1)
                mx.eval(token)
                times.append(perf_counter() - begin)
            rate = 1 / median(times[WARM_UP:])
        else:
            begin = perf_counter()
            mx.eval(model(prompt(PREFILL), cache=cache)[:, -1])
            rate = PREFILL / (perf_counter() - begin)
        print(f"> {rate}", flush=True)


if __name__ == "__main__":
    main()
