"""Dropping experts: which ones, that the others compute the same, that the result is a stock model, and what is refused."""

import json

import pytest
import torch
from mixtures import mixture_folder
from tolerances import near
from transformers import AutoModelForCausalLM
from transformers.models.mixtral import modeling_mixtral

import compress
from compress import GPTQ, RTN, DropExperts
from compress.errors import ModelError, NumericError, RecipeError, SeveralErrors, TargetError
from compress.models.experts import open_experts
from compress.models.kinds.batch import Examples
from compress.models.reshape.experts import expert_sets, experts_per_token, group_numbers, highest
from compress.passes.contract.journal import Journal
from compress.passes.reshape.drop_experts import routed_outputs

GROUPED = {"n_routed_experts": 8, "n_group": 2, "topk_group": 1}
FAMILIES = {
    "mixtral": {},
    "qwen3-moe": {},
    "gpt-oss": {},
    "deepseek-v3": {},
    "deepseek-v3 in groups": GROUPED,
}
every_family = pytest.mark.parametrize("name", FAMILIES)
ROUTERS = {"gate", "router"}
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def mixture(tiny, name, **changes):
    return tiny(name.split()[0], **{**FAMILIES.get(name, {}), **changes})


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


def routers(model):
    return [m for n, m in model.named_modules() if n.rpartition(".")[2] in ROUTERS and hasattr(m, "weight")]


def silence(model, numbers):
    """No token is routed to these experts: a bias forbids them, or their rows read one large channel, negatively."""
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.data[1] = 0.0  # nothing else writes into that channel
    for name, weight in model.named_parameters():
        if name.endswith("experts.down_proj"):
            weight.data[:, 1] = 0.0
    for router in routers(model):
        bias = getattr(router, "e_score_correction_bias", getattr(router, "bias", None))
        if bias is not None:
            bias.data[numbers] = -100.0
            continue
        model.get_input_embeddings().weight.data[:, 1] = 0.5
        router.weight.data[:, 1] = 0.0
        router.weight.data[numbers, 1] = -100.0


def dropped(journal):
    return {e.where.rpartition(" ")[2]: e.figures["experts"] for e in journal.entries if e.message == "dropped experts"}


# Which experts are dropped


@every_family
@pytest.mark.parametrize("by", ["reap", "frequency", "activation"])
def test_an_expert_without_tokens_is_dropped_and_leaves_the_logits_equal(name, by, tiny, ids):
    """Routers normalize over the chosen experts, so that dropped rows have no part in the result."""
    text, model, journal = ids(4, 16), mixture(tiny, name), Journal()
    numbers = [1, 6] if "groups" in name else [1]
    silence(model, numbers)
    before = logits(model, text)
    assert compress.apply(model, [DropExperts(count=len(numbers), by=by)], text, journal=journal) is model
    figures = [e.figures for e in journal.entries if e.message == "dropped experts"]
    assert len(figures) == len(routers(model)) and all(len(f["experts"]) == len(numbers) for f in figures)
    assert all(f["kept_score"] == 1 and f["without_tokens"] >= len(numbers) for f in figures)
    assert figures[0]["experts"] == numbers
    assert near(logits(model, text), before)


def test_scores_by_a_loop_over_tokens(tiny, ids):
    """Each token, each of its two experts: the router's weight times the norm of the output, by the formula."""
    model, text = tiny("mixtral"), ids(2, 8)
    inputs = {}
    hooks = [
        layer.mlp.register_forward_pre_hook(lambda m, args, i=i: inputs.setdefault(i, []).append(args[0]))
        for i, layer in enumerate(model.model.layers)
    ]
    for row in text:
        logits(model, row[None])
    for hook in hooks:
        hook.remove()
    wanted = {}
    for i, layer in enumerate(model.model.layers):
        count, norms, weighted = [0] * 4, [0.0] * 4, [0.0] * 4
        up_weight, down_weight = layer.mlp.experts.gate_up_proj, layer.mlp.experts.down_proj
        for x in torch.cat(inputs[i]).flatten(0, 1):
            probability = (layer.mlp.gate.weight @ x).softmax(0)
            best = probability.argsort(descending=True)[:2]
            for j in best.tolist():
                gate, up = (up_weight[j] @ x).chunk(2)
                norm = float((down_weight[j] @ (torch.nn.functional.silu(gate) * up)).norm())
                count[j] += 1
                norms[j] += norm
                weighted[j] += float(probability[j] / probability[best].sum()) * norm
        reap = [w / max(1, c) for w, c in zip(weighted, count, strict=True)]
        wanted[i] = {"frequency": count, "activation": norms, "reap": reap}
    open_experts(model)
    measured = routed_outputs(model, Examples.of_ids(text))
    assert list(measured) == [f"model.layers.{i}.mlp.experts" for i in range(3)]
    for i, sums in enumerate(measured.values()):
        assert sums.per_token == 2
        for by, scores in wanted[i].items():
            assert sums.scores(by).tolist() == pytest.approx(scores, rel=1e-4)


def test_kept_experts_and_rows_keep_their_order(tiny, ids):
    model, journal = tiny("mixtral"), Journal()
    before = {n: t.clone() for n, t in model.state_dict().items()}
    compress.apply(model, [DropExperts(sparsity=0.5)], ids(2), journal=journal)
    for name, numbers in dropped(journal).items():
        kept = [i for i in range(4) if i not in numbers]
        layer = name.removesuffix(".experts")
        assert len(kept) == 2
        assert torch.equal(model.get_parameter(f"{layer}.gate.weight"), before[f"{layer}.gate.weight"][kept])
        for new, old in enumerate(kept):
            down = model.get_submodule(name).expert(new).w2.weight
            assert torch.equal(down, before[f"{name}.down_proj"][old])
            assert down.untyped_storage().nbytes() == down.nbytes, "a dropped expert stays in memory"


def test_of_equal_scores_the_first_ones_are_kept_and_groups_lose_equally_many():
    assert highest(torch.tensor([1.0, 1, 1, 0]), 2, 1).tolist() == [0, 1]
    assert highest(torch.tensor([9.0, 8, 7, 6, 1, 2, 3, 4]), 4, 2).tolist() == [0, 1, 6, 7]


def test_only_as_many_sequences_as_asked_are_read(tiny, ids):
    few, all_of_them = Journal(), Journal()
    compress.apply(tiny("mixtral"), [DropExperts(count=1, sequences=2)], ids(6), journal=few)
    compress.apply(tiny("mixtral"), [DropExperts(count=1)], ids(6)[:2], journal=all_of_them)
    assert few.entries == all_of_them.entries


# The result


@every_family
def test_the_folder_is_a_stock_model(name, tiny, ids, tmp_path):
    model = mixture(tiny, name)
    count = next(v for k, v in model.config.to_dict().items() if k in COUNTS)
    removed = 2 if "groups" in name else 1
    compress.apply(model, [DropExperts(count=removed)], ids(2))
    compress.save(model, tmp_path / "out", format="dense")
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert count - removed in [stated.get(key) for key in COUNTS]
    assert near(logits(compress.load(tmp_path / "out")[0], ids(2)), logits(model, ids(2)))
    if all(experts.named for experts in expert_sets(model).values()):  # else transformers reads 3-D weights alone
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
        assert near(logits(stock, ids(2)), logits(model, ids(2)))


@pytest.mark.parametrize("quantizer", [RTN(group_size=32), GPTQ(group_size=32)], ids=["rtn", "gptq"])
def test_the_smaller_model_is_quantized_by_later_passes(quantizer, recipe, tmp_path):
    asked = recipe(DropExperts(count=1), quantizer, model=mixture_folder(), save={"format": "native"}, eval=None)
    compress.plan(asked)
    model, _ = compress.load(compress.run(asked, tmp_path / "out").folder)
    assert model.config.num_local_experts == 3
    assert {experts.count for experts in expert_sets(model).values()} == {3}


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3 in groups"])
@pytest.mark.parametrize("count", [1, 2, 3, 4, 6])
def test_what_a_plan_accepts_the_run_does(name, count, tiny, ids, recipe, tmp_path):
    mixture(tiny, name).save_pretrained(tmp_path / "model")
    asked = recipe(DropExperts(count=count), model=str(tmp_path / "model"), save={"format": "dense"}, eval=None)
    try:
        compress.plan(asked)
    except (TargetError, ModelError) as error:
        with pytest.raises(type(error)):
            compress.apply(mixture(tiny, name), [DropExperts(count=count)], ids(2))
    else:
        compress.run(asked, tmp_path / "out")


# What is refused


def refuses(error, match, model, ids, **options):
    with pytest.raises(error, match=match):
        compress.apply(model, [DropExperts(**options)], ids)


def test_options():
    for options in ({}, {"count": 1, "sparsity": 0.5}):
        with pytest.raises((RecipeError, ValueError), match="give exactly one of count and sparsity"):
            DropExperts(**options)


def test_numbers_that_no_model_has(tiny, ids):
    refuses(TargetError, "sparsity 0.1 of 4 experts removes none; use count: 1", tiny("mixtral"), ids(1), sparsity=0.1)
    refuses(TargetError, "cannot remove 4 of 4 experts: .* use at most 2", tiny("mixtral"), ids(1), count=4)
    needed = "2 of 4 experts are left, but each token is computed by 3; remove at most 1"
    refuses(TargetError, needed, tiny("mixtral", num_experts_per_tok=3), ids(1), count=2)
    groups = r"chooses among 2 groups .* 7 experts are left; keep a multiple of 2, such as count: 2"
    refuses(TargetError, groups, mixture(tiny, "deepseek-v3 in groups"), ids(1), count=1)


def test_models_without_experts(tiny, ids, recipe):
    refuses(TargetError, "no block of this model has experts", tiny("llama"), ids(1), count=1)
    with pytest.raises(TargetError, match="no block of this model has experts"):
        compress.plan(recipe(DropExperts(count=1), save={"format": "dense"}))


def test_all_blocks_or_none(tiny, ids):
    part = "layers.1.*w2 is left out by targets or ignore, but the number of experts is uniform"
    refuses(TargetError, part, tiny("mixtral"), ids(1), count=1, ignore="re:.*layers.1.*w2")


def test_after_quantization_it_is_refused(ids, recipe):
    with pytest.raises((RecipeError, SeveralErrors), match="put drop_experts before it"):
        recipe(RTN(), DropExperts(count=1))


def test_a_router_whose_rows_are_in_another_order_is_refused(tiny, ids, monkeypatch):
    """Expert j is chosen by row j + 1: a permutation of both alike changes the output."""
    forward = modeling_mixtral.MixtralTopKRouter.forward

    def shifted(self, hidden):
        *first, chosen = forward(self, hidden)
        return (*first, (chosen + 1) % 4)

    monkeypatch.setattr(modeling_mixtral.MixtralTopKRouter, "forward", shifted)
    refuses(ModelError, "permutation of the experts .* changes the output", tiny("mixtral"), ids(1), count=1)


def test_a_configuration_that_cannot_say_it_is_refused(tiny, ids, monkeypatch):
    monkeypatch.setattr("compress.models.reshape.experts.entries", lambda config: {})
    refuses(ModelError, "sets the number of experts to 3 of 4", tiny("mixtral"), ids(1), count=1)


def test_scores_that_are_not_finite_are_refused(tiny, ids):
    model = tiny("mixtral")
    model.model.layers[2].mlp.experts.down_proj.data[:, 0] = torch.inf
    refuses(NumericError, "layers.2.mlp.experts: the output of an expert holds NaN", model, ids(1), count=1)


def test_experts_of_a_token_are_known_without_data(tiny):
    for family, per_token in (("mixtral", 2), ("llama", 0)):
        model = tiny(family)
        open_experts(model)
        assert experts_per_token(model) == per_token
    assert group_numbers(mixture(tiny, "deepseek-v3 in groups").config, 8) == [2]
    assert group_numbers(tiny("deepseek-v3").config, 4) == []
