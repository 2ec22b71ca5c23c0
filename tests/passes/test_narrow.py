"""Narrowing: what is silent or doubled is not missed, the rest is a stock model, and what no configuration can say."""

import json

import pytest
import torch
from tolerances import LOGITS
from transformers import AutoModelForCausalLM

import compress
from compress import GPTQ, RTN, Narrow, Wanda
from compress.errors import ModelError, RecipeError, TargetError
from compress.models.reshape.widths import hidden_width
from compress.passes.contract.journal import Journal
from compress.pipeline.plan import plan


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def near(found, wanted, tolerance=1e-4):
    return bool((found - wanted).norm() <= tolerance * wanted.norm())


@pytest.fixture
def small(tiny):
    """small(**changes) -> a random gated model with grouped queries and two blocks."""
    return lambda **changes: tiny("llama", **{"num_hidden_layers": 2, **changes})


# What is not missed


@pytest.mark.parametrize("importance", ["activation", "weight"])
def test_silent_channels_of_feed_forward_layers_go_and_are_not_missed(small, ids, importance):
    model = small()
    silent = [torch.arange(48)[i::4] for i in range(2)]  # other ones in each block
    for block, some in zip(model.model.layers, silent, strict=True):
        block.mlp.down_proj.weight[:, some] = 0
        block.mlp.up_proj.weight[some] = 0
        block.mlp.gate_proj.weight[some] = 0
    kept = [block.mlp.up_proj.weight[block.mlp.up_proj.weight.any(1)] for block in model.model.layers]
    before = logits(model, ids())
    compress.apply(model, [Narrow(ffn=0.25, importance=importance, repair="none")], ids())
    assert model.config.intermediate_size == 36 and near(logits(model, ids()), before)
    for block, wanted in zip(model.model.layers, kept, strict=True):
        assert torch.equal(block.mlp.up_proj.weight, wanted)


def test_repair_makes_up_for_channels_that_others_hold_too(small, ids):
    """Half of the channels are copies of the others that count for less: the least squares are those of their sum."""
    model = small()
    for block in model.model.layers:
        mlp = block.mlp
        mlp.gate_proj.weight[24:], mlp.up_proj.weight[24:] = mlp.gate_proj.weight[:24], mlp.up_proj.weight[:24]
        mlp.down_proj.weight[:, 24:] = 0.1 * mlp.down_proj.weight[:, :24].roll(1, 0)
        mlp.down_proj.weight[:, :24] *= 3
    before, text = logits(model, ids()), ids(64)
    losing, kept = small(), Narrow(ffn=0.5, damping=1e-7)
    losing.load_state_dict(model.state_dict())
    wanted = [b.mlp.down_proj.weight[:, :24] + b.mlp.down_proj.weight[:, 24:] for b in model.model.layers]
    compress.apply(losing, [Narrow(ffn=0.5, repair="none")], text)
    compress.apply(model, [kept], text)
    assert near(logits(model, ids()), before, 1e-3) and not near(logits(losing, ids()), before, 1e-2)
    assert all(near(b.mlp.down_proj.weight, w, 1e-2) for b, w in zip(model.model.layers, wanted, strict=True))


def test_heads_go_in_whole_groups_with_their_keys_and_values(small, ids):
    """Two groups of two query heads of 8 channels each; nothing reads one of them, another one in each block."""
    model = small()
    for block, silent in zip(model.model.layers, (0, 1), strict=True):
        block.self_attn.o_proj.weight[:, 16 * silent : 16 * silent + 16] = 0
    held = {n: p.clone() for n, p in model.model.layers[0].self_attn.named_parameters()}
    before = logits(model, ids())
    compress.apply(model, [Narrow(heads=0.5)], ids())
    assert (model.config.num_attention_heads, model.config.num_key_value_heads) == (2, 1)
    assert near(logits(model, ids()), before)
    attention = model.model.layers[0].self_attn
    assert torch.equal(attention.q_proj.weight, held["q_proj.weight"][16:])
    assert torch.equal(attention.v_proj.weight, held["v_proj.weight"][8:])


@pytest.mark.parametrize("importance", ["activation", "weight"])
def test_silent_hidden_channels_go_and_norms_make_up_for_their_number(small, ids, importance):
    model = small(rms_norm_eps=1e-12)
    width, silent = hidden_width(model, lambda size: 24), torch.arange(32)[1::4]
    held = model.state_dict()
    for name, dim in width.axes:
        held[name].index_fill_(dim, silent, 0)
    before = logits(model, ids())
    compress.apply(model, [Narrow(hidden=0.25, importance=importance, repair="none")], ids())
    assert model.config.hidden_size == 24 and model.lm_head.weight.shape == (64, 24)
    assert near(logits(model, ids()), before)


@pytest.mark.slow
def test_less_is_lost_by_activations_than_by_weights_and_with_repair_than_without(pico_model, pico_ids, pico):
    """Repair on the text that it is made on: it fits few tokens too well to be judged on others."""
    wanted, errors = logits(pico_model, pico_ids), []
    for options in ({}, {"repair": "none"}, {"repair": "none", "importance": "weight"}):
        model = AutoModelForCausalLM.from_pretrained(pico).eval()
        compress.apply(model, [Narrow(ffn=0.3, **options)], pico_ids)
        errors.append(float((logits(model, pico_ids) - wanted).norm()))
    assert 0 < errors[0] < errors[1] < errors[2]


def test_the_journal_tells_the_error_of_every_reader(small, ids):
    journal = Journal()
    compress.apply(small(), [Narrow(ffn=0.25, heads=0.5)], ids(), journal=journal)
    record = [entry.figures for entry in journal.entries if entry.message == "reads fewer channels"]
    assert [(t["kept"], t["of"]) for t in record] == [(16, 32), (36, 48)] * 2
    assert all(0 < t["error"] < 1 for t in record)


# What is left


EVERY = {"heads": 0.5, "ffn": 0.25, "hidden": 0.25}
STOCK = {
    "qwen2": EVERY,  # biases; the size of a head is not in the configuration yet
    "gpt2": {"ffn": 0.25},  # transposed; the width is None in the configuration
    "qwen3": EVERY,  # norms of queries and keys
    "gemma2": {"heads": 0.5, "ffn": 0.25},
    "opt": {"ffn": 0.25},
    "gpt-neox-parallel": {"ffn": 0.25},
    "falcon": {"ffn": 0.25},
    "phi3": {"hidden": 0.25},
    "mixtral": EVERY,
    "qwen3-moe": EVERY,  # small experts
}
QUICK = ["gpt2"]


@pytest.mark.parametrize("family", [pytest.param(f, marks=[] if f in QUICK else pytest.mark.slow) for f in STOCK])
def test_the_rest_is_a_stock_model(family, tiny_folder, recipe, ids, tmp_path):
    asked = recipe(Narrow(**STOCK[family]), model=tiny_folder(family), save={"format": "dense"})
    planned = plan(asked)
    report = compress.run(asked, tmp_path).report
    assert report["verified"]["own"] <= LOGITS and report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ours, _ = compress.load(tmp_path)
    assert near(logits(plain, ids()), logits(ours, ids()), 1e-6)
    before = AutoModelForCausalLM.from_pretrained(tiny_folder(family))
    assert plain.num_parameters() < before.num_parameters()
    cached = plain.generate(ids(1, 4), max_new_tokens=6, do_sample=False, use_cache=True)
    assert torch.equal(cached, plain.generate(ids(1, 4), max_new_tokens=6, do_sample=False, use_cache=False))


@pytest.mark.slow
def test_the_chain_narrow_prune_round_learn(recipe, tmp_path):
    chain = [Narrow(ffn=0.2, multiple=32), Wanda(sparsity=0.3), GPTQ(group_size=32), compress.Distill(steps=2)]
    asked = recipe(*chain)
    report = compress.run(asked, tmp_path).report
    verified = report["verified"]
    assert verified["layers"] == 21 and max(verified["own"], verified["transformers"]) <= LOGITS
    assert report["size"]["tensor_bytes"] == plan(asked).checkpoint_bytes
    assert report["sparsity"]["achieved"] >= report["sparsity"]["due"] > 0.297  # in whole weights per row
    assert json.loads((tmp_path / "config.json").read_text())["intermediate_size"] == 224
    assert plan(asked).layers[6].shape == (128, 224)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give at least one of heads, ffn and hidden"),
        ({"ffn": 0.0}, "greater than 0"),
        ({"heads": 1.0}, "less than 1"),
        ({"hidden": -0.5}, "greater than 0"),
        ({"ffn": 0.5, "multiple": 0}, "greater than or equal to 1"),
        ({"ffn": 0.5, "damping": 0}, "greater than 0"),
        ({"ffn": 0.5, "repair": "glue"}, "'least_squares' or 'none'"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(RecipeError, match=message):
        compress.Recipe(model="m", passes=[{"narrow": options}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0.1}, "heads 0.1 of 2 groups removes none; use a fraction from 0.5 to 0.5"),
        ({"heads": 0.9}, "heads 0.9 of 2 groups removes all"),
        (
            {"ffn": 0.01, "multiple": 32},
            "ffn 0.01 of 288 channels, in multiples of 32, removes none; use another fraction",
        ),
        ({"ffn": 0.99, "multiple": 32}, "ffn 0.99 of 288 channels, in multiples of 32, removes all"),
        ({"ffn": 0.2, "ignore": "model.layers.0.*"}, "is left out by targets or ignore, but widths are uniform"),
    ],
)
def test_what_cannot_be_narrowed_is_said_before_any_work(recipe, options, message):
    with pytest.raises(TargetError, match=rf"^passes\[0\] narrow: .*{message}"):
        plan(recipe(Narrow(**options)))


def test_the_only_key_value_head_stays(small, ids):
    model = small(num_key_value_heads=1)
    with pytest.raises(TargetError, match="heads: all heads of the model share 1 key-value head.*leave heads out"):
        compress.apply(model, [Narrow(heads=0.5)], ids())


def test_hidden_widths_that_heads_do_not_divide(recipe):
    with pytest.raises(
        ModelError,
        match="its 4 heads divide the hidden width, but 115 is not a multiple; use multiple: 4, or a fraction that",
    ):
        plan(recipe(Narrow(hidden=0.1)))
    assert plan(recipe(Narrow(hidden=0.1, multiple=4))).layers[0].shape == (128, 116)


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gpt2", {"heads": 0.5}, "cannot express 2 of 4 groups of heads, because it derives the head size"),
        ("gpt2", {"hidden": 0.25}, "cannot express 24 of 32 hidden channels"),
        ("bloom", {"ffn": 0.25}, "no entry of its configuration sets the width of its feed-forward layers"),
        ("phi3", {"ffn": 0.25}, "down_proj: its input channels cannot be permuted .fused"),
        ("phi3", {"heads": 0.5}, "o_proj: its input channels cannot be permuted .fused"),
        ("opt", {"hidden": 0.25}, "permutation of the hidden channels changes the logits"),  # heads are cut across
        (
            "gemma2",
            {"hidden": 0.25},
            "a module other than an RMS norm depends on their number",
        ),  # embeddings are scaled
    ],
)
def test_models_that_cannot_be_narrowed_so(tiny, ids, family, options, message):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ModelError, match=message):
        compress.apply(model, [Narrow(**options)], ids())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("before", [Wanda(), RTN(), Wanda(targets="model.layers.0.*")])
def test_a_compressed_model_keeps_its_widths(recipe, before):
    with pytest.raises((RecipeError, TargetError), match="already"):
        plan(recipe(before, Narrow(ffn=0.2)))
