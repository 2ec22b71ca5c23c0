"""Read GGUF files: weights by the `gguf` package, logits or embeddings by llama.cpp. Run in its own environment: JOBS (a JSON file)."""

import json
import sys
from pathlib import Path

import llama_cpp
import numpy as np
import torch
from gguf import MODEL_ARCH_NAMES, GGUFReader, get_tensor_name_map
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file

ENCODERS = {"bert"}
LLAMA_LIKE = {"llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "olmo2"}


def weights_of(path):
    """The dequantized weights [out, in] of the linears of the blocks, by their names in transformers.

    None for models whose linears have other names than those of Llama, or are fused or experts.
    """
    config = json.loads((path.parent / "config.json").read_text())
    if config["model_type"] not in LLAMA_LIKE:
        return {}
    reader = GGUFReader(path)
    arch = reader.get_field("general.architecture").contents()
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    names = get_tensor_name_map({v: k for k, v in MODEL_ARCH_NAMES.items()}[arch], config["num_hidden_layers"])
    stored = {tensor.name: tensor for tensor in reader.tensors}
    found = {}
    for layer in range(config["num_hidden_layers"]):
        for part, linears in {"self_attn": "qkvo", "mlp": ("gate", "up", "down")}.items():
            for linear in linears:
                name = f"model.layers.{layer}.{part}.{linear}_proj.weight"
                tensor = stored[names.get_name(name, (".weight",))]
                values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
                kind = tensor.name.split(".")[2]
                if (
                    arch == "llama" and kind in heads
                ):  # converters to GGUF reorder the rows that llama.cpp rotates in pairs
                    rows, width = values.shape
                    values = (
                        values.view(heads[kind], rows // heads[kind] // 2, 2, width)
                        .transpose(1, 2)
                        .reshape(rows, width)
                    )
                found[name] = values.contiguous()
    return found


def read(folder, ids, text, out):
    """Write the logits, and the dequantized weights as [out, in]; of an encoder, the embedding of a text."""
    path = Path(folder) / "model.gguf"
    if json.loads((path.parent / "config.json").read_text())["model_type"] in ENCODERS:
        model = llama_cpp.Llama(str(path), embedding=True, n_ctx=64, verbose=False, n_threads=1)
        save_file({"logits": torch.tensor([model.embed(text)])}, out)
        return
    ids = load_file(ids)["ids"][0].tolist()
    model = llama_cpp.Llama(str(path), n_ctx=len(ids), n_batch=len(ids), logits_all=True, verbose=False, n_threads=1)
    model.eval(ids)
    logits = torch.from_numpy(np.array(model.scores[: len(ids)], dtype=np.float32))[None].contiguous()
    save_file({**weights_of(path), "logits": logits}, out)


for job in json.loads(Path(sys.argv[1]).read_text()):
    try:
        read(job["folder"], job["ids"], job["text"], job["out"])
    except Exception as error:
        Path(job["out"] + ".error").write_text(f"{type(error).__name__}: {error}")
