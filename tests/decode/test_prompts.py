"""The attention of prompts of a packed model: by the C++ library where it can, with torch's results."""

import copy

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import compress
from compress.decode import prompts
from compress.kernels import dispatch
from compress.native.library import available

pytestmark = pytest.mark.skipif(not available(), reason="the kernels were not built")


@pytest.fixture
def calls(monkeypatch):
    """The queries of each call that the library computed."""
    found, computed = [], prompts.attention

    def watched(query, *args, **kwargs):
        result = computed(query, *args, **kwargs)
        if result is not None:
            found.append(tuple(query.shape))
        return result

    monkeypatch.setattr(prompts, "attention", watched)
    return found


@pytest.fixture(scope="module")
def folder(pico, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed") / "out"
    compress.run(compress.Recipe(model=pico, passes=[compress.RTN(weights="int8", group_size=32)], eval=None), out)
    return out


@pytest.fixture
def loaded(folder):
    return compress.load(folder, "float32")[0]


@pytest.fixture
def plain_logits(loaded):
    """The outputs of the loaded model in plain torch."""

    @torch.no_grad()
    def run(**inputs):
        with dispatch.plain_torch():
            return loaded(**inputs).logits

    return run


def ids_of(length, batch=1):
    return torch.randint(500, (batch, length), generator=torch.manual_seed(0))


@torch.no_grad()
def test_a_prompt_is_computed_by_the_library_with_the_outputs_of_torch(loaded, plain_logits, calls):
    ids = ids_of(40, 2)
    found, wanted = loaded(ids).logits, plain_logits(input_ids=ids)
    assert len(calls) == loaded.config.num_hidden_layers
    assert torch.allclose(found, wanted, atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_prompt_in_bfloat16_is_nearer_to_float32_than_that_of_torch(folder, plain_logits, calls):
    model, ids = compress.load(folder, "bfloat16")[0], ids_of(40, 2)
    wanted, found = plain_logits(input_ids=ids), model(ids).logits
    assert found.dtype is torch.bfloat16 and len(calls) == model.config.num_hidden_layers
    with dispatch.plain_torch():
        torchs = model(ids).logits
    assert float((found - wanted).norm()) < 1.1 * float((torchs - wanted).norm())


@torch.no_grad()
def test_padding_on_the_left(loaded, plain_logits, calls):
    ids, seen = ids_of(40, 2), torch.ones(2, 40, dtype=torch.long)
    seen[0, :25] = 0
    given = {"input_ids": ids, "attention_mask": seen}
    found, wanted = loaded(**given).logits, plain_logits(**given)
    assert calls and torch.allclose(found[seen.bool()], wanted[seen.bool()], atol=1e-4, rtol=1e-4)


def test_generated_tokens_are_those_of_plain_torch(loaded, calls):
    ids = ids_of(50)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 12, "do_sample": False}
    found = loaded.generate(**given)
    with dispatch.plain_torch():
        assert found.equal(loaded.generate(**given))
    assert {call[2] for call in calls} == {50}  # steps are traced with torch's operator


@torch.no_grad()
def test_torch_computes_short_prompts_gradients_and_runs(loaded, calls):
    loaded(ids_of(prompts.MIN_TOKENS - 1))
    with dispatch.plain_torch():
        loaded(ids_of(40))
    with torch.enable_grad():
        loaded(ids_of(40))
    assert not calls
    loaded(inputs_embeds=torch.zeros(1, 40, loaded.config.hidden_size))
    assert calls


@torch.no_grad()
def test_dense_models_are_left_to_torch(pico, calls):
    compress.load(pico, "float32")[0](ids_of(40))
    assert not calls


@torch.no_grad()
def test_an_error_in_a_forward_pass_leaves_nothing_behind(loaded, calls):
    with pytest.raises(IndexError):
        loaded(ids_of(40) + 10**6)
    q = torch.ones(1, 2, 40, 8)
    scaled_dot_product_attention(q, q, q)
    assert not calls and not prompts.OPEN_CALLS.calls


@torch.no_grad()
def test_a_copy_of_a_model_has_it_too(loaded, calls):
    other = copy.deepcopy(loaded)
    assert other(ids_of(40)).logits.equal(loaded(ids_of(40)).logits)
    assert len(calls) == 2 * loaded.config.num_hidden_layers


class Attends(torch.nn.Module):
    def forward(self, x):
        return scaled_dot_product_attention(x, x, x)


@torch.no_grad()
def test_a_compiled_model_is_one_graph_with_the_operator_of_torch(calls):
    model, x = Attends(), torch.randn(1, 20, 30, 8)
    wanted = model(x)
    prompts.install(model)
    assert torch.allclose(torch.compile(model, fullgraph=True, backend="eager")(x), wanted) and not calls
    assert torch.allclose(model(x), wanted, atol=1e-6) and len(calls) == 1
    torch.compiler.reset()


def test_what_is_left_to_torch():
    q = torch.ones(1, 2, 40, 8)
    assert prompts.attention(q, q, q) is not None
    assert prompts.attention(q, q, q, dropout_p=0.1) is None
    assert prompts.attention(q, q, q, torch.ones(40, 40, dtype=torch.bool), is_causal=True) is None
    assert prompts.attention(q, q[:, :1], q[:, :1]) is None
    assert prompts.attention(q, q[:, :1], q[:, :1], enable_gqa=True) is not None
    assert prompts.attention(q.bfloat16(), q.bfloat16(), q.bfloat16()).dtype is torch.bfloat16
    assert prompts.attention(q.double(), q.double(), q.double()) is None
