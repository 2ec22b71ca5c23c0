"""Write the pico model as a GGUF file, as llama.cpp's converter does, for tests. Import it after `importorskip("gguf")`."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import quants
from transformers import AutoModelForCausalLM

NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weight, heads: int):
    """Rows of rotary heads in the order that llama.cpp has them."""
    return weight.reshape(heads, 2, len(weight) // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def gguf_tensors(model):
    """(name, array) as llama.cpp's converter writes a Llama."""
    for name, tensor in model.state_dict().items():
        array = np.ascontiguousarray(tensor.numpy())
        if name == "model.embed_tokens.weight":
            yield "token_embd.weight", array
        elif name == "model.norm.weight":
            yield "output_norm.weight", array
        elif name != "lm_head.weight":
            _, _, index, rest = name.split(".", 3)
            heads = {"self_attn.q_proj.weight": 4, "self_attn.k_proj.weight": 2}.get(rest)
            array = array if heads is None else interleaved(array, heads)
            yield f"blk.{index}.{NAMES[rest.removesuffix('.weight')]}.weight", np.ascontiguousarray(array)


def write_tokenizer(writer, folder: str):
    found = json.loads((Path(folder) / "tokenizer.json").read_text())
    special = {token["id"]: token["content"] for token in found["added_tokens"]}
    tokens = {number: token for token, number in found["model"]["vocab"].items()} | special
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokens[i] for i in range(len(tokens))])
    writer.add_token_types([3 if i in special else 1 for i in range(len(tokens))])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in found["model"]["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def write_pico(pico: str, path: Path, kind: str, architecture="llama", without=(), extra=None, keys=None, **options):
    """Write the pico model, its matrices in a block type or, for F32, as they are.

    without: names of tensors that are left out. extra: arrays of other tensors by name. keys: other values by key.
    options: of `GGUFWriter`, such as `split_max_tensors`.
    """
    model = AutoModelForCausalLM.from_pretrained(pico)
    writer = gguf.GGUFWriter(str(path), architecture, **options)
    writer.add_block_count(3)
    writer.add_context_length(512)
    writer.add_embedding_length(128)
    writer.add_feed_forward_length(288)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_dimension_count(32)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(1024)
    write_tokenizer(writer, pico)
    for key, value in (keys or {}).items():
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
        add[type(value)](key, value)
    block = gguf.GGMLQuantizationType[kind]
    for name, array in (*gguf_tensors(model), *(extra or {}).items()):
        if name in without:
            continue
        if kind != "F32" and array.ndim == 2:
            writer.add_tensor(name, quants.quantize(array, block), raw_dtype=block)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def cached_models(folder):
    """The entries of a cache of models, without the files that lock them."""
    return [entry for entry in folder.iterdir() if entry.suffix != ".lock"]
