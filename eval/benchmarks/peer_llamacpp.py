"""llama.cpp's side of versus_llamacpp.py, through llama-cpp-python; it may run in a virtual environment of its own.

    python eval/benchmarks/peer_llamacpp.py quantize SOURCE.gguf OUT.gguf TYPE [IMPORTANCE.npz]
    python eval/benchmarks/peer_llamacpp.py measure BASE.gguf IDS.npy MODEL.gguf...
    python eval/benchmarks/peer_llamacpp.py speed MODEL.gguf THREADS

`quantize` calls llama_model_quantize; IMPORTANCE holds the mean squared inputs of each matrix by its name in the file,
which is what llama.cpp's own imatrix tool collects. `measure` writes MODEL.measured.npy next to each MODEL: its mean
next-token loss on each window of IDS, and the mean KL divergence of its next-token distribution from that of BASE, both
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

TOKENS, PREFILL, WARM_UP = 24, 512, 3  # as in compress.evaluation.speed, which another Python lacks


def quantize(source: str, out: str, kind: str, importance: str | None = None) -> None:
    """Quantize a file by llama.cpp's own quantizer."""
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}"), 1
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


def opened(path: str, length: int) -> llama_cpp.Llama:
    """A model whose logits of a whole window are kept."""
    return llama_cpp.Llama(
        path,
        n_ctx=length,
        n_batch=length,
        n_ubatch=min(length, 512),
        logits_all=True,
        verbose=False,
        n_threads=1,
        n_threads_batch=1,
    )


def logits_of(model: llama_cpp.Llama, window: np.ndarray) -> np.ndarray:
    """The logits after each token of a window but the last, less the largest of each."""
    model.reset()
    model.eval([int(token) for token in window])
    logits = model.scores[: len(window) - 1]
    return logits - logits.max(1, keepdims=True)


def measure(base_path: str, ids_path: str, *paths: str) -> None:
    """Write [2, windows] for each file: the mean next-token loss and KL divergence of each window of ids."""
    ids = np.load(ids_path)
    base, models = opened(base_path, ids.shape[1]), [opened(path, ids.shape[1]) for path in paths]
    found = np.zeros((len(models), 2, len(ids)))
    for number, window in enumerate(ids):
        wanted = logits_of(base, window)
        weights = np.exp(wanted)
        total = weights.sum(1, dtype=np.float64)
        for model, into in zip(models, found, strict=True):
            logits = logits_of(model, window)
            log_total = np.log(np.exp(logits).sum(1, dtype=np.float64))
            into[0, number] = (log_total - logits[np.arange(len(logits)), window[1:]]).mean()
            # KL(p, q) = sum_i p_i (x_i - y_i) - log sum_i exp(x_i) + log sum_i exp(y_i) for logits x of p and y of q
            gaps = np.einsum("ti,ti->t", weights, wanted - logits, dtype=np.float64)
            into[1, number] = (gaps / total - np.log(total) + log_total).mean()
    for path, values in zip(paths, found, strict=True):
        np.save(path.removesuffix(".gguf") + ".measured.npy", values)


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
    {"quantize": quantize, "measure": measure, "speed": speed}[command](*arguments)
