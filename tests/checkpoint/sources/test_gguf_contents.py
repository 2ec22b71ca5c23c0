"""A GGUF file that is not read completely is an error that names what is missing or ignored; nothing is cached."""

import logging
import re
import shutil
import struct
import subprocess

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from tolerances import near
from transformers import AutoConfig, AutoModelForCausalLM

import compress
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources import gguf as reading
from compress.errors import ModelError

gguf = pytest.importorskip("gguf")

from gguf_writing import interleaved, write_pico  # noqa: E402  needs gguf

KINDS = ["F32", "Q4_0"]  # read by transformers, and by our own reader of codes


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, empty; files are converted in this process, which starts sooner."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))

    def run(function, *paths):
        try:
            function(*paths)
        except ModelError as error:
            return subprocess.CompletedProcess([], 1, "", f"Traceback\n{type(error).__module__}.ModelError: {error}\n")
        return subprocess.CompletedProcess([], 0, "", "")

    monkeypatch.setattr(reading, "run_function", run)
    return tmp_path / "cache" / "compress"


def cached(cache):
    return [entry.name for entry in cache.glob("*/*") if entry.suffix != ".lock"]


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path))], ids=["load", "open_model"])
@pytest.mark.parametrize("kind", KINDS)
def test_missing_tensors_are_an_error(kind, opened_by, pico, cache, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, kind, without={"blk.1.ffn_up.weight", "blk.2.attn_norm.weight"})
    with pytest.raises(ModelError) as error:
        opened_by(path)
    names = "model.layers.1.mlp.up_proj.weight, model.layers.2.input_layernorm.weight"
    assert str(error.value).startswith(f"model: {path} lacks tensors of the model: {names}; ")
    assert cached(cache) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_is_missing_although_the_file_has_as_many_weights_as_the_model(kind, pico, cache, tmp_path):
    path, divisors = tmp_path / "a.gguf", np.ones(256, np.float32)
    write_pico(pico, path, kind, without={"blk.2.attn_norm.weight"}, extra={"rope_freqs.weight": divisors})
    with pytest.raises(ModelError, match=r"lacks tensors of the model: model\.layers\.2\.input_layernorm\.weight; "):
        compress.load(path)
    assert cached(cache) == []


def bare(architecture, **counts):
    """The bytes of a file that states counts and holds one small tensor, of 32 numbers."""
    text = {"general.architecture": architecture, "tokenizer.ggml.model": "gpt2"}
    values = [(key, struct.pack("<I", 8) + packed(value)) for key, value in text.items()]
    values += [(f"{architecture}.{key}", struct.pack("<Ii", 5, value)) for key, value in counts.items()]
    data = b"GGUF" + struct.pack("<IQQ", 3, 1, len(values)) + b"".join(packed(key) + value for key, value in values)
    data += packed("output_norm.weight") + struct.pack("<IQIQ", 1, 32, 0, 0)
    return data + bytes(-len(data) % 32 + 128)


def packed(text):
    return struct.pack("<Q", len(text)) + text.encode()


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path))], ids=["load", "open_model"])
@pytest.mark.parametrize(
    ("count", "message"),
    [
        (2**21, r"its qwen2\.block_count is 2097152, but it must be from 0 to 1048576; fetch the file again"),
        (-1, r"its qwen2\.block_count is -1, but it must be from 0 to 1048576; fetch the file again"),
        (2_000, "describes a model of more than 5001 modules, which the files of the model are too small for"),
    ],
)
def test_a_small_file_of_many_layers_is_refused_beside_large_files(count, message, opened_by, cache, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    (tmp_path / "a.gguf").write_bytes(bare("qwen2", block_count=count, embedding_length=32))
    for name in ("large.gguf", "large.safetensors"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(ModelError, match=rf"a\.gguf:? {message}"):
        opened_by(tmp_path / "a.gguf")
    assert cached(cache) == []
    logged = [record.getMessage() for record in caplog.records if "converted to dense weights" in record.getMessage()]
    assert all(re.search(message, reason) for reason in logged)  # that of each reader, the first of which goes on


EXTRA = {"blk.0.ffn_gate.bias": np.ones(288, np.float32), "rope_freqs.weight": np.full(16, 2, np.float32)}


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path))], ids=["load", "open_model"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_read_are_an_error(kind, opened_by, pico, cache, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, kind, extra=EXTRA)
    with pytest.raises(
        ModelError, match=r"not read: blk\.0\.ffn_gate\.bias, rope_freqs\.weight; it would be another model"
    ):
        opened_by(path)
    assert cached(cache) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = yarn; "),
        (
            {"llama.rope.scaling.factor": 4.0, "llama.rope.scale_linear": 2.0},
            r"llama\.rope\.scale_linear = 2\.0; ",
        ),
        ({"llama.logit_scale": 0.5}, r"llama\.logit_scale = 0\.5; "),
        ({"llama.attention.sliding_window": 64}, r"llama\.attention\.sliding_window = 64; "),
        ({"llama.attention.causal": False}, r"llama\.attention\.causal = False; "),
        ({"llama.not_known_yet": 1}, r"llama\.not_known_yet = 1; "),
    ],
)
def test_keys_that_are_not_read_are_an_error(kind, keys, named, pico, cache, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, kind, keys=keys)
    with pytest.raises(ModelError, match=rf"states hyperparameters that are not read: {named}"):
        compress.load(path)
    assert cached(cache) == []


def test_keys_without_effect_and_with_the_values_of_the_model_are_accepted(pico, tmp_path):
    path, ids = tmp_path / "a.gguf", torch.arange(30, 60)[None]
    keys = {
        "llama.rope.scaling.type": "none",
        "llama.rope.scaling.factor": 1.0,
        "llama.rope.scale_linear": 1.0,
        "llama.attention.causal": True,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "general.author": "someone",
        "split.count": 1,
    }
    write_pico(pico, path, "F32", keys=keys)
    with torch.no_grad():
        assert near(compress.load(path)[0](ids).logits, compress.load(pico)[0](ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_of_its_own_is_read(kind, pico, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, kind, extra={"output.weight": np.ones((1024, 128), np.float32)})
    assert not compress.load(path)[0].config.tie_word_embeddings


def test_a_file_of_one_part_is_whole(pico, tmp_path):
    write_pico(pico, tmp_path / "a-00001-of-00001.gguf", "F32")
    assert compress.load(tmp_path / "a-00001-of-00001.gguf")


def test_folders_of_earlier_versions_are_not_used(pico, cache, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, "F32")
    folder = reading.as_safetensors(path)
    for earlier in ("gguf-1", "gguf-2", "gguf-codes-1"):
        shutil.copytree(folder, cache / earlier / folder.name)
    assert folder.parent.name not in ("gguf-1", "gguf-2") and reading.as_safetensors(path) == folder
    assert list((cache / "gguf-2" / folder.name).iterdir())


@pytest.mark.slow
def test_the_process_of_the_conversion_tells_the_error(pico, cache, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    write_pico(pico, tmp_path / "a.gguf", "F32", extra=EXTRA)
    with pytest.raises(ModelError, match=r"^model: .*a\.gguf holds tensors that are not read: blk\.0\.ffn_gate\.bias"):
        open_model(str(tmp_path / "a.gguf"))
    assert cached(cache) == []


ROUNDED = 0.15  # relative difference of logits by weights in Q4_0


def relative(logits, expected):
    return float((logits - expected).norm() / expected.norm())


def scaled(pico, **rope):
    """The pico model with a scaled rotary embedding, and the divisors of its frequencies."""
    config = AutoConfig.from_pretrained(pico)
    config.rope_parameters = {"rope_theta": 10000.0, **rope}
    model = AutoModelForCausalLM.from_pretrained(pico, config=config).eval()
    plain = 10000.0 ** -(torch.arange(0, 32, 2).float() / 32)
    return model, (plain / model.model.rotary_emb.inv_freq).numpy().astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("positions", [64, 8192])
def test_divisors_of_llama_3_are_read_as_its_scaled_rotary_embedding(kind, positions, pico, tmp_path):
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope |= {"rope_type": "llama3", "original_max_position_embeddings": positions}
    model, divisors = scaled(pico, **rope)
    write_pico(pico, tmp_path / "a.gguf", kind, extra={"rope_freqs.weight": divisors})
    read = compress.load(tmp_path / "a.gguf")[0]
    assert read.config.rope_parameters == {"rope_theta": 10000.0, **rope}
    ids = torch.arange(30, 400)[None]
    with torch.no_grad():
        logits, expected = read(ids).logits, model(ids).logits
    assert near(logits, expected) if kind == "F32" else relative(logits, expected) < ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_positions_of_divisors_are_those_that_the_file_states(kind, pico, cache, tmp_path):
    """Divisors of 3,000 positions are none of a power of two."""
    rope = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    rope["original_max_position_embeddings"] = 3000
    _, divisors = scaled(pico, **rope)
    extra, key = {"rope_freqs.weight": divisors}, "llama.rope.scaling.original_context_length"
    write_pico(pico, tmp_path / "a.gguf", kind, extra=extra, keys={key: 3000})
    assert compress.load(tmp_path / "a.gguf")[0].config.rope_parameters == {"rope_theta": 10000.0, **rope}
    for keys in ({}, {key: 3001}, {key: "many"}):
        write_pico(pico, tmp_path / "b.gguf", kind, extra=extra, keys=keys)
        with pytest.raises(ModelError, match=r"not read: rope_freqs\.weight"):
            compress.load(tmp_path / "b.gguf")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys",
    [{"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}, {"llama.rope.scale_linear": 4.0}],
    ids=["today", "earlier"],
)
def test_linear_scaling_is_read(kind, keys, pico, tmp_path):
    model, _ = scaled(pico, rope_type="linear", factor=4.0)
    write_pico(pico, tmp_path / "a.gguf", kind, keys=keys)
    read, ids = compress.load(tmp_path / "a.gguf")[0], torch.arange(30, 400)[None]
    with torch.no_grad():
        logits, expected = read(ids).logits, model(ids).logits
    assert near(logits, expected) if kind == "F32" else relative(logits, expected) < ROUNDED


@pytest.mark.parametrize("kind", KINDS)
def test_divisors_of_another_rule_are_an_error(kind, pico, cache, tmp_path):
    divisors = np.linspace(1, 3, 16).astype(np.float32)
    write_pico(pico, tmp_path / "a.gguf", kind, extra={"rope_freqs.weight": divisors})
    with pytest.raises(ModelError, match=r"not read: rope_freqs\.weight"):
        compress.load(tmp_path / "a.gguf")
    write_pico(pico, tmp_path / "ones.gguf", kind, extra={"rope_freqs.weight": np.ones(16, np.float32)})
    assert compress.load(tmp_path / "ones.gguf")[0].config.rope_parameters["rope_type"] == "default"


@pytest.mark.parametrize("kind", KINDS)
def test_biases_of_attention_are_read(kind, pico, tmp_path):
    config = AutoConfig.from_pretrained(pico)
    config.attention_bias = True
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(pico, config=config).eval()
    biases = {}
    for i, block in enumerate(model.model.layers):
        for name, leaf, heads in (
            ("q_proj", "attn_q", 4),
            ("k_proj", "attn_k", 2),
            ("v_proj", "attn_v", None),
            ("o_proj", "attn_output", None),
        ):
            bias = block.self_attn.get_submodule(name).bias.data.normal_()
            array = bias.numpy() if heads is None else interleaved(bias.numpy()[:, None], heads)[:, 0]
            biases[f"blk.{i}.{leaf}.bias"] = np.ascontiguousarray(array)
    write_pico(pico, tmp_path / "a.gguf", kind, extra=biases)
    ids = torch.arange(30, 100)[None]
    read = compress.load(tmp_path / "a.gguf")[0]
    with torch.no_grad():
        logits, expected = read(ids).logits, model(ids).logits
    assert near(logits, expected) if kind == "F32" else relative(logits, expected) < ROUNDED


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("name", "isolated"), [("smollm", True), ("starcoder", True), ("gpt-2", False)])
def test_texts_are_divided_before_digits_as_the_file_names_it(name, isolated, kind, pico, tmp_path):
    """llama.cpp divides texts at each digit first for some names, so that the spaces before one are not divided."""
    write_pico(pico, tmp_path / "a.gguf", kind, keys={"tokenizer.ggml.pre": name})
    read = compress.load(tmp_path / "a.gguf")[1]
    tokens = read.convert_ids_to_tokens(read("x    7").input_ids)
    words = [part for part, _ in read.backend_tokenizer.pre_tokenizer.pre_tokenize_str("x    7")]
    assert words == (["x", "ĠĠĠĠ", "7"] if isolated else ["x", "ĠĠĠ", "Ġ7"])
    assert "".join(tokens) == "xĠĠĠĠ7" and read.decode(read("x    7").input_ids) == "x    7"
