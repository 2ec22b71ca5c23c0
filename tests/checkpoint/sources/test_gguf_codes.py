"""GGUF files of other programs keep their codes where they are used as they are, and compute the same numbers."""

import shutil

import huggingface_hub.constants
import pytest
import torch
from safetensors.torch import load_file
from tolerances import same_logits
from transformers import AutoModelForCausalLM

import compress
from compress.checkpoint.checkpoint import Checkpoint
from compress.checkpoint.containers.gguf import SIDECAR
from compress.checkpoint.containers.gguf_header import FILE
from compress.checkpoint.sources.gguf_codes import checkpoint_of
from compress.checkpoint.sources.hub import folder_of
from compress.errors import ModelError
from compress.kernels.dispatch import plain_torch
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import linears

pytest.importorskip("gguf")

from gguf_writing import cached_models, write_pico

KINDS = {"Q8_0": "int8", "Q4_0": "int4_signed", "Q4_1": "uint4", "Q5_0": "int5_signed", "Q5_1": "uint5"}
IDS = torch.arange(30, 60)[None]


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """The user's cache, empty."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "compress"


@pytest.fixture(scope="module")
def files(pico, tmp_path_factory):
    """The pico model as GGUF in each type, and as floats."""
    folder = tmp_path_factory.mktemp("gguf")
    for kind in ("F32", *KINDS):
        write_pico(pico, folder / f"{kind}.gguf", kind)
    return folder


@torch.no_grad()
def logits(model):
    with plain_torch():
        return model(input_ids=IDS).logits


def weights(model):
    """The weights of all linears, in blocks or not."""
    return {name: layer.all_parts[0].dense(torch.float32) for name, layer in linears(model).items()}


def test_a_fault_of_the_code_reader_is_raised_and_not_hidden_by_dense_weights(files, monkeypatch):
    def fault(*_):
        raise AttributeError("a fault of the reader")

    monkeypatch.setattr("compress.checkpoint.sources.gguf_codes.packed_index", fault)
    with pytest.raises(AttributeError, match="a fault of the reader"):
        compress.load(files / "Q8_0.gguf")


def test_a_file_without_known_codes_is_converted_and_the_log_says_why(files, monkeypatch, caplog):
    monkeypatch.setattr("compress.checkpoint.sources.gguf_codes.BLOCK_TYPES", {})
    with caplog.at_level("INFO", logger="compress.checkpoint.sources.gguf_codes"):
        folder = checkpoint_of(str(files / "Q8_0.gguf"))
    assert (folder / "model.safetensors").exists()
    assert "is converted to dense weights" in caplog.text and "type of its tensors, is not known" in caplog.text


@pytest.mark.parametrize(("kind", "grid"), KINDS.items())
def test_the_codes_of_a_file_are_kept_and_give_the_logits_of_the_dense_model(kind, grid, files):
    model, tokenizer = compress.load(files / f"{kind}.gguf")
    layers = linears(model)
    assert {layer.all_parts[0].scheme.grid.name for layer in layers.values()} == {grid}
    assert isinstance(model.get_input_embeddings(), CompressedEmbedding)
    path = files / f"{kind}.gguf"
    dense = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    found = weights(model)
    for name, layer in linears(dense).items():
        assert torch.equal(found[name], layer.weight), name
    assert same_logits(logits(model), logits(dense))
    assert tokenizer("def f(x)").input_ids


def test_the_folder_is_made_once_and_holds_no_copy_of_the_weights(files, cache):
    path = files / "Q4_0.gguf"
    folder = checkpoint_of(str(path))
    assert (folder / FILE).stat().st_ino == path.stat().st_ino
    (folder / "mark").touch()
    assert checkpoint_of(str(path)) == folder and (folder / "mark").exists()
    assert [child.name for child in cached_models(cache / "gguf-codes-4")] == [folder.name]  # no .part is left


def test_a_file_on_another_file_system_is_copied(files, monkeypatch):
    def refused(*paths):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr("compress.checkpoint.sources.gguf_codes.os.link", refused)
    folder = checkpoint_of(str(files / "Q4_0.gguf"))
    assert (folder / FILE).read_bytes() == (files / "Q4_0.gguf").read_bytes()


@pytest.mark.slow
def test_floats_and_unknown_codes_are_converted_as_before(files, cache, tmp_path, monkeypatch):
    assert checkpoint_of(str(files / "F32.gguf")) == folder_of(str(files / "F32.gguf"))
    monkeypatch.setattr("compress.checkpoint.sources.gguf_codes.BLOCK_TYPES", {})
    assert checkpoint_of(str(files / "Q4_0.gguf")) == folder_of(str(files / "Q4_0.gguf"))
    assert cached_models(cache / "gguf-codes-4") == []


def test_a_file_that_is_cut_off(files, tmp_path):
    path = tmp_path / "a.gguf"
    path.write_bytes((files / "Q4_0.gguf").read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"a\.gguf cannot be read \("):
        compress.load(path)


def test_no_such_file(tmp_path):
    with pytest.raises(ModelError, match=r"model: no file .*nothing\.gguf"):
        compress.load(tmp_path / "nothing.gguf")


def test_without_its_names_a_file_of_another_program_is_refused(files, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint_of(str(files / "Q4_0.gguf")), folder)
    (folder / SIDECAR).unlink()
    with pytest.raises(ModelError, match="was not written by compress; give the file itself as the model"):
        compress.load(folder)
    texts = ('{"token_embd.weight": {"what": 1}}', "[]", '{"token_embd.weight": 3}', "{", "[" * 100_000, "\x00")
    for text in texts:
        (folder / SIDECAR).write_text(text)
        with pytest.raises(ModelError, match=r"model\.gguf cannot be read \("):
            compress.load(folder)


def test_conversion_keeps_every_code(files, tmp_path):
    """GGUF to compressed-tensors and back to GGUF: the file's own codes, not rounded again."""
    source = files / "Q4_0.gguf"
    before = weights(compress.load(source)[0])
    compress.export(source, tmp_path / "native", format="native")
    compress.export(tmp_path / "native", tmp_path / "gguf", format="gguf")
    for folder in ("native", "gguf"):
        after = weights(compress.load(tmp_path / folder)[0])
        for name, weight in before.items():
            assert torch.equal(after[name], weight), (folder, name)


def test_codes_are_saved_once_and_not_as_dense_weights_too(files, tmp_path):
    model, _ = compress.load(files / "Q8_0.gguf")
    compress.save(model, tmp_path / "out", format="native")
    names = {name for path in (tmp_path / "out").glob("*.safetensors") for name in load_file(path)}
    packed = {name for name in names if name.endswith(".weight_packed")}
    assert packed and not {name.removesuffix("_packed") for name in packed} & names
    checkpoint = Checkpoint.open(files / "Q8_0.gguf")
    assert checkpoint.places and not checkpoint.undeclared
