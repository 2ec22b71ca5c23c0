"""Before any work, a run compares the outputs of its model with those of transformers."""

import pytest
import torch

import compress
from compress.checkpoint.opening import open_model
from compress.checkpoint.tensors import StoredTensors
from compress.errors import ModelError
from compress.passes.contract.journal import Journal

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


def test_what_is_not_compared_is_told(recipe, tmp_path):
    compress.run(recipe(RTN, save={"format": "native"}), tmp_path / "first", progress=False)
    journal = Journal()
    again = recipe({"kv_cache": {}}, model=str(tmp_path / "first"), save={"format": "native"})
    compress.run(again, tmp_path / "out", progress=False, journal=journal)
    assert notes(journal) == ["its outputs were not compared with those of transformers: it is in format native"]


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
