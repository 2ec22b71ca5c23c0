"""Prunes, quantizes and distils a small random model in one of several processes; the first writes what became of it.

accelerate launch --multi_gpu --num_processes 2 tests/train/two_processes.py OUT.safetensors ACCUMULATE MODEL

MODEL: causal, masked, or experts, of which some get no token of a process.
"""

import sys
from pathlib import Path

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, BertConfig, LlamaConfig, MixtralConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from encoders import tokenizer

import compress

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def main() -> None:
    out, accumulate, kind = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    masked = kind == "masked"
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if masked:
        model = AutoModelForMaskedLM.from_config(BertConfig(**SIZES)).eval()
    elif kind == "experts":
        experts = {"num_local_experts": 12, "num_experts_per_tok": 1}
        config = MixtralConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False, **experts)
        model = AutoModelForCausalLM.from_config(config).eval()
    else:
        config = LlamaConfig(**SIZES, num_key_value_heads=2, tie_word_embeddings=False)
        model = AutoModelForCausalLM.from_config(config).eval()
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    options = {"steps": 4, "accumulate": accumulate, "learning_rate": 0.01, "weight_rate": 0.1, "clip": 0.01}
    step = compress.Distill(**options, **({"ce_weight": 0.3, "cosine": 0.1, "top_k": None} if masked else {}))
    pruned, packed = ("*mediate.dense", "*.attention.*") if masked else ("*.mlp.*", "*.self_attn.*")
    passes = [compress.Wanda(targets=pruned), compress.RTN(group_size=16, targets=packed), step]
    compress.apply(model, passes, ids, tokenizer=tokenizer())
    state = PartialState()
    if state.is_main_process:
        tensors = {name: tensor.clone().contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, out, metadata={"processes": str(state.num_processes)})


if __name__ == "__main__":
    main()
