"""Generation with traced steps or torch.compile: the errors before it, and that it generates the tokens of the model."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder, exc

import compress
from compress import RTN
from compress.decode import acceleration
from compress.errors import ModelError
from compress.native.library import available


@pytest.fixture
def no_compiler(monkeypatch):
    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)


def test_no_compiler_and_no_kernels_are_an_error(pico, monkeypatch, no_compiler):
    monkeypatch.setattr(acceleration, "available", lambda: False)
    with pytest.raises(ModelError, match="needs a C.. compiler, and found none; install g.. or clang"):
        compress.load(pico, compile=True)


@pytest.mark.skipif(not available(), reason="no C++ library")
def test_traced_steps_need_no_compiler(pico, no_compiler):
    ids = torch.arange(1, 9)[None]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = compress.load(pico)[0].generate(ids, **options)
    model, _ = compress.load(pico, compile=True)
    assert torch.equal(model.generate(ids, **options), wanted)
    hidden = model.generate(ids, output_hidden_states=True, return_dict_in_generate=True, **options)
    assert torch.equal(hidden.sequences, wanted), "a step that is not traced is one of the model"


def test_a_model_that_generates_no_text_is_an_error(tiny_folder):
    with pytest.raises(ModelError, match="predicts masked tokens and generates no text; load it without"):
        compress.load(tiny_folder("bert"), compile=True)


@pytest.mark.slow
def test_compiled_and_eager_generate_the_same_tokens(pico, recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(acceleration, "available", lambda: False)
    compress.run(recipe(RTN(weights="int8", group_size=32), save={"format": "native"}), tmp_path, progress=False)
    ids = torch.arange(1, 9)[None]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    eager = compress.load(tmp_path)[0].generate(ids, **options)
    counters.clear()
    model, _ = compress.load(tmp_path, compile=True)
    assert torch.equal(model.generate(ids, **options), eager)
    assert counters["stats"]["unique_graphs"] >= 1
