"""GPT-OSS files of other programs: transformers fails on their header, which compress reads itself."""

import gguf
import huggingface_hub.constants
import pytest
import torch
from gguf import GGUFReader, GGUFValueType
from gguf_families import FAMILIES, gguf_model
from tolerances import same_logits
from transformers import AutoTokenizer

import compress
from compress import RTN
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.sources.hub import folder_of
from compress.errors import ModelError
from compress.layers.linear import CompressedLinear, linears

IDS = torch.arange(40, 64)[None]
WRITTEN = (
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "attention.head_count",
    "attention.head_count_kv",
    "rope.freq_base",
    "attention.layer_norm_rms_epsilon",
    "expert_count",
    "expert_used_count",
    "attention.key_length",
    "attention.value_length",
    "vocab_size",
    "attention.sliding_window",
    "expert_feed_forward_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
)
"""The hyperparameters that llama.cpp's converter writes (conversion/base.py, conversion/gpt_oss.py), without the name."""
ROPE = {**FAMILIES["gpt-oss"][1]["rope_parameters"], "truncate": False}


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def own(pico, tmp_path_factory):
    """The file of compress by the grid of its weights."""
    made = {}

    def of(weights):
        if weights not in made:
            model = gguf_model("gpt-oss", rope_parameters=ROPE)
            if weights is not None:
                compress.apply(model, RTN(weights=weights, group_size=32))
            folder = tmp_path_factory.mktemp("own")
            tokenizer = AutoTokenizer.from_pretrained(pico)
            compress.save(model, folder / "out", "gguf", tokenizer, "float32", embedding="dense", head="dense")
            made[weights] = folder / "out" / FILE
        return made[weights]

    return of


def foreign(file, out, changes=None):
    """A file with the same tensors and vocabulary, and the hyperparameters that llama.cpp's converter writes."""
    reader = GGUFReader(file)
    writer = gguf.GGUFWriter(out, "gpt-oss")
    values = {}
    for key, field in reader.fields.items():
        short = key.removeprefix("gpt-oss.")
        if short in WRITTEN or key.startswith("tokenizer.ggml."):
            array = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            values[key] = field.contents(), field.types[0], array
    for key, change in (changes or {}).items():
        values.pop(f"gpt-oss.{key}", None)
        if change is not None:
            values[f"gpt-oss.{key}"] = *change, None
    for key, (value, kind, array) in values.items():
        writer.add_key_value(key, value, kind, array)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("weights", ["mxfp4", "int8", None])
def test_its_codes_and_its_function_are_those_of_the_file_of_compress(weights, own, pico, tmp_path):
    file = own(weights)
    model, _ = compress.load(file.parent, "float32")
    opened, tokenizer = compress.load(foreign(file, tmp_path / "foreign.gguf"), "float32")
    assert opened.config.rope_parameters == model.config.rope_parameters
    assert opened.config.layer_types == model.config.layer_types
    read, written = (
        {
            name: layer.all_parts[0].dense(torch.float32)
            for name, layer in linears(model_read).items()
            if isinstance(layer, CompressedLinear)
        }
        for model_read in (opened, model)
    )
    assert read.keys() == written.keys() and bool(read) == (weights is not None)
    assert all(torch.equal(values, written[name]) for name, values in read.items())
    assert same_logits(logits(opened), logits(model))
    assert (
        tokenizer is not None
        and tokenizer("A story").input_ids == AutoTokenizer.from_pretrained(pico)("A story").input_ids
    )


def test_a_run_compresses_it(own, tmp_path):
    """Layers that a pass names are made dense; the codes of others are kept."""
    file = own("mxfp4")
    source = foreign(file, tmp_path / "foreign.gguf")
    recipe = {
        "model": str(source),
        "passes": [{"rtn": {"weights": "int8", "group_size": 32, "targets": ["*.self_attn.*"]}}],
        "save": {"format": "gguf", "embedding": "dense", "head": "dense"},
        "eval": None,
    }
    compress.run(compress.Recipe.from_data(recipe), tmp_path / "out", progress=False)
    before, after = ({t.name: t for t in GGUFReader(path).tensors} for path in (file, tmp_path / "out" / FILE))
    assert after["blk.1.attn_q.weight"].tensor_type.name == "Q8_0"
    name = "blk.1.ffn_up_exps.weight"
    assert after[name].tensor_type.name == "MXFP4" and (after[name].data == before[name].data).all()


FLOAT, WHOLE, TEXT = GGUFValueType.FLOAT32, GGUFValueType.UINT32, GGUFValueType.STRING


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_count": None}, "lacks hyperparameters: gpt-oss.block_count"),
        ({"attention.sliding_window": None}, "lacks hyperparameters: gpt-oss.attention.sliding_window"),
        ({"block_count": ("two", TEXT)}, "its block_count is two"),
        ({"block_count": (float("inf"), FLOAT)}, "its block_count is inf"),
        ({"rope.freq_base": None}, "its rope.freq_base is None"),
        ({"rope.freq_base": (float("nan"), FLOAT)}, "its rope.freq_base is nan"),
        ({"rope.scaling.type": ("longrope", TEXT)}, "not read: gpt-oss.rope.scaling"),
        ({"rope.scaling.yarn_ext_factor": (0.5, FLOAT)}, "not read: gpt-oss.rope.scaling.yarn_ext_factor = 0.5"),
        ({"attention.value_length": (16, WHOLE)}, "not read: gpt-oss.attention.value_length = 16"),
        ({"expert_gating_func": (2, WHOLE)}, "not read: gpt-oss.expert_gating_func = 2"),
        ({"block_count": (10**6, WHOLE)}, "describes a model of more than"),
    ],
)
def test_a_header_that_is_another_model_is_refused(changes, message, own, tmp_path):
    file = own("mxfp4")
    with pytest.raises(ModelError, match=message):
        compress.load(foreign(file, tmp_path / "foreign.gguf", changes))


def test_what_needs_a_dense_model_says_why_there_is_none(own, tmp_path):
    source = foreign(own("mxfp4"), tmp_path / "foreign.gguf")
    with pytest.raises(ModelError, match="a gpt-oss file is read with its codes, but transformers cannot make a dense"):
        folder_of(str(source))
