"""A model for runtimes.py, generated from by transformers; it may run in a virtual environment of its own.

    python eval/benchmarks/peer_transformers.py dense|compiled|torchao|load[-int8|-plain] SOURCE DTYPE

Prints "> ready" when the model is loaded, and then, for each line "decode N" or "prefill" of the standard input, "> "
and tokens per second, of the first after a prompt of N tokens. `dense` and `compiled`: by transformers alone, DTYPE is that of the weights; `torchao`: DTYPE is int8
or int4, bfloat16 otherwise; `load`: by compress.load, `load-plain`: without recorded steps.
"""

from __future__ import annotations

import sys
from functools import partial
from statistics import median
from time import perf_counter

sys.path.pop(0)  # transformers would take kernels.py in this folder for a package

import torch
from transformers import AutoModelForCausalLM, CompileConfig, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

TOKENS, PREFILL, WARM_UP = 24, 512, 3  # as in compress.evaluation.speed, which another Python lacks


class Clock(StoppingCriteria):
    """Records when each token is ready; it stops nothing."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids, scores, **kwargs):
        self.times.append(perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


def seconds(model: PreTrainedModel, prompt: int, tokens: int) -> list[float]:
    """The seconds of each token; the first includes the prompt."""
    ids = torch.randint(model.config.get_text_config().vocab_size, (1, prompt), generator=torch.manual_seed(0))
    clock = Clock()
    begin = perf_counter()
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        pad_token_id=0,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [after - before for before, after in zip([begin, *clock.times], clock.times, strict=False)]


def loaded(kind: str, source: str, dtype: str) -> PreTrainedModel:
    """The model."""
    if kind.startswith("load"):
        import compress

        options = {"compile": False if "plain" in kind else None, "activations": "int8" if "int8" in kind else None}
        return compress.load(source, dtype, **options)[0]
    model = AutoModelForCausalLM.from_pretrained(
        source, dtype=getattr(torch, "bfloat16" if kind == "torchao" else dtype)
    )
    if kind == "torchao":
        from torchao.prototype.quantization.int4.inference_workflow import PrototypeInt4WeightOnlyConfig
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        # the only 4-bit tensors of torchao 0.18 that run on a CPU
        quantize_(model, Int8WeightOnlyConfig() if dtype == "int8" else PrototypeInt4WeightOnlyConfig(group_size=32))
    if kind == "compiled":
        config = CompileConfig(mode=None, options={"cpp.min_chunk_size": 16384})  # less work is not worth a thread
        vars(config)["_compile_all_devices"] = True  # otherwise transformers compiles on accelerators alone
        vars(model)["generate"] = partial(model.generate, cache_implementation="static", compile_config=config)
    return model


@torch.no_grad()
def main() -> None:
    model = loaded(*sys.argv[1:4])
    model.generation_config.eos_token_id = None  # no token ends a text
    print("> ready", flush=True)
    for line in sys.stdin:
        figure, *context = line.split()
        if figure == "decode":
            rate = 1 / median(seconds(model, int(*context), TOKENS)[WARM_UP:])
        else:
            rate = PREFILL / seconds(model, PREFILL, 1)[0]
        print(f"> {rate}", flush=True)


if __name__ == "__main__":
    main()
