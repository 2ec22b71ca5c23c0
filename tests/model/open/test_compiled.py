"""Generation with torch.compile: the errors before it, and that it generates the tokens of the eager model."""

import pytest
import torch
from torch._dynamo.utils import counters
from torch._inductor import cpp_builder, exc

import compress
from compress import RTN
from compress.errors import ModelError


def test_no_compiler_is_an_error(pico, monkeypatch):
    def none():
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    with pytest.raises(ModelError, match="needs a C.. compiler, and found none; install g.. or clang"):
        compress.load(pico, compile=True)


def test_a_model_that_generates_no_text_is_an_error(tiny_folder):
    with pytest.raises(ModelError, match="predicts masked tokens and generates no text; load it without"):
        compress.load(tiny_folder("bert"), compile=True)


@pytest.mark.slow
def test_compiled_and_eager_generate_the_same_tokens(pico, recipe, tmp_path):
    compress.run(recipe(RTN(weights="int8", group_size=32), save={"format": "native"}), tmp_path, progress=False)
    ids = torch.arange(1, 9)[None]
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    eager = compress.load(tmp_path)[0].generate(ids, **options)
    counters.clear()
    model, _ = compress.load(tmp_path, compile=True)
    assert torch.equal(model.generate(ids, **options), eager)
    assert counters["stats"]["unique_graphs"] >= 1
