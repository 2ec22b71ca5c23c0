"""The format gguf: what the file holds, who reads it, and what is refused."""

import json

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize
from gguf_families import GROUPED, gguf_model
from tolerances import LOGITS
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
)

import compress
from compress import GPTQ, RTN, KVCache
from compress.checkpoint.containers.gguf import Entry, entry_of, open_gguf, packed_index
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.formats.gguf import GGUF
from compress.checkpoint.formats.gguf_files.architecture import architecture_of
from compress.checkpoint.sources.limits import stored_bytes
from compress.errors import ModelError, RecipeError, SaveError, SeveralErrors, TargetError
from compress.layers.linear import CompressedLinear
from compress.layers.scheme import LayerScheme

GRIDS = {"int4": "Q4_0", "int4_signed": "Q4_0", "uint4": "Q4_1", "int5_signed": "Q5_0", "uint5": "Q5_1", "int8": "Q8_0"}
GRIDS["iq4_nl"] = "IQ4_NL"
GROUPS = {"group_size": 32}


def metadata(path):
    """The values of a file's header by key."""
    return {name: field.contents() for name, field in gguf.GGUFReader(path).fields.items()}


@pytest.fixture(scope="module")
def wide(tmp_path_factory, pico):
    """A random model whose widths are multiples of 256, with pico's tokenizer."""
    config = AutoModelForCausalLM.from_pretrained(pico).config
    for name, value in {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1, "head_dim": 64}.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def untied(tmp_path_factory, pico):
    """Pico with a head of its own."""
    folder = tmp_path_factory.mktemp("untied")
    model = AutoModelForCausalLM.from_pretrained(pico)
    model.config.tie_word_embeddings = False
    weight = model.lm_head.weight.detach().clone() * 1.01
    model.lm_head.weight = torch.nn.Parameter(weight)
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "grid", [pytest.param(g, marks=[] if g in ("int4_signed", "uint4") else pytest.mark.slow) for g in GRIDS]
)
def test_the_file_holds_the_codes_bit_for_bit_and_transformers_reads_it(grid, recipe, tmp_path):
    step = GPTQ(weights=grid, **GROUPS)
    report = compress.run(recipe(step, save={"format": "gguf"}), tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] <= LOGITS
    model, _ = compress.load(tmp_path)
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / FILE).tensors}
    stored = theirs["blk.1.attn_q.weight"]
    assert stored.tensor_type.name == GRIDS[grid]
    ours = model.get_submodule("model.layers.1.self_attn.q_proj").weight_as(torch.float32)
    assert torch.equal(torch.from_numpy(dequantize(stored.data, stored.tensor_type)), Entry("", heads=4).to_file(ours))
    down = theirs["blk.2.ffn_down.weight"]
    ours = model.get_submodule("model.layers.2.mlp.down_proj").weight_as(torch.float32)
    assert torch.equal(torch.from_numpy(dequantize(down.data, down.tensor_type)), ours)
    assert not list(tmp_path.glob("*.safetensors")) and not (tmp_path / "model.safetensors.index.json").exists()
    assert theirs["output_norm.weight"].tensor_type.name == "F32"
    assert theirs["token_embd.weight"].tensor_type.name == "Q8_0"  # 128 is no multiple of 256, which Q6_K needs


@pytest.mark.parametrize(
    "grid",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("uint2_k", "iq2_s", "iq2_xs", "iq2_xxs")),
        *("uint4_k", "int3_k", "int6_k", "iq4_xs", "iq3_s", "iq3_xxs"),
    ],
)
def test_super_blocks_are_stored_as_they_are(grid, wide, recipe, tmp_path):
    step = RTN(weights=grid, scale="mse")
    made = compress.run(recipe(step, model=wide, save={"format": "gguf"}, eval=None), tmp_path, progress=False)
    assert made.report["verified"]["own"] <= LOGITS and made.report["verified"]["transformers"] <= LOGITS
    stored = next(t for t in gguf.GGUFReader(tmp_path / FILE).tensors if t.name == "blk.0.ffn_down.weight")
    layer = compress.load(tmp_path)[0].get_submodule("model.layers.0.mlp.down_proj")
    assert isinstance(layer, CompressedLinear) and layer.scheme.codes.grid.name == grid
    assert torch.equal(torch.from_numpy(dequantize(stored.data, stored.tensor_type)), layer.weight_as(torch.float32))
    head = next(t for t in gguf.GGUFReader(tmp_path / FILE).tensors if t.name == "token_embd.weight")
    assert head.tensor_type.name == "Q6_K"


def test_the_header_says_what_llama_cpp_needs(recipe, pico, tmp_path):
    compress.run(recipe(RTN(weights="int4", **GROUPS), save={"format": "gguf"}, eval=None), tmp_path, progress=False)
    found = metadata(tmp_path / FILE)
    assert found["general.architecture"] == "llama" and found["general.file_type"] == 2
    assert found["llama.attention.head_count_kv"] == 2 and found["llama.rope.dimension_count"] == 32
    assert found["llama.vocab_size"] == len(found["tokenizer.ggml.tokens"]) == 1024
    assert found["tokenizer.ggml.pre"] == "gpt-2" and found["tokenizer.ggml.add_bos_token"] is False
    assert json.loads(found["compress.tensors"])["blk.*.attn_k.weight"]["heads"] == 2
    tokenizer = AutoTokenizer.from_pretrained(tmp_path, gguf_file=FILE)
    text = "Once upon a time, 12 foxes"
    assert tokenizer(text).input_ids == AutoTokenizer.from_pretrained(pico)(text).input_ids


def test_the_index_has_one_entry_for_all_blocks_that_are_alike():
    entries = {f"blk.{i}.attn_k.weight": Entry(f"model.layers.{i}.k_proj.weight_blocks", 2) for i in range(12)}
    entries |= {f"blk.{i}.attn_norm.weight": Entry(f"model.layers.{i}.norm.weight", shift=1) for i in range(12)}
    entries["blk.7.attn_k.weight"] = Entry("model.layers.7.k_proj.weight", 2)  # not quantized
    entries["blk.3.ffn_gate.weight"] = Entry("model.layers.4.mlp.experts.3.weight")  # another number
    entries["output_norm.weight"] = Entry("model.norm.weight")
    index = json.loads(packed_index(entries))
    assert len(index) == 5 and index["output_norm.weight"] == {"name": "model.norm.weight"}
    assert {name: entry_of(index, name) for name in entries} == entries
    assert entry_of(index, "rope_freqs.weight") is None and entry_of(index, "blk.5.ffn_up.weight") is None


def test_a_run_that_was_killed_ends_with_the_same_file(recipe, stop, tmp_path):
    asked = recipe(RTN(weights="int4", **GROUPS), save={"format": "gguf", "verify": "own"}, eval=None)
    stop(asked, tmp_path / "killed")
    compress.run(asked, tmp_path / "killed", progress=False)
    compress.run(asked, tmp_path / "whole", progress=False)
    assert (tmp_path / "killed" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()
    damaged = bytearray((tmp_path / "whole" / FILE).read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "whole" / FILE).write_bytes(damaged)
    compress.run(asked, tmp_path / "whole", progress=False)  # computes again what changed
    assert (tmp_path / "killed" / FILE).read_bytes() == (tmp_path / "whole" / FILE).read_bytes()


@pytest.mark.parametrize(
    "entry",
    [
        Entry("", heads=2),
        Entry("", groups=2, group_heads=4),
        Entry("", transposed=True),
        Entry("", transposed=True, heads=2, shift=1),
    ],
)
def test_a_tensor_goes_into_the_file_and_comes_back(entry):
    rows = torch.arange(16.0 * 16).view(16, 16)
    stored = entry.to_file(rows)
    assert not torch.equal(stored, rows) and torch.equal(entry.to_model(stored), rows)
    assert entry.shape_in_file((16, 8)) == ((8, 16) if entry.transposed else (16, 8))


def test_the_order_of_rows_that_are_rotated_in_pairs_and_of_fused_linears():
    rows = torch.arange(8)
    assert Entry("", heads=2).to_file(rows).tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    # two groups of a query, a key and a value head of one row each, as in GPT-NeoX
    assert Entry("", groups=2, group_heads=3).to_file(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]
    # one group of two queries, a key and a value head of two rows each, as in Falcon: the order is that of the file
    assert Entry("", groups=1, group_heads=4).to_file(rows).tolist() == list(range(8))
    # two of them, as in Falcon with grouped queries
    assert Entry("", groups=2, group_heads=4).to_file(rows).tolist() == [0, 1, 4, 5, 2, 6, 3, 7]


@pytest.mark.parametrize(
    "entry",
    [
        Entry("a", heads=3),
        Entry("a", heads=0),
        Entry("a", heads="2"),
        Entry("a", groups=2, group_heads=3),
        Entry("a", axis=5),
        Entry("a", shift="1"),
        Entry(1),
    ],
)
def test_an_entry_that_does_not_fit_its_tensor_is_refused(entry):
    Entry("a", heads=4, axis=1).check((8, 3))
    with pytest.raises(ValueError, match="does not fit a tensor of"):
        entry.check((8, 3))


def test_an_axis_of_length_one_is_left_out():
    gate, filters = torch.arange(4.0)[None], torch.arange(6.0).view(2, 1, 3)
    for entry, tensor in ((Entry("", axis=0), gate), (Entry("", axis=1), filters)):
        stored = entry.to_file(tensor)
        assert stored.shape == entry.shape_in_file(tensor.shape) and 1 not in stored.shape
        assert torch.equal(entry.to_model(stored), tensor)
        assert entry.shape_in_model(stored.shape) == tensor.shape


@pytest.mark.parametrize(
    ("step", "save", "message"),
    [
        (
            RTN(weights="int4", group_size=64),
            {},
            "no block type of GGUF holds int4, group 64; use group_size: 32, which",
        ),
        (RTN(weights="int4", symmetric=False, **GROUPS), {}, "with zero points; use weights: uint4 or uint5"),
        (RTN(weights="nf4", **GROUPS), {}, "no block type of GGUF holds nf4, group 32; use weights: int4_signed, int4"),
        (
            RTN(weights="uint4_k"),
            {},
            "its 128 inputs are not a multiple of 256, the super-blocks .*; set fallback: int5",
        ),
        (RTN(weights="int8", activations="int8", **GROUPS), {}, "cannot state that activations are rounded"),
        (GPTQ(weights="int4", act_order="group", **GROUPS), {}, "in any order of columns; use act_order: static"),
        (KVCache(), {}, "format gguf cannot state a cache policy; .* remove the pass"),
    ],
)
def test_what_no_block_holds_is_refused_before_the_first_pass(step, save, message, recipe, tmp_path):
    with pytest.raises(TargetError, match=message):
        compress.run(recipe(step, save={"format": "gguf", **save}), tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()


def test_an_architecture_that_llama_cpp_is_not_written_for(recipe, tiny_folder, tmp_path):
    asked = recipe(RTN(weights="int8", **GROUPS), model=tiny_folder("opt"), save={"format": "gguf"})
    with pytest.raises(SeveralErrors, match="models of the type opt cannot be written as GGUF, only llama, mistral"):
        compress.run(asked, tmp_path / "out", progress=False)
    asked = recipe(RTN(weights="int8", **GROUPS), model=tiny_folder("llama"), save={"format": "gguf"})
    with pytest.raises(SeveralErrors, match="format gguf: the model has no fast tokenizer"):
        compress.run(asked, tmp_path / "out", progress=False)


def test_saving_a_model_in_memory_refuses_an_unknown_architecture_too(tiny, tmp_path):
    with pytest.raises(SaveError, match="models of the type opt cannot be written"):
        compress.save(tiny("opt"), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_types_of_embedding_and_head(recipe, tmp_path):
    with pytest.raises(RecipeError, match=r"save: embedding: type 'Q40' is not known; did you mean 'Q4_0'\?"):
        recipe(RTN(), save={"format": "gguf", "embedding": "Q40"})
    with pytest.raises(RecipeError, match="head: Q8_0 is for format gguf; format native stores it in save.dtype"):
        recipe(RTN(), save={"format": "native", "head": "Q8_0"})
    asked = recipe(RTN(weights="int8", **GROUPS), save={"format": "gguf", "head": "Q4_1"}, eval=None)
    compress.run(asked, tmp_path, progress=False)
    stored = next(t for t in gguf.GGUFReader(tmp_path / FILE).tensors if t.name == "token_embd.weight")
    assert stored.tensor_type.name == "Q4_1"  # the head is tied to the embedding


def test_block_types_of_ends_that_a_pass_compresses_are_refused_by_the_plan(recipe, untied):
    ends = ["lm_head", "embed_tokens"]
    both = RTN(weights="int4", **GROUPS), RTN(targets=ends, weights="int8", **GROUPS)
    reason = r"save: {}: Q4_1 has no effect, since passes\[1\] rtn compresses {}; leave it out, or remove {} from"
    with pytest.raises(TargetError, match=reason.format("head", "lm_head", "lm_head")):
        compress.plan(recipe(*both, save={"format": "gguf", "head": "Q4_1"}))
    compress.plan(recipe(*both, save={"format": "gguf", "embedding": "Q4_1"}))  # tied: the head's type counts
    name = "model.embed_tokens"
    with pytest.raises(TargetError, match=reason.format("embedding", name, name)):
        compress.plan(recipe(*both, model=untied, save={"format": "gguf", "embedding": "Q4_1"}))
    head = both[0], RTN(targets=["lm_head"], weights="int8", **GROUPS)
    compress.plan(recipe(*head, model=untied, save={"format": "gguf", "embedding": "Q4_1"}))


def test_files_of_others_and_damaged_ones_say_what_to_do(recipe, tmp_path):
    asked = recipe(RTN(weights="int4", **GROUPS), save={"format": "gguf", "verify": "own"}, eval=None)
    compress.run(asked, tmp_path, progress=False)
    whole = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(whole[: len(whole) // 3])
    with pytest.raises(ModelError, match=r"model.gguf cannot be read"):
        compress.load(tmp_path)
    writer = gguf.GGUFWriter(tmp_path / FILE, "llama")
    writer.add_tensor("token_embd.weight", np.zeros((4, 4), dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    with pytest.raises(ModelError, match="it was not written by compress; give the file itself as the model"):
        compress.load(tmp_path)
    with pytest.raises(ValueError, match="not written by compress"):
        open_gguf(tmp_path / FILE)


def test_a_pass_compresses_tied_ends_and_the_format_leaves_them(recipe, pico, tmp_path):
    """The codes of the pass are stored under the embedding's name, and `compress.load` reads them as codes."""
    steps = RTN(weights="uint4", **GROUPS), RTN(targets=["lm_head", "embed_tokens"], weights="int5_signed", **GROUPS)
    made = compress.run(recipe(*steps, save={"format": "gguf"}, eval=None), tmp_path, progress=False)
    assert made.report["verified"]["own"] <= LOGITS and made.report["verified"]["transformers"] <= LOGITS
    theirs = {t.name: t for t in gguf.GGUFReader(tmp_path / FILE).tensors}
    assert theirs["token_embd.weight"].tensor_type.name == "Q5_0" and "output.weight" not in theirs
    model, _ = compress.load(tmp_path)
    assert model.lm_head.scheme.codes.grid.name == "int5_signed"
    stored = theirs["token_embd.weight"]
    wanted = model.lm_head.weight_as(torch.float32)
    assert torch.equal(torch.from_numpy(dequantize(stored.data, stored.tensor_type)), wanted)


def test_a_pass_compresses_an_untied_head_alone(recipe, untied, tmp_path):
    step = GPTQ(targets=["lm_head", "q_proj"], weights="int8", **GROUPS)
    asked = recipe(step, model=untied, save={"format": "gguf", "embedding": "Q4_0"}, eval=None)
    made = compress.run(asked, tmp_path / "out", progress=False)
    assert made.report["verified"]["own"] <= LOGITS
    theirs = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "out" / FILE).tensors}
    assert (theirs["token_embd.weight"], theirs["output.weight"]) == ("Q4_0", "Q8_0")


def test_its_bytes_count_where_a_configuration_is_limited_by_the_files(tmp_path):
    (tmp_path / "model.gguf").write_bytes(bytes(7))
    (tmp_path / "config.json").write_text("{}")
    assert stored_bytes(tmp_path) == 7


def variant(name):
    """Small configurations that transformers does not read completely from a GGUF file, and some that it reads."""
    sizes = {**GROUPED, "head_dim": 32}
    scaled = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 8.0}
    kinds = {
        "llama": lambda: LlamaConfig(**sizes),
        "llama3 rope": lambda: gguf_model("llama-llama3-rope").config,
        "linear rope": lambda: LlamaConfig(**sizes, rope_parameters=scaled),
        "biases": lambda: LlamaConfig(**sizes, attention_bias=True),
        "another theta": lambda: LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 5e5}),
        "qwen2, linear rope": lambda: Qwen2Config(
            **{k: v for k, v in sizes.items() if k != "head_dim"}, rope_parameters=scaled
        ),
        "qwen3, heads of 32": lambda: Qwen3Config(**sizes),
        "gemma": lambda: GemmaConfig(**{**sizes, "head_dim": 256}),
    }
    return kinds[name]()


@pytest.mark.few(4)
@pytest.mark.parametrize(
    ("name", "unread"),
    [
        ("llama", None),
        ("another theta", None),
        ("llama3 rope", "rope_parameters of type llama3"),
        ("linear rope", "rope_parameters of type linear"),
        ("qwen2, linear rope", "rope_parameters of type linear"),
        ("biases", "attention_bias True"),
        ("qwen3, heads of 32", "head_dim 32"),
        ("gemma", "does not read a gemma file"),
    ],
)
def test_a_gap_of_the_reader_in_transformers_is_a_note_of_the_plan(name, unread, pico, tmp_path):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(variant(name)).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    model.save_pretrained(tmp_path / "model")
    AutoTokenizer.from_pretrained(pico).save_pretrained(tmp_path / "model")
    asked = compress.Recipe(
        model=str(tmp_path / "model"),
        passes=[RTN(weights="int4", **GROUPS)],
        calibration={"sequences": 2, "length": 32},
        save={"format": "gguf"},
        eval=None,
    )
    notes = [note for note in compress.plan(asked).notes if "not verified with transformers" in note]
    report = compress.run(asked, tmp_path / "out", progress=False).report
    card = (tmp_path / "out" / "README.md").read_text()
    assert report["verified"]["own"] < 1e-3
    if unread is None:
        assert notes == [] and report["verified"]["transformers"] is not None and "With transformers" in card
        return
    [note] = notes
    assert unread in note and unread in report["verified"]["skipped"] and "With transformers" not in card
    if name in ("gemma", "qwen3, heads of 32"):  # of which it cannot make a model at all
        with pytest.raises((ValueError, RuntimeError)):
            AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=FILE)
        return
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", gguf_file=FILE, dtype=torch.float32).eval()
    ids = torch.randint(1024, (1, 24))
    ours = compress.load(tmp_path / "out")[0](ids).logits
    assert not torch.allclose(theirs(ids).logits, ours, atol=0.05)  # a version that reads it makes this note untrue


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda sizes: Qwen3Config(**sizes, attention_bias=True), "attention_bias: its linears have biases"),
        (lambda sizes: GemmaConfig(**sizes, attention_bias=True), "attention_bias: its linears have biases"),
        (
            lambda sizes: Gemma3TextConfig(
                **{**sizes, "num_hidden_layers": 6},
                query_pre_attn_scalar=32,
                rope_parameters={
                    "full_attention": {"rope_type": "default", "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                },
            ),
            "local rotary embedding is 5000, but llama.cpp computes 10000",
        ),
    ],
)
def test_what_llama_cpp_computes_otherwise_is_refused(config, message):
    config = config({**GROUPED, "head_dim": 32})
    assert message in architecture_of(config).refuses(config)


def test_a_stated_layer_without_codes_is_refused():
    stated = {"layers": {"a": LayerScheme((32, 64)).to_json()}}
    with pytest.raises(ValueError, match="a: a layer without codes is stated"):
        GGUF().schemes(stated, {"a": (32, 64)}, {})
