"""GPT-OSS as GGUF: experts of interleaved rows, MXFP4 bit for bit, attention sinks, and what llama.cpp computes."""

import shutil

import gguf
import numpy as np
import pytest
import quantized_sources as sources
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from gguf_families import FAMILIES, gguf_model
from safetensors.torch import load_file
from tolerances import LOGITS
from transformers import AutoConfig, AutoTokenizer, GptOssConfig

import compress
from compress import RTN
from compress.checkpoint.containers.gguf import BLOCKS, Entry, packed_index
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.containers.imatrix import Squares, read_imatrix, write_imatrix
from compress.checkpoint.formats.gguf_files.architecture import architecture_of
from compress.errors import ModelError, TargetError
from compress.layers.linear import linears

IDS = torch.arange(40, 64)[None]
EXPERTS = "model.layers.{}.mlp.experts"


@pytest.fixture
def tokenizer(pico):
    return AutoTokenizer.from_pretrained(pico)


@pytest.fixture(scope="module")
def quantized(tmp_path_factory):
    """A folder with the experts of a GPT-OSS in MXFP4, as its authors publish it."""
    folder = tmp_path_factory.mktemp("mxfp4") / "model"
    sources.mxfp4(sources.gpt_oss(), folder)
    return folder


def alone(folder):
    """A copy of the file of a folder, without what is beside it."""
    return shutil.copy(folder / FILE, folder.parent / "alone.gguf")


def tensors_of(folder):
    return {tensor.name: tensor for tensor in GGUFReader(folder / FILE).tensors}


def values(tensor):
    return torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))


def test_gates_are_the_even_rows_and_ups_the_odd_ones(tokenizer, tmp_path):
    """As in the converter of llama.cpp (conversion/gpt_oss.py): [E, in, out] transposed, rows in turns; sinks and biases."""
    model = gguf_model("gpt-oss")
    compress.save(model, tmp_path / "out", "gguf", tokenizer, "float32", embedding="dense", head="dense")
    stored, layer = tensors_of(tmp_path / "out"), model.model.layers[1]
    weight, bias = layer.mlp.experts.gate_up_proj.mT, layer.mlp.experts.gate_up_proj_bias
    for first, name in enumerate(("gate", "up")):
        assert torch.equal(values(stored[f"blk.1.ffn_{name}_exps.weight"]), weight[:, first::2])
        assert torch.equal(values(stored[f"blk.1.ffn_{name}_exps.bias"]), bias[:, first::2])
    assert torch.equal(values(stored["blk.1.ffn_down_exps.weight"]), layer.mlp.experts.down_proj.mT)
    assert torch.equal(values(stored["blk.1.ffn_down_exps.bias"]), layer.mlp.experts.down_proj_bias)
    assert torch.equal(values(stored["blk.1.attn_sinks.weight"]), layer.self_attn.sinks)
    assert torch.equal(values(stored["blk.1.ffn_gate_inp.bias"]), layer.mlp.router.bias)
    assert torch.equal(values(stored["blk.1.post_attention_norm.weight"]), layer.post_attention_layernorm.weight)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GPT_OSS, 2).mapping.values()
    assert {name.rpartition(".")[0] for name in stored} <= {name for _, name in names}


def blocks_of(folder, name):
    """The blocks of llama.cpp [E, rows, bytes] for the experts of a folder in MXFP4: scale, then columns j and j + 16."""
    tensors = load_file(folder / "model.safetensors")
    pairs, scales = tensors[f"{name}_blocks"], tensors[f"{name}_scales"]
    codes = torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2)
    blocks = torch.cat([scales[..., None], codes[..., :16] | (codes[..., 16:] << 4)], dim=-1)
    return blocks.flatten(-2)


def assert_equal_blocks(stored, folder):
    for number in range(2):
        experts = EXPERTS.format(number)
        gate_up = blocks_of(folder, f"{experts}.gate_up_proj")
        expected = {"gate": gate_up[:, ::2], "up": gate_up[:, 1::2], "down": blocks_of(folder, f"{experts}.down_proj")}
        for kind, blocks in expected.items():
            tensor = stored[f"blk.{number}.ffn_{kind}_exps.weight"]
            assert tensor.tensor_type.name == "MXFP4"
            assert torch.equal(torch.from_numpy(np.array(tensor.data)), blocks)


def test_the_codes_of_the_source_are_exported_bit_for_bit(quantized, tmp_path):
    compress.export(quantized, tmp_path / "out", "gguf")
    assert_equal_blocks(tensors_of(tmp_path / "out"), quantized)
    source, _ = compress.load(quantized, "float32")
    for path in (tmp_path / "out", alone(tmp_path / "out")):
        model, _ = compress.load(path, "float32")
        layers, expected = linears(model), linears(source)
        names = [name for name in layers if ".experts." in name]
        assert len(names) == 16
        for name in names:
            assert layers[name].scheme.text == "mxfp4, group 32"
            assert layers[name].all_parts[0].sha256() == expected[name].all_parts[0].sha256()


def test_a_run_that_quantizes_attention_keeps_the_experts(quantized, recipe, tmp_path):
    step = RTN(weights="int8", group_size=32, targets=["*.self_attn.*"])
    asked = recipe(step, model=str(quantized), save={"format": "gguf"}, eval=None)
    [note] = [note for note in compress.plan(asked).notes if "YaRN" in note]
    assert "truncate: false" in note
    made = compress.run(asked, tmp_path / "out", progress=False)
    assert made.report["verified"]["own"] <= LOGITS
    card = (tmp_path / "out" / "README.md").read_text()
    assert "llama.cpp rounds the ends of the ramp of YaRN" in " ".join(card.split())
    stored = tensors_of(tmp_path / "out")
    assert_equal_blocks(stored, quantized)
    assert stored["blk.0.attn_q.weight"].tensor_type.name == "Q8_0"
    kind = GGUFReader(tmp_path / "out" / FILE).get_field("general.file_type").contents()
    assert kind == int(gguf.LlamaFileType.MOSTLY_MXFP4_MOE)  # most weights are those of experts


@pytest.mark.parametrize("weights", ["int4_signed", "mxfp4", "int8"])
def test_experts_are_rounded_to_any_block_type(weights, tokenizer, tmp_path):
    model = gguf_model("gpt-oss")
    compress.apply(model, RTN(weights=weights, group_size=32))
    expected = model(IDS).logits
    compress.save(model, tmp_path / "out", "gguf", tokenizer, "float32", embedding="dense", head="dense")
    stored = tensors_of(tmp_path / "out")
    gate, up = (values(stored[f"blk.1.ffn_{kind}_exps.weight"])[3] for kind in ("gate", "up"))
    for path in (tmp_path / "out", alone(tmp_path / "out")):
        back, _ = compress.load(path, "float32")
        difference = float((back(IDS).logits - expected).abs().max() / expected.abs().max())
        assert difference < 1e-3  # scales are rounded to float16
        layer = linears(back)["model.layers.1.mlp.experts.3.gate_up_proj"]
        assert layer.scheme.codes.grid.name == weights
        assert torch.equal(layer.weight_as(torch.float32), torch.stack([gate, up], dim=1).flatten(0, 1))


def test_experts_of_a_width_without_blocks_are_refused(tokenizer, recipe, tmp_path):
    gguf_model("gpt-oss").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    asked = recipe(RTN(weights="uint4_k"), model=str(tmp_path / "model"), save={"format": "gguf"}, eval=None)
    with pytest.raises(TargetError, match="inputs are not a multiple of 256"):
        compress.plan(asked)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit is 5.0, but llama.cpp computes gpt-oss with swiglu_limit 7.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"attention_bias": False}, "attention_bias is False"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "its sliding windows are not in 1 of 2 blocks"),
    ],
)
def test_what_llamacpp_computes_otherwise_is_refused(changes, reason):
    kind, options = FAMILIES["gpt-oss"]
    config = AutoConfig.for_model(kind, **{**options, **changes})
    assert architecture_of(config).refuses(config).startswith(reason)


def test_the_magnitude_of_yarn_is_relative_to_that_of_llamacpp():
    """llama.cpp multiplies by 0.1 ln(factor) + 1 and by the key (llama-context.cpp, ggml-cpu/ops.cpp, rope_yarn)."""
    stated = dict(architecture_of(GptOssConfig()).metadata(GptOssConfig()))
    assert "rope.scaling.attn_factor" not in stated and "rope.scaling.yarn_log_multiplier" not in stated
    assert (stated["rope.scaling.factor"], stated["rope.scaling.original_context_length"]) == (32.0, 4096)
    assert (stated["expert_feed_forward_length"], stated["attention.sliding_window"]) == (2880, 128)
    config = GptOssConfig()
    config.rope_parameters = {**config.rope_parameters, "attention_factor": 1.5}
    assert dict(architecture_of(config).metadata(config))["rope.scaling.attn_factor"] == pytest.approx(
        1.5 / (0.1 * np.log(32.0) + 1)
    )


def test_an_importance_matrix_names_gates_and_ups(tokenizer, tmp_path):
    gguf_model("gpt-oss").save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    compress.imatrix(str(tmp_path / "model"), tmp_path / "out.gguf", sequences=1, length=16)
    entries = read_imatrix(tmp_path / "out.gguf")
    gate, up = (entries[f"blk.1.ffn_{kind}_exps.weight"]() for kind in ("gate", "up"))
    assert torch.equal(gate, up) and len(gate) == 4 * 64
    model = gguf_model("gpt-oss")
    compress.apply(model, RTN(weights="int4_signed", group_size=32, imatrix=str(tmp_path / "out.gguf")))
    assert any(".experts.3.gate_up_proj" in name for name in linears(model))
    write_imatrix(tmp_path / "no.gguf", {"blk.0.attn_q.weight": Squares(torch.ones(1, 64), torch.ones(1))}, "", 1, 1)
    with pytest.raises(TargetError, match="it has no entry"):
        compress.apply(gguf_model("gpt-oss"), RTN(weights="int8", group_size=32, imatrix=str(tmp_path / "no.gguf")))


@pytest.mark.parametrize(
    "changes",
    [
        {"rows": (1, 2)},  # a row twice, and one never
        {"stride": 3},
        {"stride": "2"},
        {"rows": (0, 3)},
        {"rows": (1, 1)},
        {"rows": [0]},
        {"heads": 2},
        {"stride": None},
    ],
)
def test_rows_in_turns_that_are_not_whole_are_refused(changes, tokenizer, tmp_path, monkeypatch):
    model = gguf_model("gpt-oss")
    compress.apply(model, RTN(weights="int8", group_size=32))
    compress.save(model, tmp_path / "out", "gguf", tokenizer, embedding="dense", head="dense")
    reader = GGUFReader(tmp_path / "out" / FILE)
    entries = {
        f"blk.0.ffn_{kind}_exps.weight": Entry(
            f"{EXPERTS.format(0)}.#.gate_up_proj.weight{BLOCKS}",
            **({"members": 4, "stride": 2, "rows": (i, i + 1)} | (changes if i == 0 else {})),
        )
        for i, kind in enumerate(("gate", "up"))
    }
    assert set(entries) <= {tensor.name for tensor in reader.tensors}
    (tmp_path / "out" / "gguf_tensors.json").write_text(packed_index(entries))
    with pytest.raises(ModelError, match="cannot be read .*(does not fit a tensor|hold each of its rows once)"):
        compress.load(tmp_path / "out")
