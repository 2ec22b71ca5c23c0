"""Before any work, a run compares the outputs of its model with those of transformers."""

import pytest
import torch

import compress
from compress.checkpoint.opening import open_model
from compress.checkpoint.tensors import StoredTensors
from compress.errors import ModelError
from compress.models.kinds.batch import Batch
from compress.passes.contract.journal import Journal
from compress.pipeline.reference import check_source

RTN = {"rtn": {"weights": "int4", "group_size": 32}}


def notes(journal):
    return [entry.message for entry in journal.entries if "those of transformers" in entry.message]


def test_a_reader_that_changes_a_tensor_is_an_error_before_any_work(recipe, tmp_path, monkeypatch):
    read = StoredTensors.read

    def broken(self, names, reading=None):
        tensors = read(self, names, reading)
        return {n: t * 1.1 if n.endswith("layers.1.self_attn.v_proj.weight") else t for n, t in tensors.items()}

    monkeypatch.setattr(StoredTensors, "read", broken)
    with pytest.raises(ModelError, match="is read otherwise than transformers reads it: its outputs differ"):
        compress.run(recipe(RTN), tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_a_model_that_is_read_right_passes_without_a_note(recipe, tmp_path):
    journal = Journal()
    compress.run(recipe(RTN), tmp_path / "out", progress=False, journal=journal)
    assert notes(journal) == []


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_a_second_copy_that_takes_more_memory_than_the_run_is_not_made(recipe, tiny, tmp_path, monkeypatch, family):
    """transformers holds the experts of a mixture twice: as they are stored, and stacked."""
    model = tiny(family)
    model.save_pretrained(tmp_path / "model")
    opened, asked = open_model(str(tmp_path / "model")), recipe(RTN, model=str(tmp_path / "model"))
    size = sum(4 * tensor.numel() for tensor in model.state_dict().values()) * (1 if family == "llama" else 2)
    monkeypatch.setattr("compress.pipeline.second_copy.SMALL_BYTES", 0)
    for planned, told in ((size, False), (size - 1, True)):
        check_source(opened, Batch({"input_ids": torch.arange(8)[None]}, None), asked, planned, journal := Journal())
        assert [note.startswith("its outputs were not compared") for note in notes(journal)] == [True] * told


INT4 = compress.RTN(weights="int4", group_size=32)
QUANTIZED = {
    "compressed-tensors": [INT4],
    "compressed-tensors, activations": [compress.RTN(weights="int8", group_size="channel", activations="int8")],
    "compressed-tensors, sparse": [compress.Magnitude(pattern="2:4"), INT4],
    "gguf": [compress.RTN(weights="int4_signed", group_size=32)],
    "gguf, embedding": [compress.RTN(weights="int8", group_size=32, targets=["*", "lm_head", "embed_tokens"])],
    "gptq": [INT4],
    "awq": [INT4],
    "bitsandbytes": [compress.RTN(weights="nf4", group_size=32)],
    "native": [INT4],
}
WITHOUT_REFERENCE = {
    "gptq": "transformers reads format gptq with the packages gptqmodel and optimum, which runs do not use",
    "awq": "transformers reads format awq with the package gptqmodel, which runs do not use",
    "bitsandbytes": "transformers reads format bitsandbytes with the package bitsandbytes, which runs do not use",
    "native": "format native is read by compress.load only",
}


@pytest.fixture
def quantized(pico, tmp_path, ids):
    """quantized(name): a checkpoint of the pico model with the passes and the format of a row of `QUANTIZED`."""

    def write(name):
        model, tokenizer = compress.load(pico)
        compress.apply(model, QUANTIZED[name], ids())
        compress.save(model, tmp_path / "source", format=name.partition(",")[0], tokenizer=tokenizer)
        return str(tmp_path / "source")

    return write


@pytest.fixture
def from_quantized(recipe):
    """from_quantized(source, **save): a recipe that writes a quantized model again."""
    return lambda source, **save: recipe(
        {"kv_cache": {}}, model=source, dtype="float32", save={"format": "native", **save}
    )


@pytest.mark.parametrize("name", QUANTIZED)
def test_a_quantized_source_is_compared_where_transformers_reads_it(name, quantized, from_quantized, tmp_path):
    journal, asked = Journal(), from_quantized(quantized(name))
    planned = [note for note in compress.plan(asked).notes if "those of transformers" in note]
    compress.run(asked, tmp_path / "out", progress=False, journal=journal)
    reason = WITHOUT_REFERENCE.get(name)
    expected = [] if reason is None else [f"model: its outputs are not compared with those of transformers: {reason}"]
    assert planned == expected and notes(journal) == expected


@pytest.mark.parametrize("name", ["compressed-tensors", "compressed-tensors, activations", "gguf"])
def test_a_reader_that_changes_codes_is_an_error_before_any_work(
    name, quantized, from_quantized, tmp_path, monkeypatch
):
    source, read = quantized(name), StoredTensors.read_raw

    def broken(self, names, reading=None):
        tensors = read(self, names, reading)
        return {n: t.roll(1, 0) if "v_proj.weight" in n and t.ndim == 2 else t for n, t in tensors.items()}

    monkeypatch.setattr(StoredTensors, "read_raw", broken)
    with pytest.raises(ModelError, match="is read otherwise than transformers reads it: its outputs differ.* own"):
        compress.run(from_quantized(source), tmp_path / "out", progress=False)
    assert not list((tmp_path / "out").glob("*.safetensors"))
    monkeypatch.undo()
    journal = Journal()
    compress.run(from_quantized(source, verify="own"), tmp_path / "out", progress=False, journal=journal)
    reason = "its outputs are not compared with those of transformers: the recipe says verify: own"
    assert notes(journal) == [f"model: {reason}"]


def test_a_quantized_cache_is_not_compared(recipe, tmp_path):
    compress.run(recipe({"kv_cache": {}}, save={"format": "native"}), tmp_path / "first", progress=False)
    planned = compress.plan(recipe(RTN, model=str(tmp_path / "first"), save={"format": "native"})).notes
    assert any("not compared with those of transformers: transformers does not read its cache" in n for n in planned)


@pytest.mark.parametrize("family", ["mamba", "mamba2"])
def test_a_head_whose_dtype_the_model_reads_is_computed_in_that_of_the_computation(family, tiny, ids, tmp_path):
    """Mamba casts hidden states to the dtype of its head, which stays in 16 bits in other models."""
    model = tiny(family).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    expected = type(model).from_pretrained(tmp_path / "model", dtype=torch.float32)
    opened = open_model(str(tmp_path / "model"), "auto", narrow_ends=True)
    with torch.no_grad(), opened.streaming() as streamed:
        found, wanted = streamed(ids()).logits.float(), expected(ids()).logits
    tolerance = 1e-5 if opened.dtype is torch.float32 else 2e-2
    assert float((found - wanted).abs().max()) <= tolerance * float(wanted.abs().max())


@pytest.mark.parametrize(("stored", "dtype", "storage"), [("float32", "float32", "bfloat16"), ("bfloat16",) * 3])
def test_a_weight_that_the_model_reads_itself_is_in_the_dtype_of_the_computation(
    stored, dtype, storage, recipe, tiny, ids, tmp_path
):
    """Mamba multiplies by `dt_proj.weight` without calling the layer."""
    tiny("mamba").to(getattr(torch, stored)).save_pretrained(tmp_path / "model")
    step = {"rtn": {"weights": "int4", "group_size": "channel"}}
    save = {"format": "native", "dtype": storage}
    asked = recipe(step, model=str(tmp_path / "model"), dtype=dtype, save=save, eval=None)
    compress.run(asked, tmp_path / "out", progress=False)
    for loaded in ("bfloat16", "float32"):
        model, _ = compress.load(tmp_path / "out", dtype=loaded)
        with torch.no_grad():
            assert model(ids()).logits.isfinite().all()
            assert model.to(torch.float32)(ids()).logits.isfinite().all()
