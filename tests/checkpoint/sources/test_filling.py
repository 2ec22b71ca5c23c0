"""After `import compress`, transformers alone loads, runs and saves checkpoints of format native."""

import json
import subprocess
import sys

import pytest
import torch
import transformers.quantizers.auto as registries
from tolerances import same_logits
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

import compress
from compress.checkpoint.filling import check_devices
from compress.errors import CompressError, ModelError
from compress.layers.linear import CompressedLinear


@pytest.fixture(scope="module")
def written(pico, pico_ids, tmp_path_factory):
    """A checkpoint of format native with codes, kept weights alone and a rounded cache, and its tokenizer."""
    folder = tmp_path_factory.mktemp("native") / "out"
    model, tokenizer = compress.load(pico)
    steps = [
        compress.Magnitude(pattern="2:4", targets="*.mlp.*"),
        compress.RTN(weights="int4", group_size=32),
        compress.KVCache(),
    ]
    compress.apply(model, steps, pico_ids)
    return compress.save(model, folder, tokenizer=tokenizer)


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def test_from_pretrained_computes_what_load_computes(written, pico_ids):
    theirs, info = AutoModelForCausalLM.from_pretrained(written, output_loading_info=True)
    ours, _ = compress.load(written)
    assert same_logits(logits(theirs, pico_ids), logits(ours, pico_ids))
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    own = {n: m.sha256() for n, m in ours.named_modules() if isinstance(m, CompressedLinear)}
    assert own == {n: m.sha256() for n, m in theirs.named_modules() if isinstance(m, CompressedLinear)}


def test_the_dtype_is_that_of_the_call(written, pico_ids):
    theirs = AutoModelForCausalLM.from_pretrained(written, dtype=torch.bfloat16)
    ours, _ = compress.load(written, dtype="bfloat16")
    assert same_logits(logits(theirs, pico_ids), logits(ours, pico_ids))


def test_save_pretrained_writes_the_same_model(written, pico_ids, tmp_path):
    before = AutoModelForCausalLM.from_pretrained(written)
    before.save_pretrained(tmp_path / "again")
    stated = json.loads((tmp_path / "again" / "config.json").read_text())["quantization_config"]
    assert stated["layers"] == json.loads((written / "config.json").read_text())["quantization_config"]["layers"]
    for after in (AutoModelForCausalLM.from_pretrained(tmp_path / "again"), compress.load(tmp_path / "again")[0]):
        assert same_logits(logits(before, pico_ids), logits(after, pico_ids))


@pytest.mark.parametrize("family", ["qwen2", "gpt2", "mixtral"])  # biases, transposed layers, experts
def test_other_families(family, tiny, ids, tmp_path):
    model = tiny(family)
    compress.apply(model, compress.RTN(weights="int4", group_size=16), ids())
    compress.save(model, tmp_path / "out")
    theirs, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out"), compress.load(tmp_path / "out")[0]
    assert same_logits(logits(theirs.eval(), ids()), logits(ours, ids()))


@pytest.mark.parametrize("family", ["llama", "gemma2", "opt"])  # untied, tied, with positions
def test_quantized_ends(family, tiny, ids, tmp_path):
    model = tiny(family)
    step = compress.RTN(weights="int8", group_size="channel", targets=["*", "lm_head", "embed_tokens"])
    compress.apply(model, step)
    compress.save(model, tmp_path / "out")
    theirs, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    ours = compress.load(tmp_path / "out")[0]
    assert same_logits(logits(theirs.eval(), ids()), logits(ours, ids()))
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    theirs.save_pretrained(tmp_path / "again")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "again"), compress.load(tmp_path / "again")[0]
    assert all(same_logits(logits(after.eval(), ids()), logits(ours, ids())) for after in again)


def test_a_pipeline_needs_no_word_about_compress(written):
    found = pipeline("text-generation", model=str(written))
    ours, tokenizer = compress.load(written)
    asked = tokenizer("Once upon a time", return_tensors="pt")
    tokens = ours.generate(**asked, max_new_tokens=8, do_sample=False)
    made = found("Once upon a time", max_new_tokens=8, do_sample=False)[0]["generated_text"]
    assert made == tokenizer.decode(tokens[0], skip_special_tokens=True)


def test_lm_eval_needs_no_word_about_compress(written, pico_ids):
    lm = pytest.importorskip("lm_eval.models.huggingface").HFLM(pretrained=str(written), device="cpu")
    assert same_logits(logits(lm.model, pico_ids), logits(compress.load(written)[0], pico_ids))


def test_a_config_that_does_not_fit_is_an_error_of_compress(written, tmp_path):
    model, _ = compress.load(written)
    folder = compress.save(model, tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["layers"]["model.layers.0.mlp.up_proj"]["parts"] = [{"kind": "codes"}]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"up_proj: codes lacks its field 'grid'"):
        AutoModelForCausalLM.from_pretrained(folder)


@pytest.mark.parametrize("places", ["disk", {"": "disk"}, {"model": "cpu", "lm_head": 0}])
def test_a_device_map_that_moves_weights_is_an_error(places):
    with pytest.raises(CompressError, match="moves weights between devices .* use one device, or only GPUs"):
        check_devices(places)


@pytest.mark.parametrize("first", ["import compress", "import transformers.quantizers.auto; import compress"])
def test_the_import_is_lazy_and_its_order_does_not_matter(first):
    lazy = "assert 'torch' not in sys.modules;" if first == "import compress" else ""
    code = f"import sys; {first}; {lazy} import transformers.quantizers.auto as a; assert 'compress' in a.AUTO_QUANTIZER_MAPPING"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_without_compress_transformers_stops_and_says_what_to_write(written, monkeypatch):
    for mapping in (registries.AUTO_QUANTIZER_MAPPING, registries.AUTO_QUANTIZATION_CONFIG_MAPPING):
        monkeypatch.delitem(mapping, "compress")
    with pytest.raises(ValueError, match="write: import compress"):
        AutoModelForCausalLM.from_pretrained(written)
    assert AutoConfig.from_pretrained(written).model_type == "llama"
    assert AutoTokenizer.from_pretrained(written).vocab_size > 0


def test_only_compress_writes_again_what_stops_transformers(written, tmp_path):
    """`save_pretrained` drops entries of config.json that it does not know, as SECURITY.md says."""
    model = AutoModelForCausalLM.from_pretrained(written)
    model.save_pretrained(tmp_path / "theirs")
    compress.save(compress.load(written)[0], tmp_path / "ours")
    configs = [json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "theirs", tmp_path / "ours")]
    assert [config.get("transformers_weights") for config in configs] == [
        None,
        "it is in format native of compress; write: import compress",
    ]
