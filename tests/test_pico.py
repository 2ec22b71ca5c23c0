"""The pico model is a real language model: far better than token frequencies, and small."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from compress.data.ids import token_ids
from compress.data.installed_texts import embedded_text
from compress.data.tokenization import token_stream

PICO = Path(__file__).parent / "pico"
MAX_BYTES = 3_000_000


@pytest.fixture(scope="module")
def script():
    """Return tests/pico/train.py as a module."""
    spec = importlib.util.spec_from_file_location("pico_train", PICO / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_perplexity_is_far_below_the_unigram_baseline(script):
    tokenizer = AutoTokenizer.from_pretrained(PICO / "model")
    model = AutoModelForCausalLM.from_pretrained(PICO / "model")
    every = token_ids("embedded", "test", tokenizer, None, script.LENGTH, seed=0)
    ids = every[:: max(1, len(every) // 16)]
    baseline = script.unigram_perplexity(token_stream(embedded_text("calibration"), tokenizer), ids)
    assert script.perplexity(model, ids) < baseline / 2


def test_the_tokenizer_is_lossless():
    tokenizer = AutoTokenizer.from_pretrained(PICO / "model")
    text = embedded_text("test")[0] + " \u00e9\U0001f600"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    assert tokenizer.bos_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id


def test_the_shape_covers_even_and_odd_widths():
    model = AutoModelForCausalLM.from_pretrained(PICO / "model")
    widths = {width for weight in model.parameters() if weight.ndim == 2 for width in weight.shape}
    assert any(width % 128 == 0 for width in widths)
    assert any(width % 64 != 0 for width in widths)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    assert all(weight.dtype == torch.float32 for weight in model.parameters())


def test_the_folder_is_small():
    assert sum(path.stat().st_size for path in (PICO / "model").iterdir()) <= MAX_BYTES


@pytest.mark.slow
def test_the_same_seed_trains_the_same_weights(script, monkeypatch, tmp_path):
    for name in ("a", "b"):
        command = ["train.py", "--steps", "2", "--out", str(tmp_path / name)]
        monkeypatch.setattr(sys, "argv", command)
        monkeypatch.setattr(script, "evaluate", lambda *_: None)  # a quarter of a minute, and no part of training
        script.main()
    a, b = (tmp_path / name / "model.safetensors" for name in ("a", "b"))
    assert a.read_bytes() == b.read_bytes()
