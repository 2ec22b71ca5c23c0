"""Dropping blocks: which ones go, that the rest is a stock model which computes the same, and what is refused."""

import functools
import json

import pytest
import torch
from batches import batch_of
from tolerances import LOGITS, near
from transformers import AutoModelForCausalLM

import compress
from compress import GPTQ, RTN, DropBlocks, Wanda
from compress.errors import ModelError, RecipeError, TargetError
from compress.models.forward import mean_loss, skipping, states
from compress.models.kinds.batch import Examples
from compress.models.kinds.causal import CAUSAL
from compress.models.reshape.reconfigure import with_blocks
from compress.models.structure.blocks import find_blocks
from compress.passes.contract.journal import Journal
from compress.passes.reshape.drop_blocks import influences
from compress.pipeline.plan import plan

QUICK = ["gpt2", "gemma2"]  # a number under another name; a list with a value per block
SLOW = ["llama", "opt", "gpt-neox-parallel", "phi3", "bloom", "falcon", "qwen3-moe"]
FAMILIES = [*QUICK, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW)]


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def dropped(journal):
    """Numbers of the blocks that went, in the order in which they did."""
    return [int(e.where.rpartition(".")[2]) for e in journal.entries if e.message == "dropped"]


def silence(block):
    """Nothing is added to the hidden states any more: the block is the identity."""
    block.self_attn.o_proj.weight.data.zero_()
    block.mlp.down_proj.weight.data.zero_()


# Which blocks go


@pytest.mark.parametrize("by", ["influence", "loss"])
def test_a_block_that_does_nothing_goes_first_and_is_not_missed(pico_model, pico_ids, by):
    silence(pico_model.model.layers[1])
    before, journal = logits(pico_model, pico_ids[:1]), Journal()
    compress.apply(pico_model, [DropBlocks(count=1, by=by)], pico_ids[:2, :32], journal=journal)
    assert dropped(journal) == [1] and len(pico_model.model.layers) == 2
    assert near(logits(pico_model, pico_ids[:1]), before)


def test_influence_by_hand(pico_model, pico_ids):
    """1 - cos of the angle between what goes in and what comes out, token by token."""
    silence(pico_model.model.layers[1])
    ids, blocks = pico_ids[:2, :16], find_blocks(pico_model)
    found = influences(pico_model, blocks, Examples.of_ids(ids))
    with torch.no_grad():
        hidden = pico_model(input_ids=ids, output_hidden_states=True).hidden_states  # the last one is normed
    first, second = hidden[0].double().flatten(0, 1), hidden[1].double().flatten(0, 1)
    wanted = 1 - (first * second).sum(1) / (first.norm(dim=1) * second.norm(dim=1))
    assert float(found[0]) == pytest.approx(float(wanted.mean()), rel=1e-4)
    assert abs(float(found[1])) < 1e-6 < float(found[2])
    assert torch.allclose(
        influences(pico_model, blocks, Examples.of_ids(ids), 2), found[[0, 2]], atol=1e-6
    )  # the other one changes nothing


def test_hidden_states_are_those_of_the_model(pico_model, pico_ids):
    found = states(pico_model, find_blocks(pico_model), batch_of(pico_ids[:1]))
    assert len(found) == 4
    with torch.no_grad():
        again = pico_model.lm_head(pico_model.model.norm(found[-1]))
    assert torch.allclose(again, logits(pico_model, pico_ids[:1]), atol=1e-5)


def test_by_loss_is_greedy(pico_model, pico_ids):
    """The first is the best of all single ones by transformers' own loss, the second the best in addition to it."""
    ids, blocks = pico_ids[:2, :32], find_blocks(pico_model)

    def loss(some):
        with skipping(blocks, some), torch.no_grad():
            return float(pico_model(input_ids=ids, labels=ids).loss)

    first = min(range(3), key=lambda i: loss([i]))
    second = min({0, 1, 2} - {first}, key=lambda i: loss([first, i]))
    assert mean_loss(pico_model, Examples.of_ids(ids), CAUSAL) == pytest.approx(loss([]), rel=1e-5)
    journal = Journal()
    compress.apply(pico_model, [DropBlocks(count=2, by="loss")], ids, journal=journal)
    assert dropped(journal) == [first, second]


def test_contiguous_blocks_are_judged_as_one(tiny, ids):
    """Blocks 1 and 3 do nothing, but 0 and 1 lie side by side, 0 being nearly nothing."""
    model = tiny("llama", num_hidden_layers=4)
    silence(model.model.layers[1])
    silence(model.model.layers[3])
    for linear in (model.model.layers[0].self_attn.o_proj, model.model.layers[0].mlp.down_proj):
        linear.weight.data *= 1e-3
    journal = Journal()
    compress.apply(model, [DropBlocks(count=2, contiguous=True)], ids(2), journal=journal)
    (entry,) = [e for e in journal.entries if e.message == "dropped"]
    assert entry.where.endswith("layers.0") and entry.figures["blocks"] == 2 and len(model.model.layers) == 2


def test_contiguous_blocks_by_loss_are_the_best_run(tiny, ids):
    model, journal = tiny("llama", num_hidden_layers=4), Journal()
    losses = []
    for start in range(3):
        with skipping(find_blocks(model), [start, start + 1]):
            losses.append(mean_loss(model, Examples.of_ids(ids(2)), CAUSAL))
    compress.apply(model, [DropBlocks(count=2, by="loss", contiguous=True)], ids(2), journal=journal)
    assert dropped(journal) == [min(range(3), key=lambda i: losses[i])]


@pytest.mark.parametrize(("count", "left"), [(2, [0, 2, 3, 5]), (4, [0, 5]), (5, [0])])
def test_by_spacing_the_ends_and_those_evenly_between_stay(count, left, tiny, ids):
    model, journal = tiny("llama", num_hidden_layers=6), Journal()
    wanted = [model.model.layers[i].mlp.up_proj.weight.clone() for i in left]
    compress.apply(model, [DropBlocks(count=count, by="spacing")], ids(1), journal=journal)
    assert all(torch.equal(layer.mlp.up_proj.weight, w) for layer, w in zip(model.model.layers, wanted, strict=True))
    assert len(dropped(journal)) == count


def test_protected_blocks_stay(tiny, ids):
    model, journal = tiny("llama"), Journal()
    silence(model.model.layers[0])
    silence(model.model.layers[2])
    compress.apply(model, [DropBlocks(count=1, keep=[0, -1])], ids(2), journal=journal)
    assert dropped(journal) == [1]
    compress.apply(model, [DropBlocks(count=1, ignore="model.layers.0.mlp.up_proj")], ids(2), journal=journal)
    assert dropped(journal) == [1, 1]


def test_only_as_many_sequences_as_asked_are_looked_at(pico_model, pico_ids, monkeypatch):
    seen = []
    run = type(pico_model).forward

    @functools.wraps(run)
    def watched(self, **given):
        seen.append(given)
        return run(self, **given)

    monkeypatch.setattr(type(pico_model), "forward", watched)
    compress.apply(pico_model, [DropBlocks(count=1, sequences=2)], pico_ids)
    looked_at = [given for given in seen if given["input_ids"].shape[1] > 4]  # the check of the model takes 4 tokens
    assert len(looked_at) == 2 + 3  # and the proof: with the block passed by, and without it; and one run with a cache


# What is left


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rest_is_a_stock_model_that_computes_what_the_others_did(family, tiny_folder, recipe, ids, tmp_path):
    folder = tiny_folder(family)
    asked = recipe(DropBlocks(count=1, keep=[0, -1]), model=folder, save={"format": "dense"})
    report = compress.run(asked, tmp_path).report
    assert report["verified"]["own"] <= LOGITS
    original = AutoModelForCausalLM.from_pretrained(folder).eval()
    with skipping(find_blocks(original), [1]):
        wanted = logits(original, ids())
    plain = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert plain.config.num_hidden_layers == 2 and type(plain) is type(original)
    assert torch.allclose(logits(plain, ids()), wanted, atol=1e-4)


def test_the_cache_counts_the_blocks_that_are_left(pico_model, pico_ids):
    compress.apply(pico_model, [DropBlocks(count=1, keep=[0, 2])], pico_ids[:2])
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    with_cache = pico_model.generate(pico_ids[:1, :8], use_cache=True, **options)
    assert torch.equal(with_cache, pico_model.generate(pico_ids[:1, :8], use_cache=False, **options))
    assert with_cache.shape == (1, 16)


def test_lists_with_a_value_per_block_are_cut_along(tiny, ids):
    """Sliding and full attention in turn: what is left keeps its own kind."""
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    model = tiny("gemma2", num_hidden_layers=4, layer_types=kinds)
    with skipping(find_blocks(model), [0]):
        wanted = logits(model, ids())
    compress.apply(model, [DropBlocks(count=1, keep=[1, 2, 3])], ids())
    assert model.config.layer_types == kinds[1:] and model.config.num_hidden_layers == 3
    assert torch.allclose(logits(model, ids()), wanted, atol=1e-5)


def test_other_numbers_that_are_as_large_stay(tiny):
    model = tiny("llama", num_hidden_layers=4)
    config = with_blocks(model, [0, 1, 3])
    assert (config.num_hidden_layers, config.num_attention_heads) == (3, 4)


# In a chain


@pytest.mark.slow
def test_the_chain_drop_round_learn(recipe, tmp_path, manifest_of):
    chain = DropBlocks(count=1), GPTQ(group_size=32), compress.Distill(steps=2)
    asked = recipe(*chain)
    planned = plan(asked)
    result = compress.run(asked, tmp_path)
    verified = result.report["verified"]
    assert verified["layers"] == 14 and max(verified["own"], verified["transformers"]) <= LOGITS
    assert result.report["size"]["tensor_bytes"] == planned.checkpoint_bytes
    assert [layer.passes[0] for layer in planned.layers] == ["passes[0] drop_blocks"] * 14
    assert result.report["size"]["dense_bytes"] == plan(recipe(RTN())).dense_bytes  # of the model as it came
    assert json.loads((tmp_path / "config.json").read_text())["num_hidden_layers"] == 2
    assert result.report["training"]["passes[2] distill"]["curve"][0]["loss"] > 0.01  # from the teacher of 3 blocks
    before = manifest_of(tmp_path)
    assert compress.run(asked, tmp_path).report["size"] == result.report["size"]  # complete: only checked again
    assert manifest_of(tmp_path)["shards"] == before["shards"]


def test_later_patterns_match_the_names_of_what_is_left(recipe):
    late = Wanda(targets="model.layers.2.*")
    assert plan(recipe(late)).layers
    with pytest.raises(TargetError, match=r"passes\[1\] wanda: targets pattern 'model.layers.2.\*' matches no linear"):
        plan(recipe(DropBlocks(count=1), late))


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give exactly one of count and sparsity"),
        ({"count": 1, "sparsity": 0.5}, "give exactly one of count and sparsity"),
        ({"sparsity": 0.0}, "greater than 0"),
        ({"sparsity": 1.0}, "less than 1"),
        ({"count": 0}, "greater than or equal to 1"),
        ({"count": 1, "by": "luck"}, "'influence', 'loss' or 'spacing'"),
        ({"count": 1, "by": "spacing", "keep": [0]}, "by: spacing fixes the removed blocks; leave keep"),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises(RecipeError, match=message):
        compress.Recipe(model="m", passes=[{"drop_blocks": options}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 3}, "cannot remove 3 of 3 blocks; use at most 2"),
        ({"sparsity": 0.9}, "cannot remove 3 of 3 blocks; use at most 2"),
        ({"sparsity": 0.1}, "sparsity 0.1 of 3 blocks removes none; use count: 1"),
        ({"count": 1, "keep": [3]}, "keep names block 3, but the last one is 2"),
        ({"count": 2, "keep": [0, -1]}, "cannot remove 2 blocks: keep, targets and ignore protect all but 1 of 3"),
        ({"count": 2, "keep": [1], "contiguous": True}, "cannot remove 2 contiguous blocks: .* protect all but 2 of 3"),
        (
            {"count": 1, "by": "spacing", "ignore": ["model.layers.1.*"]},
            "by spacing removes block 1, which targets or ignore protect",
        ),
        (
            {"count": 1, "targets": ["*.q_proj"]},
            "cannot remove 1 blocks: .* protect all but 0 of 3; remove fewer, or protect fewer",
        ),
    ],
)
def test_what_cannot_be_dropped_is_said_before_any_work(recipe, options, message):
    with pytest.raises(TargetError, match=rf"^passes\[0\] drop_blocks: {message}"):
        plan(recipe(DropBlocks(**options)))


@pytest.mark.parametrize("before", [Wanda(), RTN(), Wanda(targets="model.layers.0.*")])
def test_a_compressed_model_keeps_its_blocks(recipe, before):
    with pytest.raises((RecipeError, TargetError), match="already"):
        plan(recipe(before, DropBlocks(count=1, targets="model.layers.1.*")))


def test_a_place_that_no_configuration_can_say(tiny, ids):
    """The first block alone has no experts, and the configuration says so by its number."""
    model = tiny("qwen3-moe", mlp_only_layers=[0])
    with pytest.raises(ModelError, match="no entry of its configuration sets the number of blocks to 2 of 3"):
        compress.apply(model, [DropBlocks(count=1, keep=[1, 2])], ids())


def test_a_model_that_is_not_the_one_without_the_blocks_is_refused(tiny, ids, monkeypatch):
    """As where a block computes something else under another number."""
    monkeypatch.setattr(
        "compress.passes.reshape.drop_blocks.with_blocks", lambda model, kept: with_blocks(model, [0, 1])
    )
    monkeypatch.setattr("compress.passes.reshape.drop_blocks.renumbered", lambda m, k: {n: n for n in m.state_dict()})
    model = tiny("llama")
    with pytest.raises(ModelError, match="differs from the model that skips the others"):
        compress.apply(model, [DropBlocks(count=1, keep=[1, 2])], ids())
    assert len(model.model.layers) == 3


def test_a_block_that_the_model_cannot_run_without_is_named(tiny, ids, monkeypatch):
    """Hybrid models of transformers need a block with attention for their cache."""
    step = DropBlocks(count=1, by="spacing")
    with pytest.raises(ModelError, match=r"drop_blocks: transformers cannot run the model without the blocks \[1\]"):
        compress.apply(tiny("qwen3-next"), [step], ids())
