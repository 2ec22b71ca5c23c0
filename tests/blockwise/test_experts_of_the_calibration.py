"""Experts that see all tokens of the calibration: their statistics are of all, the output is that of the routed ones."""

import numpy as np
import pytest
import torch
from tolerances import same_logits

import compress
from compress import GPTQ, Calibration, Wanda
from compress.errors import RecipeError
from compress.layers.linear import linears
from compress.models.experts import Experts, open_experts, unroute
from compress.pipeline.fitting import LIBRARIES_BYTES

IDS = torch.arange(48).view(3, 16) % 60


@pytest.fixture
def mixture(recipe, tiny, tmp_path):
    """mixture(*passes, **calibration): a recipe for a mixture of experts."""
    tiny("qwen3-moe").save_pretrained(tmp_path / "model")
    np.save(tmp_path / "ids.npy", IDS.numpy())
    text = {"source": str(tmp_path / "ids.npy"), "sequences": None, "length": None}
    save = {"format": "native", "verify": "own"}
    return lambda *passes, **calibration: recipe(
        *passes, model=str(tmp_path / "model"), calibration=Calibration(**text, **calibration), save=save, eval=None
    )


def kept(model, number):
    """The kept weights of an expert of the first block, by linear."""
    expert = model.model.layers[0].mlp.experts.get_submodule(str(number))
    return {name: expert.get_submodule(name).weight != 0 for name in ("gate_proj", "up_proj", "down_proj")}


def test_experts_that_see_all_tokens_are_pruned_by_the_norms_of_all(mixture, tiny, tmp_path):
    """Wanda by hand: the smallest half of |W| ||x|| in each row, x over all tokens at the input of the experts."""
    compress.run(mixture(Wanda(repair=0), experts="all"), tmp_path / "all", progress=False)
    compress.run(mixture(Wanda(repair=0)), tmp_path / "routed", progress=False)
    everyone, routed = (compress.load(tmp_path / name)[0] for name in ("all", "routed"))
    model, seen = tiny("qwen3-moe"), []
    model.model.layers[0].mlp.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(IDS)
    norms = seen[0].flatten(0, 1).norm(dim=0)
    gates = model.model.layers[0].mlp.experts.gate_up_proj.chunk(2, dim=1)[0]
    for number, weight in enumerate(gates):
        scores = weight.abs() * norms
        expected = scores >= scores.sort(dim=1).values[:, scores.shape[1] // 2, None]
        assert torch.equal(kept(everyone, number)["gate_proj"], expected)
    numbers = range(len(gates))
    assert any(not torch.equal(kept(everyone, n)["gate_proj"], kept(routed, n)["gate_proj"]) for n in numbers)


def test_the_output_is_that_of_the_routed_experts(tiny):
    model = tiny("qwen3-moe")
    open_experts(model)
    expected = model(IDS).logits
    unroute(model)
    assert same_logits(model(IDS).logits, expected)
    unroute(model, False)
    assert same_logits(model(IDS).logits, expected)


def test_activations_that_are_computed_again_give_the_same_codes(mixture, tmp_path):
    asked = mixture(GPTQ(group_size=16), experts="all")
    free = compress.plan(asked).memory_bytes
    digests = [compress.run(asked, tmp_path / "held", progress=False).report["files"]]
    for limit in range(free, 0, -free // 100):
        planned = compress.plan(asked, memory=LIBRARIES_BYTES + limit)
        if planned.fit.recomputes:
            break
    made = compress.run(asked, tmp_path / "again", progress=False, memory=LIBRARIES_BYTES + limit)
    assert planned.fit.recomputes and made.report["files"] == digests[0]


def test_a_model_in_memory_routes_again_afterwards(mixture, tiny):
    model = tiny("qwen3-moe")
    compress.apply(model, [GPTQ(group_size=16)], mixture("gptq", experts="all").calibration)
    assert not any(module.unrouted for module in model.modules() if isinstance(module, Experts))


def test_experts_of_a_model_in_memory_see_the_tokens_that_the_calibration_states(mixture, tiny):
    codes = {}
    for experts in ("routed", "all"):
        model = tiny("qwen3-moe")
        compress.apply(model, [GPTQ(group_size=16)], mixture("gptq", experts=experts).calibration)
        layers = {name: layer for name, layer in linears(model).items() if ".experts." in name}
        codes[experts] = {name: layer.all_parts[0].sha256() for name, layer in layers.items()}
    assert codes["routed"].keys() == codes["all"].keys() and codes["routed"] != codes["all"]


@pytest.mark.parametrize(("wanted", "warned"), [(0, False), (10_000, True)])
def test_experts_with_few_tokens_are_named(mixture, tmp_path, wanted, warned):
    made = compress.run(mixture(GPTQ(group_size=16), expert_tokens=wanted), tmp_path / "out", progress=False)
    assert ("experts saw few calibration tokens" in str(made.report["journal"])) == warned


@pytest.mark.parametrize("stated", [{"experts": "all"}, {"expert_tokens": 64}])
def test_a_model_without_experts_has_no_such_options(recipe, stated):
    text = Calibration(source="embedded", sequences=4, length=32, **stated)
    with pytest.raises(RecipeError, match=f"calibration {next(iter(stated))}: LlamaForCausalLM has no experts"):
        compress.plan(recipe(GPTQ(), calibration=text))
