"""Text that the model of a run samples is stored, so that later runs read the same ids."""

from types import SimpleNamespace

import huggingface_hub.constants
import pytest
import torch
from torch import nn

import compress
from compress import Calibration
from compress.checkpoint.opening import open_model
from compress.data.text_source import TextSource
from compress.passes.contract.journal import Journal
from compress.pipeline import defaults, sampled_text
from compress.pipeline.sampled_text import fits_whole, sampled_ids

TEXT = TextSource(source="self")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HOME", str(tmp_path / "cache"))


@pytest.fixture
def opened(pico):
    return open_model(pico)


def no_generation(*args, **kwargs):
    raise AssertionError("the text is sampled again")


def test_stored_ids_are_read_instead_of_sampled(opened, monkeypatch):
    ids, has_bos = sampled_ids(opened, TEXT, 3, 24, 0)
    assert ids.shape == (3, 24) and not has_bos
    monkeypatch.setattr(type(opened.model), "generate", no_generation)
    assert torch.equal(sampled_ids(opened, TEXT, 3, 24, 0)[0], ids)


@pytest.mark.parametrize("change", ["sequences", "length", "seed", "temperature", "max_repetition"])
def test_other_options_are_other_ids(opened, monkeypatch, change):
    counts = {"sequences": 3, "length": 24, "seed": 0}
    sampled_ids(opened, TEXT, **counts)
    monkeypatch.setattr(type(opened.model), "generate", no_generation)
    text = TEXT if change in counts else TextSource(source="self", **{change: 0.5})
    with pytest.raises(AssertionError, match="sampled again"):
        sampled_ids(opened, text, **(counts | ({change: 5} if change in counts else {})))


def test_a_model_of_a_program_is_sampled_each_time(opened, monkeypatch):
    opened.answers_digest = ""
    sampled_ids(opened, TEXT, 3, 24, 0)
    monkeypatch.setattr(type(opened.model), "generate", no_generation)
    with pytest.raises(AssertionError, match="sampled again"):
        sampled_ids(opened, TEXT, 3, 24, 0)


def test_a_model_larger_than_memory_reads_its_blocks_for_each_token(opened, monkeypatch):
    size_bytes = 4 * sum(parameter.numel() for parameter in opened.model.parameters())
    assert fits_whole(opened, 2 * size_bytes) and not fits_whole(opened, 2 * size_bytes - 2)
    ids, _ = sampled_ids(opened, TEXT, 3, 24, 0)
    monkeypatch.setattr(sampled_text, "shared_results", lambda base: None)
    assert torch.equal(sampled_ids(opened, TEXT, 3, 24, 0, memory_bytes=size_bytes)[0], ids)


def test_the_weights_of_blocks_are_released_after_sampling(opened):
    sampled_ids(opened, TEXT, 2, 8, 0)
    modules = [module for block in opened.blocks for module in block.module.modules()]
    weights = [module.weight for module in modules if isinstance(module, nn.Linear)]
    assert {weight.device.type for weight in weights} == {"meta"}


def test_a_mixture_with_sampled_text_is_recorded_by_parts(pico, tmp_path):
    mixture = [{"source": "embedded"}, {"source": "self", "weight": 3}]
    recipe = compress.Recipe(
        model=pico,
        passes=[compress.RTN(group_size=32)],
        calibration=Calibration(mixture=mixture, sequences=8, length=32),
        eval={"perplexity": ["embedded"], "windows": 2, "length": 32},
    )
    report = compress.run(recipe, tmp_path / "out").report
    parts = [text for text in report["reproduce"]["texts"] if text["part"] == "calibration"]
    assert [(text["text"], text["sequences"]) for text in parts] == [("embedded", 2), ("self", 6)]
    journal = Journal()
    again = compress.run(recipe, tmp_path / "out", journal=journal).report
    assert again["checkpoint_sha256"] == report["checkpoint_sha256"]
    assert any("already complete" in entry.message for entry in journal.entries)


def planned(model, *passes, **options):
    calibration = Calibration(source="mixed", self_share="auto", sequences=8, length=32, **options)
    return compress.plan(compress.Recipe(model=model, passes=list(passes), calibration=calibration))


def test_half_of_the_sequences_are_sampled_where_passes_calibrate(pico):
    notes = [note for note in planned(pico, compress.GPTQ(weights="int4", group_size=32)).notes if "sampled" in note]
    assert len(notes) == 1 and "4 of 8 sequences are sampled from the model itself: 128 tokens" in notes[0]
    assert not any("sampled" in note for note in planned(pico, compress.RTN(weights="int4", group_size=32)).notes)


def test_a_model_that_generates_no_text_is_not_sampled(tiny):
    calibration = Calibration(source="mixed", self_share="auto")
    decided, notes = defaults.with_self_share(calibration, [compress.GPTQ()], tiny("bert"))
    assert decided.self_share == 0 and not notes


@pytest.mark.parametrize(
    "values", [{"source": "self"}, {"source": "ids.npy", "sequences": None}, {"source": "ids.npy"}, {"sequences": 1}]
)
def test_a_text_that_cannot_be_divided_is_read_as_it_is(values, tiny):
    calibration = Calibration(self_share="auto", **values)
    decided, notes = defaults.with_self_share(calibration, [compress.GPTQ()], tiny("llama"))
    assert decided.self_share == 0 and decided.sequences == calibration.sequences
    assert sum(count or 0 for _, count in decided.texts()) == (calibration.sequences or 0)
    assert bool(notes) == calibration.sampled  # the whole text is sampled


def test_a_model_of_more_than_half_the_memory_is_not_sampled(pico, monkeypatch):
    memory = SimpleNamespace(total=1000, available=defaults.psutil.virtual_memory().available)
    monkeypatch.setattr(defaults.psutil, "virtual_memory", lambda: memory)
    notes = planned(pico, compress.GPTQ(weights="int4", group_size=32)).notes
    assert any("no text is sampled from the model (self_share: auto)" in note for note in notes)


def test_the_share_that_was_decided_is_recorded(pico, tmp_path):
    calibration = Calibration(source="mixed", self_share="auto", sequences=8, length=32)
    passes = [compress.GPTQ(weights="int4", group_size=32)]
    recipe = compress.Recipe(model=pico, passes=passes, calibration=calibration, eval=None)
    report = compress.run(recipe, tmp_path / "out").report
    parts = [(text["text"], text["sequences"]) for text in report["reproduce"]["texts"]]
    assert parts == [("mixed", 4), ("self", 4)]
    assert compress.Recipe.from_yaml(tmp_path / "out" / "recipe.yaml").calibration.self_share == 0.5
    again = compress.run(recipe, tmp_path / "out").report
    assert again["checkpoint_sha256"] == report["checkpoint_sha256"]
