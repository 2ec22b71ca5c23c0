"""A GGUF file that is not read completely is an error that names what is missing or ignored; nothing is cached."""

import shutil
import subprocess

import huggingface_hub.constants
import numpy as np
import pytest
import torch
from tolerances import near

import compress
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources import gguf as reading
from compress.errors import ModelError

gguf = pytest.importorskip("gguf")

from gguf_writing import write_pico  # noqa: E402  needs gguf

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
    assert str(error.value).startswith(f"model: {path} lacks tensors of the model: ")
    assert "model.layers.1.mlp.up_proj.weight, model.layers.2.input_layernorm.weight; " in str(error.value)
    assert cached(cache) == []


EXTRA = {"blk.0.attn_q.bias": np.ones(128, np.float32), "rope_freqs.weight": np.full(16, 2, np.float32)}


@pytest.mark.parametrize("opened_by", [compress.load, lambda path: open_model(str(path))], ids=["load", "open_model"])
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_that_are_not_read_are_an_error(kind, opened_by, pico, cache, tmp_path):
    path = tmp_path / "a.gguf"
    write_pico(pico, path, kind, extra=EXTRA)
    with pytest.raises(
        ModelError, match=r"not read: blk\.0\.attn_q\.bias, rope_freqs\.weight; it would be another model"
    ):
        opened_by(path)
    assert cached(cache) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("keys", "named"),
    [
        ({"llama.rope.scaling.factor": 4.0}, r"llama\.rope\.scaling\.factor = 4\.0; "),
        ({"llama.rope.scaling.type": "yarn"}, r"llama\.rope\.scaling\.type = yarn; "),
        ({"llama.rope.scale_linear": 2.0}, r"llama\.rope\.scale_linear = 2\.0; "),
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_a_split_file_says_what_to_do(kind, pico, cache, tmp_path):
    named, stated = tmp_path / "a-00001-of-00003.gguf", tmp_path / "a.gguf"
    write_pico(pico, named, kind, without={"blk.1.ffn_up.weight"})
    write_pico(pico, stated, kind, keys={"split.count": 3, "split.no": 1})
    for path in (named, stated):
        with pytest.raises(ModelError, match="one of the 3 parts of a split file; .* llama-gguf-split --merge"):
            compress.load(path)
    assert cached(cache) == []


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
    with pytest.raises(ModelError, match=r"^model: .*a\.gguf holds tensors that are not read: blk\.0\.attn_q\.bias"):
        open_model(str(tmp_path / "a.gguf"))
    assert cached(cache) == []
