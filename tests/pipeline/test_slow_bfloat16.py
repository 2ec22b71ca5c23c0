"""`dtype: auto` on a processor that computes bfloat16 slowly: computation in float32, storage in bfloat16."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import RTN
from compress.checkpoint.opening import open_model
from compress.numerics import dtypes

SAID = "the computation is in float32, block by block"


@pytest.fixture
def narrow(pico, tmp_path):
    """The pico model in bfloat16."""
    folder = tmp_path / "bf16"
    AutoModelForCausalLM.from_pretrained(pico, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def slow(monkeypatch):
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: False)


def stored_dtypes(folder):
    found = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    return found


def test_a_run_computes_in_float32_and_stores_bfloat16(narrow, slow, recipe, texts, tmp_path):
    asked = recipe(
        RTN(group_size=32),
        model=narrow,
        calibration=compress.Calibration(source=texts["calibration"], sequences=None, length=None),
        save={"verify": "own"},
    )
    planned = compress.plan(asked)
    assert any(SAID in note for note in planned.notes)
    out = tmp_path / "out"
    report = compress.run(asked, out, progress=False).report
    assert (
        any(SAID in entry["message"] for entry in report["journal"]["entries"])
        and SAID in (out / "report.md").read_text()
    )
    assert (report["reproduce"]["compute_dtype"], report["reproduce"]["storage_dtype"]) == ("float32", "bfloat16")
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert stored_dtypes(out) == {"BF16", "I32"} or "F32" not in stored_dtypes(out)
    assert report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    model, _ = compress.load(out)
    assert model.dtype == torch.float32
    assert compress.load(out, "bfloat16")[0].dtype == torch.bfloat16


def test_the_weights_of_blocks_stay_mapped(narrow, slow):
    opened = open_model(narrow)
    assert opened.dtype == torch.float32 and opened.storage == torch.bfloat16
    block = opened.blocks[0]
    assert all(tensor.is_meta for tensor in block.module.parameters())
    opened.weights.bring(block)
    assert {tensor.dtype for tensor in block.module.parameters()} == {torch.float32}
    opened.weights.release(block)
    assert all(tensor.is_meta for tensor in block.module.parameters())


def test_a_dtype_that_is_asked_for_is_used(narrow, slow):
    opened = open_model(narrow, "bfloat16")
    assert opened.dtype == opened.storage == torch.bfloat16 and opened.notes == []


def test_nothing_changes_on_a_processor_with_the_instructions(narrow, monkeypatch):
    monkeypatch.setattr(dtypes, "has_bfloat16_products", lambda: True)
    opened = open_model(narrow)
    assert opened.dtype == opened.storage == torch.bfloat16 and opened.notes == []
