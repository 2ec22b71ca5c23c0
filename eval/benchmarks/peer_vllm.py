"""vLLM's side of runtimes.py, on the CPU; it runs in a virtual environment of its own.

    python eval/benchmarks/peer_vllm.py FOLDER DTYPE

Answers runtimes.py, as peer_transformers.py does. A decode step is the difference of the times of two requests with the
same prompt, divided by their difference in tokens, because vLLM does not say when a token was ready. `conformance`
makes an environment: its owner `vllm` lists packages and variables.
"""

from __future__ import annotations

import os
import sys
from time import perf_counter

VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update(VARIABLES)
sys.path.pop(0)  # transformers would take kernels.py in this folder for a package

try:
    from vllm import LLM, SamplingParams
except ImportError:
    sys.exit("vLLM is not installed here; make conformance OWNER=vllm installs it; give --vllm-python PATH")

TOKENS, PREFILL, WARM_UP = 24, 512, 3  # as in compress.evaluation.speed, which another Python lacks


def main() -> None:
    folder, dtype = sys.argv[1:3]
    model = LLM(
        folder,
        skip_tokenizer_init=True,
        dtype=dtype,
        max_num_seqs=1,
        enable_prefix_caching=False,
        disable_log_stats=True,
    )
    vocabulary = model.model_config.get_vocab_size()

    def seconds(prompt: int, tokens: int) -> float:
        options = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        ids = [(7 * i + 11) % vocabulary for i in range(prompt)]
        begin = perf_counter()
        model.generate({"prompt_token_ids": ids}, options, use_tqdm=False)
        return perf_counter() - begin

    print("> ready", flush=True)
    for line in sys.stdin:
        figure, *context = line.split()
        if figure == "decode":
            few = seconds(int(*context), WARM_UP)
            rate = (TOKENS - WARM_UP) / (seconds(int(*context), TOKENS) - few)
        else:
            rate = PREFILL / seconds(PREFILL, 1)
        print(f"> {rate}", flush=True)


if __name__ == "__main__":
    main()
