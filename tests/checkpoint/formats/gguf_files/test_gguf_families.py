"""GGUF files of each architecture: read back as the same function, with the tensors that llama.cpp has."""

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_families import FAMILIES, gguf_model
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import RTN
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.gguf import GGUF
from compress.errors import TargetError
from compress.layers.linear import linears

IDS = torch.arange(40, 64)[None]
READ_BY_TRANSFORMERS = {
    "llama",
    "mistral",
    "qwen2",
    "qwen2-tied",
    "qwen3-moe",
    "phi3",
    "starcoder2",
    "gpt2",
    "falcon",
    "stablelm-parallel",
    "nemotron",
    "bloom",
}
"""The families of which transformers reads everything; it is an independent reader, as llama.cpp is in conformance."""
OCTETS = {"weights": "int8", "group_size": 32}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


def tensors_of(folder):
    return {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}


def values(tensor):
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


@pytest.mark.few(9)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_file_is_read_back_as_the_same_function(family, tokenizer, tmp_path):
    model = gguf_model(family)
    expected = model(IDS).logits
    compress.save(model, tmp_path / "out", "gguf", tokenizer, "float32", embedding="dense", head="dense")
    in_folder, _ = compress.load(tmp_path / "out")
    assert torch.allclose(in_folder(IDS).logits, expected, atol=1e-5)
    alone, own_tokenizer = compress.load((tmp_path / "out" / FILE).rename(tmp_path / "alone.gguf"))
    assert type(alone) is type(model) and torch.allclose(alone(IDS).logits, expected, atol=1e-5)
    if not family.startswith("qwen"):  # whose own class of tokenizers replaces the expression that splits texts
        text = "Once upon a time, 12 foxes"
        assert own_tokenizer(text).input_ids == tokenizer(text).input_ids
    assert (GGUF().misread(model.config) is None) == (family in READ_BY_TRANSFORMERS)
    if family in READ_BY_TRANSFORMERS:
        theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="alone.gguf", dtype=torch.float32).eval()
        assert torch.allclose(theirs(IDS).logits, expected, atol=1e-4)


def test_the_rows_of_fused_linears_are_queries_keys_and_values(tokenizer, tmp_path):
    """GPT-NeoX has them by heads, Falcon by groups of heads with one key and one value."""
    for family, groups in (("gpt-neox", 4), ("falcon-grouped", 2)):
        model = gguf_model(family)
        compress.save(model, tmp_path / family, "gguf", tokenizer, "float32", embedding="dense", head="dense")
        name = next(
            name
            for name in model.state_dict()
            if name.endswith("0.attention.query_key_value.weight")
            or name.endswith("0.self_attention.query_key_value.weight")
        )
        weight = model.state_dict()[name]
        heads = weight.view(groups, -1, 16, 64)
        queries, keys, values_ = (
            heads[:, :-2].reshape(-1, 64),
            heads[:, -2].reshape(-1, 64),
            heads[:, -1].reshape(-1, 64),
        )
        stored = values(tensors_of(tmp_path / family)["blk.0.attn_qkv.weight"])
        assert torch.equal(stored, torch.cat([queries, keys, values_]))


def test_the_matrices_of_experts_are_stacked_and_those_of_gpt2_are_transposed(tokenizer, tmp_path):
    model = gguf_model("mixtral")
    compress.save(model, tmp_path / "mixtral", "gguf", tokenizer, "float16", embedding="dense", head="dense")
    stored, experts = tensors_of(tmp_path / "mixtral"), model.model.layers[1].mlp.experts
    gate, up = experts.gate_up_proj.chunk(2, dim=1)
    for name, expected in (("gate", gate), ("up", up), ("down", experts.down_proj)):
        assert torch.equal(values(stored[f"blk.1.ffn_{name}_exps.weight"]), expected.half().float())
    router = stored["blk.1.ffn_gate_inp.weight"]
    assert router.tensor_type.name == "F32" and not hasattr(model.model.layers[1].mlp.experts, "0")
    model = gguf_model("gpt2")
    compress.save(model, tmp_path / "gpt2", "gguf", tokenizer, "float32", embedding="dense", head="dense")
    stored = values(tensors_of(tmp_path / "gpt2")["blk.0.ffn_up.weight"])
    assert torch.equal(stored, model.transformer.h[0].mlp.c_fc.weight.T)


@pytest.fixture(scope="module")
def mixture(pico, tmp_path_factory):
    """A folder with a mixture of experts that has a shared one."""
    folder = tmp_path_factory.mktemp("mixture")
    gguf_model("qwen2-moe").save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


def test_the_codes_of_experts_are_stacked_and_stay_as_they_are(mixture, recipe, tmp_path):
    asked = recipe(RTN(**OCTETS), model=mixture, save={"format": "gguf"}, eval=None)
    made = compress.run(asked, tmp_path / "out", progress=False)
    assert made.report["verified"]["own"] <= LOGITS and "moe_intermediate_size" in made.report["verified"]["skipped"]
    stored = tensors_of(tmp_path / "out")
    model, _ = compress.load(tmp_path / "out" / FILE)
    for number in range(4):
        for kind in ("gate", "up", "down"):
            tensor = stored[f"blk.1.ffn_{kind}_exps.weight"]
            layer = model.get_submodule(f"model.layers.1.mlp.experts.{number}.{kind}_proj")
            assert tensor.tensor_type.name == "Q8_0" and layer.scheme.codes.grid.name == "int8"
            assert torch.equal(values(tensor)[number], layer.weight_as(torch.float32))
    gate = stored["blk.1.ffn_gate_inp_shexp.weight"]  # a vector, which llama.cpp does not quantize
    assert gate.tensor_type.name == "F32" and [int(size) for size in gate.shape] == [64]
    in_folder, _ = compress.load(tmp_path / "out")
    assert torch.allclose(in_folder(IDS).logits, model(IDS).logits, atol=1e-5)  # its embedding is dense


@pytest.mark.parametrize("grid", ["int4_signed", "none"])
def test_experts_of_one_tensor_have_one_type(grid, mixture, recipe):
    mixed = RTN(**OCTETS, overrides={"*.experts.1.up_proj": {"weights": grid}})
    with pytest.raises(
        TargetError, match="holds the experts .*experts.*up_proj in one tensor, .* use the same weights"
    ):
        compress.plan(recipe(mixed, model=mixture, save={"format": "gguf"}))


def test_a_dense_mixture_is_exported_with_its_experts_in_8_bits(mixture, tmp_path):
    lines = compress.export(mixture, tmp_path / "out", "gguf", type="Q8_0")
    assert sum(line.count for line in lines if "experts" in line.name and "int8" in line.after) == 24
    assert tensors_of(tmp_path / "out")["blk.0.ffn_down_exps.weight"].tensor_type.name == "Q8_0"
    assert {
        layer.scheme.text for name, layer in linears(compress.load(tmp_path / "out")[0]).items() if ".experts." in name
    } == {"int8, group 32"}
