"""One run of llm-compressor on one block for wide.py, by the Python of its environment; one JSON line.

    python eval/benchmarks/peer_wide.py METHOD --model FOLDER --sequences 8 --threads 2

FOLDER: a model of wide.py, with its ids.npy; the first sequences are for calibration, the others for the output error.
Seconds and CPU seconds are those of the method on the loaded model, without writing anything.
"""

import argparse
import json
import resource
import time
from pathlib import Path

# the first: it takes the folder of both scripts out of the path, whose kernels.py hides a package
from peer_llmcompressor import GROUPS, calibration, modifier

# isort: split
import numpy as np
import torch
from llmcompressor import oneshot
from llmcompressor.modifiers.awq import AWQModifier
from llmcompressor.modifiers.pruning import SparseGPTModifier, WandaPruningModifier
from llmcompressor.modifiers.quantization import QuantizationModifier
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

PRUNED = {"sparsity": 0.5, "mask_structure": "2:4", "targets": ["Linear"], "ignore": ["re:.*lm_head"]}


def modifiers(method):
    if method == "awq":
        return [AWQModifier(), QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])]
    if method == "wanda-2:4":
        return WandaPruningModifier(**PRUNED)
    if method == "sparsegpt-2:4":
        return SparseGPTModifier(**PRUNED)
    return modifier(method.replace("gptq-no-order", "gptq_noact"))


METHODS = ("rtn", "gptq", "gptq-no-order", "awq", "wanda-2:4", "sparsegpt-2:4")


def outputs(model, ids):
    """What the block adds to its inputs, [sequences, length, channels]."""
    added = []
    hook = model.model.layers[0].register_forward_hook(
        lambda module, inputs, output: added.append((output[0] if isinstance(output, tuple) else output) - inputs[0])
    )
    with torch.inference_mode():
        for sequence in ids:
            model(sequence[None].long())
    hook.remove()
    return torch.cat(added)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    model = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    ids = np.load(arguments.model / "ids.npy")
    sequences, test = ids[: arguments.sequences], torch.from_numpy(ids[arguments.sequences :])
    dense = outputs(model, test)
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
    oneshot(
        model=model,
        # it wants a tokenizer although the data are token ids
        tokenizer=PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0})), pad_token="a"),
        recipe=modifiers(arguments.method),
        **calibration(arguments.method, sequences),
    )
    seconds, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF)
    row = {
        "seconds": seconds,
        "processor_seconds": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak_mb": after.ru_maxrss / 1024,
        "output_error": float((outputs(model, test) - dense).norm() / dense.norm()),
    }
    print(json.dumps(row))


if __name__ == "__main__":
    main()
