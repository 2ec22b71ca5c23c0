"""SliceGPT: nothing is lost where nothing is cut or the signal is of low rank; what is left is a stock model."""

import pytest
import torch
from batches import batch_of
from tolerances import LOGITS
from transformers import AutoModelForCausalLM, Starcoder2Config

import compress
from compress import RTN, SliceGPT, Wanda
from compress.errors import ModelError, RecipeError, TargetError
from compress.models.kinds.batch import Examples
from compress.models.reshape import rotation as of_hidden_states
from compress.models.reshape.rotation import Refusal, fold_norms, readers_of_norms, rotate, with_own_head
from compress.models.reshape.widths import hidden_width
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.passes.reshape import slicegpt
from compress.passes.reshape.slicegpt import covariance_of
from compress.pipeline.plan import plan

REFUSAL = Refusal("here", "use narrow")
SMALL = {"num_hidden_layers": 2, "rms_norm_eps": 1e-12}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def near(found, wanted, tolerance=1e-4):
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


def of_rank(model, rank):
    """All that is written to the hidden states lies in one subspace that is along no channel."""
    basis, _ = torch.linalg.qr(torch.randn(32, rank, generator=torch.Generator().manual_seed(1)))
    inside = basis @ basis.T
    model.model.embed_tokens.weight.copy_(model.model.embed_tokens.weight @ inside)
    for block in model.model.layers:
        for linear in (block.self_attn.o_proj, block.mlp.down_proj):
            linear.weight.copy_(inside @ linear.weight)
    return model


@pytest.mark.parametrize("tied", [False, True])
def test_hidden_states_of_low_rank_lose_nothing(tiny, ids, tied):
    model = tiny("llama", **SMALL, tie_word_embeddings=tied)
    model = of_rank(model, 24)
    before, journal = logits(model, ids()), Journal()
    compress.apply(model, [SliceGPT(sparsity=0.25)], ids(), journal=journal)
    assert model.config.hidden_size == 24 and model.lm_head.weight.shape == (64, 24)
    assert near(logits(model, ids()), before)
    (record,) = [e.figures for e in journal.entries if e.message == "kept principal components"]
    assert (
        (record["kept"], record["of"]) == (24, 32) and record["energy"] > 1 - 1e-5 and record["rotation_error"] < 1e-5
    )


def test_a_rank_higher_than_what_is_left_loses_something(tiny, ids):
    model = of_rank(tiny("llama", **SMALL), 28)
    before = logits(model, ids())
    compress.apply(model, [SliceGPT(sparsity=0.25)], ids())
    assert not near(logits(model, ids()), before, 1e-2)


def test_norms_are_folded_and_any_rotation_changes_nothing(tiny, ids):
    """Their weights are 1 afterwards, each in the linears that read it; a random rotation is as good as any."""
    model = with_own_head(tiny("qwen3", tie_word_embeddings=True), REFUSAL)
    before, width = logits(model, ids()), hidden_width(model, lambda size: 24)
    readers = readers_of_norms(model, width, batch_of(ids(1)), REFUSAL)
    assert readers["model.norm"] == ["lm_head"] and len(readers) == 7
    folded = fold_norms(model, readers, batch_of(ids(1)), REFUSAL)
    assert near(logits(folded, ids()), before, 1e-5)
    assert all(bool((folded.get_submodule(name).weight == 1).all()) for name in readers)
    rotation, _ = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(2)))
    turned, error = rotate(folded, width, list(readers), rotation, batch_of(ids(1)), REFUSAL)
    assert error < 1e-5 and not torch.allclose(turned["lm_head.weight"], folded.lm_head.weight, atol=1e-2)


def test_the_covariance_is_that_of_what_norms_write(tiny, ids):
    model = tiny("llama", num_hidden_layers=1)
    written = []
    norms = [name for name, _ in model.named_modules() if name.endswith("norm")]
    hooks = [model.get_submodule(n).register_forward_hook(lambda m, a, y: written.append(y[0])) for n in norms]
    for row in ids(2):
        logits(model, row[None])
    for hook in hooks:
        hook.remove()
    rows = torch.cat(written)
    assert rows.shape == (2 * 16 * 3, 32)
    found = covariance_of(model, norms, Examples.of_ids(ids(2)), Run(), "here")
    assert torch.allclose(found, 2 * rows.T @ rows / len(rows), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_less_is_lost_than_by_cutting_channels(pico, pico_ids):
    errors = []
    for step in (SliceGPT(sparsity=0.2, multiple=4), compress.Narrow(hidden=0.2, multiple=4, repair="none")):
        model = AutoModelForCausalLM.from_pretrained(pico).eval()
        before = logits(model, pico_ids[4:])
        compress.apply(model, [step], pico_ids[:4])
        errors.append(float((logits(model, pico_ids[4:]) - before).norm()))
    assert errors[0] < errors[1]


QUICK = ["qwen2"]


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(f, marks=pytest.mark.slow) for f in ("llama", "qwen3", "phi3"))]
)
def test_the_rest_is_a_stock_model(family, tiny_folder, recipe, ids, tmp_path):
    asked = recipe(SliceGPT(sparsity=0.25), model=tiny_folder(family), save={"format": "dense"})
    planned = plan(asked)
    report = compress.run(asked, tmp_path).report
    assert report["verified"]["own"] <= LOGITS and report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, _ = compress.load(tmp_path)
    assert plain.config.hidden_size == 24 and near(logits(plain, ids()), logits(ours, ids()), 1e-6)


@pytest.mark.slow
def test_the_chain_slice_round_learn(recipe, tmp_path):
    chain = [SliceGPT(sparsity=0.25, multiple=32), compress.GPTQ(group_size=32), compress.Distill(steps=2)]
    report = compress.run(recipe(*chain), tmp_path).report
    verified = report["verified"]
    assert verified["layers"] == 21 and max(verified["own"], verified["transformers"]) <= LOGITS


# Bad input


@pytest.mark.parametrize("options", [{"sparsity": 0.0}, {"sparsity": 1.0}, {"multiple": 0}])
def test_options_that_make_no_sense(options):
    with pytest.raises(RecipeError, match="greater than|less than"):
        compress.Recipe(model="m", passes=[{"slicegpt": options}])


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"sparsity": 0.001},
            TargetError,
            "sparsity 0.001 of 128 channels, in multiples of 1, removes none; use another",
        ),
        ({"sparsity": 0.9, "multiple": 64}, TargetError, "in multiples of 64, removes all; use another fraction"),
        (
            {"sparsity": 0.1},
            ModelError,
            "its 4 heads divide the hidden width, but 115 is not a multiple; use multiple: 4",
        ),
        ({"sparsity": 0.25, "ignore": "*.q_proj"}, TargetError, "q_proj is left out .* uniform in a configuration"),
    ],
)
def test_what_cannot_be_cut_is_said_before_any_work(recipe, options, error, message):
    with pytest.raises(error, match=message):
        plan(recipe(SliceGPT(**options)))


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "cannot express 24 of 32 hidden channels"),
        ("opt", "both sides of .*k_proj have the hidden width, because the configuration has no size of a head"),
        (
            "gemma2",
            r"post_attention_layernorm scales the channels of what is added to the hidden states \(a norm after",
        ),
        (
            "gemma3",
            r"post_attention_layernorm scales the channels of what is added to the hidden states \(a norm after",
        ),
        (
            "mixtral",
            r"experts\.0\..* belongs to an expert: its norm is also read by a router, whose weight is no linear",
        ),
        ("qwen3-moe", r"experts\.0\..* belongs to an expert: its norm is also read by a router"),
    ],
)
def test_models_that_cannot_be_rotated(tiny, ids, family, message):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message):
        compress.apply(model, [SliceGPT(sparsity=0.25)], ids())
    after = model.state_dict()  # in which experts may be opened
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items() if name in after)


def test_norms_with_a_bias_are_refused(ids):
    config = Starcoder2Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    with pytest.raises(ModelError, match=r"adds a bias \(LayerNorm\), which a rotation does not preserve; use narrow"):
        compress.apply(model, [SliceGPT(sparsity=0.25)], ids())


def test_a_norm_that_something_else_reads_is_refused(tiny, ids, monkeypatch):
    """Folded into half of its readers, it is another model."""
    real = slicegpt.readers_of_norms
    monkeypatch.setattr(
        slicegpt, "readers_of_norms", lambda *given: {n: names[:1] for n, names in real(*given).items()}
    )
    with pytest.raises(ModelError, match="into the linears that read them .* other modules read these norms too"):
        compress.apply(tiny("llama", **SMALL), [SliceGPT(sparsity=0.25)], ids())


def test_a_head_that_stays_tied_is_refused(tiny, ids, monkeypatch):
    monkeypatch.setattr(of_hidden_states, "untying", lambda model: {})
    with pytest.raises(ModelError, match="its head cannot be untied"):
        compress.apply(tiny("llama", **SMALL, tie_word_embeddings=True), [SliceGPT(sparsity=0.25)], ids())


@pytest.mark.parametrize("before", [Wanda(), RTN(), Wanda(targets="model.layers.0.*")])
def test_a_compressed_model_keeps_its_width(recipe, before):
    with pytest.raises((RecipeError, TargetError), match="already"):
        plan(recipe(before, SliceGPT(sparsity=0.25)))
