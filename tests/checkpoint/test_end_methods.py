"""A model with a compressed embedding keeps transformers' contract: tying, resizing and replacing embedding and head."""

import copy

import pytest
import torch
from tolerances import same_logits
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.errors import ModelError
from compress.kernels.dispatch import plain_torch
from compress.layers.embedding import CompressedEmbedding
from compress.layers.linear import CompressedLinear

ENDS = ("lm_head", "embed_tokens")
IDS = torch.arange(1, 20)[None]
ROWS = 1024


@pytest.fixture(scope="module")
def folder(pico, tmp_path_factory):
    """folder(format, tied, packed): a checkpoint of the pico model. packed: which of its ends are compressed, too."""
    made = {}

    def make(form, tied, packed):
        key = form, tied, packed
        if key not in made:
            root = tmp_path_factory.mktemp("ends")
            dense = AutoModelForCausalLM.from_pretrained(pico, tie_word_embeddings=tied)
            grid = {"weights": "int8", "group_size": 32 if form == "gguf" else "channel"}
            compress.apply(dense, compress.RTN(targets=["*", *packed], **grid))
            made[key] = compress.save(dense, root / "out", format=form, tokenizer=AutoTokenizer.from_pretrained(pico))
        return made[key]

    return make


def logits(model, ids=IDS):
    with torch.no_grad(), plain_torch():
        return model(input_ids=ids).logits


def shared(model):
    """Whether embedding and head are one weight."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    return embedding.table is head if isinstance(embedding, CompressedEmbedding) else embedding.weight is head.weight


CASES = [
    *[("native", tied, packed) for tied in (True, False) for packed in (ENDS, ())],
    ("native", False, ENDS[:1]),
    ("compressed-tensors", True, ()),
    ("compressed-tensors", False, ()),
    ("compressed-tensors", False, ENDS[:1]),
    ("gguf", True, ENDS),
    ("gguf", False, ENDS),
]
"""Of each format the forms that it has: llama.cpp packs every embedding, compressed-tensors none."""
every_case = pytest.mark.parametrize(("form", "tied", "packed"), CASES)


@every_case
def test_tying_again_changes_nothing(form, tied, packed, folder):
    model, _ = compress.load(folder(form, tied, packed))
    assert isinstance(model.get_input_embeddings(), CompressedEmbedding) == (packed == ENDS)
    wanted, embedding, head = logits(model), model.get_input_embeddings(), model.get_output_embeddings()
    for made in (model, copy.deepcopy(model)):
        made.tie_weights()
        made.tie_weights(recompute_mapping=False)
        assert same_logits(logits(made), wanted) and shared(made) == tied
    assert model.get_input_embeddings() is embedding and model.get_output_embeddings() is head


@every_case
@pytest.mark.parametrize("rows", [ROWS, ROWS - 24, ROWS + 8])
def test_the_vocabulary_can_have_another_size(rows, form, tied, packed, folder, tmp_path):
    model, _ = compress.load(folder(form, tied, packed))
    wanted, known = logits(model), min(rows, ROWS)
    embedding = model.get_input_embeddings()
    assert model.resize_token_embeddings(None) is embedding
    found = model.resize_token_embeddings(rows, mean_resizing=False)
    assert found is model.get_input_embeddings() and (found is embedding or packed == ENDS)
    assert isinstance(found, CompressedEmbedding) == (packed == ENDS and rows == ROWS)
    assert model.config.vocab_size == rows and found.num_embeddings == rows and shared(model) == tied
    assert logits(model).shape[-1] == rows
    assert torch.allclose(logits(model)[..., :known], wanted[..., :known], atol=1e-4)
    if rows != ROWS:
        model.tie_weights()
        again, _ = compress.load(compress.save(model, tmp_path / "saved"))
        assert same_logits(logits(again), logits(model)) and shared(again) == tied


def test_the_vocabulary_can_be_padded(folder):
    model, _ = compress.load(folder("native", True, ENDS))
    packed = model.get_input_embeddings()
    assert model.resize_token_embeddings(pad_to_multiple_of=64) is packed
    assert model.resize_token_embeddings(pad_to_multiple_of=100, mean_resizing=False).num_embeddings == 1100
    assert logits(model).shape[-1] == 1100


@pytest.mark.parametrize("tied", [True, False])
def test_generation_after_another_size(tied, folder):
    """Steps that were recorded before are not those of the new embedding and head."""
    model, _ = compress.load(folder("native", tied, ENDS))
    first = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    model.resize_token_embeddings(ROWS + 8, mean_resizing=False)
    with torch.no_grad():
        model.get_output_embeddings().weight[ROWS:] = 0
        head = model.get_output_embeddings().weight
        head[first[0, IDS.shape[1]]] = 0  # the first token is another now
    wanted = type(model).generate(model, IDS, max_new_tokens=6, do_sample=False, pad_token_id=0, use_cache=False)
    found = model.generate(IDS, max_new_tokens=6, do_sample=False, pad_token_id=0)
    assert torch.equal(found, wanted) and not torch.equal(found, first)


def test_another_embedding_or_head_of_a_tied_model(folder):
    """The embedding is the source of the tie, as in transformers."""
    model, _ = compress.load(folder("native", True, ENDS))
    wanted = logits(model)
    model.set_output_embeddings(nn.Linear(128, ROWS, bias=False))
    assert not torch.allclose(logits(model), wanted)
    model.tie_weights()
    assert same_logits(logits(model), wanted) and shared(model)
    own = nn.Embedding(ROWS, 128)
    model.set_input_embeddings(own)
    model.tie_weights()
    assert model.get_input_embeddings() is own and model.get_output_embeddings().weight is own.weight


def test_another_head_of_an_untied_model_stays(folder):
    model, _ = compress.load(folder("native", False, ENDS))
    own = nn.Linear(128, ROWS, bias=False)
    model.set_output_embeddings(own)
    model.tie_weights()
    assert model.get_output_embeddings() is own and isinstance(model.get_input_embeddings(), CompressedEmbedding)


def test_a_model_that_transformers_loads(folder):
    model = AutoModelForCausalLM.from_pretrained(folder("native", True, ENDS)).eval()
    wanted = logits(model)
    model.tie_weights()
    assert same_logits(logits(model), wanted) and shared(model)
    model.resize_token_embeddings(ROWS + 8, mean_resizing=False)
    assert shared(model) and torch.allclose(logits(model)[..., :ROWS], wanted, atol=1e-4)


def test_a_head_that_rounds_its_inputs_says_what_to_do(pico):
    model = AutoModelForCausalLM.from_pretrained(pico, tie_word_embeddings=False).eval()
    compress.apply(model, compress.RTN(targets=["lm_head"], weights="int8", group_size="channel", activations="int8"))
    assert isinstance(model.lm_head, CompressedLinear)
    embedding = model.get_input_embeddings()
    with pytest.raises(ModelError, match=r"the inputs of lm_head are transformed .* resize .* the dense model"):
        model.resize_token_embeddings(ROWS + 8)
    assert model.get_input_embeddings() is embedding
