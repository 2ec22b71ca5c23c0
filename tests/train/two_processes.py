"""Prunes, quantizes and distils a small random model in one of several processes; the first writes what became of it.

accelerate launch --num_processes 2 --cpu tests/train/two_processes.py OUT.safetensors ACCUMULATE
"""

import sys

import torch
from accelerate import PartialState
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig

import compress

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "tie_word_embeddings": False,
}  # fmt: skip


def main() -> None:
    out, accumulate = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES)).eval()
    ids = torch.randint(64, (8, 16), generator=torch.Generator().manual_seed(0))
    step = compress.Distill(steps=4, accumulate=accumulate, learning_rate=0.01, weight_rate=0.1, clip=0.01)
    compress.apply(
        model, [compress.Wanda(targets="*.mlp.*"), compress.RTN(group_size=16, targets="*.self_attn.*"), step], ids
    )
    state = PartialState()
    if state.is_main_process:
        tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
        save_file(tensors, out, metadata={"processes": str(state.num_processes)})


if __name__ == "__main__":
    main()
