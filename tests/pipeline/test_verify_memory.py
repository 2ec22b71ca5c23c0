"""The reload by transformers needs the dense model in memory; where it does not fit, the run says so."""

import re

import psutil
import pytest
import torch
from tolerances import LOGITS
from transformers import LlamaForCausalLM

import compress
from compress import RTN, Wanda
from compress.errors import VerificationError
from compress.passes.contract.memory import available_bytes


@pytest.fixture
def short_of_memory(monkeypatch):
    """short_of_memory(bytes): that much is available."""

    def limit(size: int):
        for module in ("verify", "second_copy"):
            monkeypatch.setattr(f"compress.pipeline.{module}.available_bytes", lambda device: size)

    return limit


@pytest.mark.parametrize("save", [{}, {"format": "dense"}])
def test_transformers_is_not_asked_where_the_dense_model_does_not_fit(
    save, recipe, short_of_memory, tmp_path, monkeypatch
):
    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", lambda *_, **__: pytest.fail("loaded whole"))
    short_of_memory(2_400_000)  # pico has 2.4 MB in float32
    report = compress.run(recipe(RTN(group_size=32), save=save), tmp_path).report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] is None
    reason = r"the dense model with its checkpoint takes \d\.\d\d MB of memory, 2\.40 MB are available"
    assert re.fullmatch(reason, report["verified"]["skipped"])


def test_it_is_asked_where_the_dense_model_and_its_checkpoint_just_fit(recipe, short_of_memory, tmp_path):
    asked = recipe(Wanda(), save={"format": "dense"})
    dense = compress.plan(asked).dense_bytes
    short_of_memory(2 * dense - 1)
    assert "of memory" in compress.run(asked, tmp_path / "short").report["verified"]["skipped"]
    short_of_memory(2 * dense + 100_000)  # the headers of the files
    assert compress.run(asked, tmp_path / "enough").report["verified"]["transformers"] <= LOGITS


def test_codes_that_read_back_otherwise_are_an_error(recipe, tmp_path, monkeypatch):
    asked = recipe(RTN(), save={"verify": "own"})
    compress.run(asked, tmp_path)
    monkeypatch.setattr("compress.layers.linear.CompressedLinear.sha256", lambda self: "other")
    with pytest.raises(
        VerificationError, match=r"the codes of model\.layers\.0\..* differ from the computed ones"
    ) as caught:
        compress.run(asked, tmp_path)
    assert caught.value.exit_code == 1


def test_available_memory(monkeypatch):
    host = available_bytes(torch.device("cpu"))
    assert 0 < host <= psutil.virtual_memory().total
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 100))
    assert available_bytes(torch.device("cuda:0")) == 7
