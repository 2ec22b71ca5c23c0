"""llama.cpp's side of versus_llamacpp.py, through llama-cpp-python; it may run in a virtual environment of its own.

    python eval/benchmarks/peer_llamacpp.py quantize SOURCE.gguf OUT.gguf TYPE [IMPORTANCE.npz]
    python eval/benchmarks/peer_llamacpp.py losses MODEL.gguf IDS.npy OUT.npy
    python eval/benchmarks/peer_llamacpp.py speed MODEL.gguf THREADS

`quantize` calls llama_model_quantize; IMPORTANCE holds the mean squared inputs of each matrix by its name in the file,
which is what llama.cpp's own imatrix tool collects. `losses` writes the mean next-token loss of each window of IDS,
computed by llama.cpp's own forward pass. `speed` answers runtimes.py, as peer_transformers.py does.
"""

from __future__ import annotations

import ctypes
import sys
from statistics import median
from time import perf_counter

try:
    import llama_cpp
    import numpy as np
except ImportError:
    sys.exit("llama-cpp-python is not installed here; pip install llama-cpp-python, or give --llama-python PATH")

TYPES = {
    "Q4_0": 2,
    "Q4_1": 3,
    "Q8_0": 7,
    "Q5_0": 8,
    "Q5_1": 9,
    "Q2_K": 10,
    "Q3_K_M": 12,
    "Q4_K_M": 15,
    "Q5_K_M": 17,
    "Q6_K": 18,
}

TOKENS, PREFILL, WARM_UP = 24, 512, 3  # as in compress.evaluation.speed, which another Python lacks


def quantize(source: str, out: str, kind: str, importance: str | None = None) -> None:
    """Quantize a file by llama.cpp's own quantizer."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = TYPES[kind], 1
    if importance is not None:
        held = {name: np.ascontiguousarray(values, dtype=np.float32) for name, values in np.load(importance).items()}
        entries = (llama_cpp.llama_model_imatrix_data * (len(held) + 1))()
        for entry, (name, values) in zip(entries, held.items(), strict=False):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        options.imatrix = entries
    code = llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(options))
    if code:
        sys.exit(f"llama.cpp could not quantize {source} ({code})")


def losses(path: str, ids_path: str, out: str) -> None:
    """Write the mean next-token loss of a file on each window of token ids [windows, length]."""
    ids = np.load(ids_path)
    length = ids.shape[1]
    model = llama_cpp.Llama(
        path,
        n_ctx=length,
        n_batch=length,
        n_ubatch=min(length, 512),
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
    )
    found = []
    for window in ids:
        model.reset()
        model.eval([int(token) for token in window])
        total = 0.0
        for start in range(0, length - 1, 128):
            stop = min(start + 128, length - 1)
            logits = model.scores[start:stop].astype(np.float64)
            top = logits.max(1, keepdims=True)
            norm = np.log(np.exp(logits - top).sum(1)) + top[:, 0]
            total += (norm - logits[np.arange(stop - start), window[start + 1 : stop + 1]]).sum()
        found.append(total / (length - 1))
    np.save(out, np.array(found))


def speed(path: str, threads: str) -> None:
    """Print tokens per second for each line "decode N" or "prefill" of the standard input."""
    model = llama_cpp.Llama(
        path, n_ctx=0, n_batch=PREFILL, verbose=False, n_threads=int(threads), n_threads_batch=int(threads)
    )
    print("> ready", flush=True)
    ids = np.random.default_rng(0).integers(model.n_vocab(), size=model.n_ctx()).tolist()
    for line in sys.stdin:
        model.reset()
        figure, *context = line.split()
        if figure == "decode":
            model.eval(ids[: int(*context)])
            times = []
            for _ in range(TOKENS):
                begin = perf_counter()
                model.eval([model.sample(temp=0.0)])
                times.append(perf_counter() - begin)
            rate = 1 / median(times[WARM_UP:])
        else:
            begin = perf_counter()
            model.eval(ids[:PREFILL])
            rate = PREFILL / (perf_counter() - begin)
        print(f"> {rate}", flush=True)


if __name__ == "__main__":
    command, *arguments = sys.argv[1:]
    {"quantize": quantize, "losses": losses, "speed": speed}[command](*arguments)
