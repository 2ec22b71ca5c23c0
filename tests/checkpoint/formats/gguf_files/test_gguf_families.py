"""GGUF files of each architecture: read back as the same function, with the tensors that llama.cpp has."""

import re

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_families import FAMILIES, YARN, gguf_model
from tolerances import LOGITS
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import compress
from compress import RTN
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.formats.gguf_files.architecture import architecture_of
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
    model, _ = compress.load(tmp_path / "out" / FILE, "float32")
    for number in range(4):
        for kind in ("gate", "up", "down"):
            tensor = stored[f"blk.1.ffn_{kind}_exps.weight"]
            layer = model.get_submodule(f"model.layers.1.mlp.experts.{number}.{kind}_proj")
            assert tensor.tensor_type.name == "Q8_0" and layer.scheme.codes.grid.name == "int8"
            assert torch.equal(values(tensor)[number], layer.weight_as(torch.float32))
    gate = stored["blk.1.ffn_gate_inp_shexp.weight"]  # a vector, which llama.cpp does not quantize
    assert gate.tensor_type.name == "F32" and [int(size) for size in gate.shape] == [64]
    in_folder, _ = compress.load(tmp_path / "out", "float32")
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


def latent_folder(tokenizer, folder, **changes):
    """A folder with a model whose attention keeps a latent vector."""
    gguf_model("deepseek-v3", **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_keys_and_values_of_a_latent_vector_are_matrices_of_heads(tokenizer, tmp_path):
    """[heads, rank, keys] and [heads, values, rank], as deepseek2.cpp multiplies them; one head of keys in the header."""
    model = gguf_model("deepseek-v3")
    compress.save(model, tmp_path / "out", "gguf", tokenizer, "float32", embedding="dense", head="dense")
    stored = tensors_of(tmp_path / "out")
    weight = model.model.layers[0].self_attn.kv_b_proj.weight.view(4, 16 + 24, 32)
    assert torch.equal(values(stored["blk.0.attn_k_b.weight"]), weight[:, :16].mT)
    assert torch.equal(values(stored["blk.0.attn_v_b.weight"]), weight[:, 16:])
    bias = model.model.layers[1].mlp.gate.e_score_correction_bias
    assert torch.equal(values(stored["blk.1.exp_probs_b.bias"]), bias)
    fields = GGUFReader(tmp_path / "out" / FILE).fields
    expected = {"attention.head_count_kv": 1, "attention.key_length": 32 + 8, "attention.key_length_mla": 16 + 8}
    expected |= {"attention.value_length": 32, "attention.value_length_mla": 24, "leading_dense_block_count": 1}
    expected |= {"expert_gating_func": 2, "expert_group_count": 2, "expert_group_used_count": 1}
    assert {key: fields[f"deepseek2.{key}"].contents() for key in expected} == expected


def test_what_makes_keys_and_values_stays_dense_and_the_plan_says_so(tokenizer, recipe, tmp_path):
    folder = latent_folder(tokenizer, tmp_path / "model")
    asked = recipe(RTN(**OCTETS), model=folder, save={"format": "gguf"}, eval=None)
    [note] = [note for note in compress.plan(asked).notes if "kv_b_proj" in note]
    assert note.startswith(
        "2 linears stay dense (model.layers.*.self_attn.kv_b_proj): llama.cpp reads kv_b_proj as two matrices"
    )
    compress.run(asked, tmp_path / "out", progress=False)
    stored = tensors_of(tmp_path / "out")
    assert stored["blk.1.attn_kv_a_mqa.weight"].tensor_type.name == "Q8_0"
    assert stored["blk.1.attn_k_b.weight"].tensor_type.name == "F32"
    lines = compress.export(folder, tmp_path / "exported", "gguf", type="Q8_0")
    assert [line.after for line in lines if "kv_b_proj" in line.name] == ["dense"]
    with pytest.raises(TargetError, match="format gguf cannot store .*kv_b_proj as codes: llama.cpp reads"):
        compress.plan(recipe(RTN(**OCTETS, targets=["*.kv_b_proj"]), model=folder, save={"format": "gguf"}))
    compress.run(recipe(RTN(**OCTETS), model=folder, eval=None), tmp_path / "codes", progress=False)
    with pytest.raises(TargetError, match="compress the model again with ignore: '.*kv_b_proj'"):
        compress.export(tmp_path / "codes", tmp_path / "again", "gguf")


@pytest.mark.parametrize(
    ("family", "changes", "reason"),
    [
        ("deepseek-v3", {"rope_parameters": {**YARN, "mscale": 1.0}}, "mscale 1.0 and mscale_all_dim 0.7"),
        ("deepseek-v3", {"n_shared_experts": 0}, "no shared experts"),
        ("deepseek-v2-lite", {"num_hidden_layers": 2}, "no q_lora_rank, .* 26 or 27 blocks only"),
    ],
)
def test_latent_models_that_llamacpp_computes_otherwise_are_refused(family, changes, reason):
    kind, options = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**options, **changes})
    assert re.search(reason, architecture_of(config).refuses(config))


def test_groups_of_experts_that_llamacpp_scores_otherwise_are_refused():
    kind, options = FAMILIES["deepseek-v2"]
    config = AutoConfig.for_model(kind, **options, topk_method="group_limited_greedy", n_group=2, topk_group=1)
    assert "topk_method is group_limited_greedy" in architecture_of(config).refuses(config)
