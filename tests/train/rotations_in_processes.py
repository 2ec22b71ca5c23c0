"""Learn rotations of the pico model in the processes of a launcher: OUT ACCUMULATE; every rank writes embeddings."""

import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

import compress
from compress import Rotate

PICO = Path(__file__).parents[1] / "pico" / "model"

if __name__ == "__main__":
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(PICO).eval()
    ids = torch.randint(1024, (8, 32), generator=torch.Generator().manual_seed(0))
    learn = {"steps": 2, "accumulate": int(sys.argv[2]), "hold_out": 0, "activations": "int8"}
    compress.apply(model, Rotate(learn=learn), ids)
    save_file({"rotated": model.model.embed_tokens.weight.detach()}, f"{sys.argv[1]}-{os.environ.get('RANK', 0)}")
