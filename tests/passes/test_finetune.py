"""Fine-tuning: masks and codes hold, the low-rank product by hand, merged in the end, and what it recovers."""

import copy

import pytest
import torch
from pruned_training import RATES, WEIGHT, check_masks, in_training, recovered, texts
from torch import nn

import compress
from compress.errors import RecipeError
from compress.layers.linear import CompressedLinear
from compress.passes.contract.journal import Journal
from compress.passes.contract.memory import ProblemSize
from compress.passes.train.finetune import Finetune

MASK = WEIGHT.abs() > 0.55


def test_the_low_rank_product_and_its_gradient_by_hand():
    """mask * (W + alpha / rank B A): dL/dB = (g * mask) A^T * alpha / rank; W has no gradient."""
    linear, weight = in_training(Finetune(lora_rank=1, lora_alpha=3.0), mask=MASK)
    product = linear.parametrization
    assert not weight.requires_grad and torch.equal(product(weight), WEIGHT * MASK), "B is zero at first"
    assert 0 < float(product.down.detach().abs().max()) <= 0.5, "within 1 / sqrt(inputs)"
    with torch.no_grad():
        product.down.copy_(torch.tensor([[1.0, 2.0, 3.0, 4.0]]))
        product.up.copy_(torch.tensor([[1.0], [0.0], [-1.0], [0.5]]))
    wanted = (WEIGHT + 3 * product.up @ product.down) * MASK
    assert torch.allclose(product(weight), wanted)
    product(weight).sum().backward()
    assert torch.allclose(product.up.grad, 3 * (MASK * product.down).sum(1, keepdim=True))
    assert torch.allclose(product.down.grad, 3 * (MASK * product.up).sum(0, keepdim=True)) and weight.grad is None
    assert torch.equal(linear.finalize(torch.float32, torch.float32).weight, wanted)


def test_the_start_differs_between_layers_and_seeds_and_nothing_else():
    layer = CompressedLinear.of(nn.Linear(4, 4))
    starts = [
        Finetune(lora_rank=2, seed=seed).parametrize(name, layer).down
        for name, seed in (("a", 0), ("a", 0), ("b", 0), ("a", 1))
    ]
    assert [torch.equal(starts[0], other) for other in starts] == [True, True, False, False]


@pytest.mark.parametrize("options", [{}, {"lora_rank": 2}, {"lora_rank": 2, "train": ["weights", "norms"]}])
def test_pruned_weights_stay_zero_and_the_others_learn(pico_model, pico_ids, options):
    compress.apply(pico_model, [compress.Magnitude(pattern="2:4")])
    before = {n: m for n, m in copy.deepcopy(pico_model).named_modules() if isinstance(m, CompressedLinear)}
    norm, journal = pico_model.model.norm.weight.clone(), Journal()
    compress.apply(pico_model, [Finetune(steps=2, warmup=0, **options)], pico_ids, journal=journal)
    check_masks(pico_model, 2, 4)
    for name, old in before.items():
        layer = pico_model.get_submodule(name)
        assert torch.equal(layer.mask, old.mask) and not torch.equal(layer.weight, old.weight)
        if options:
            assert torch.linalg.matrix_rank(layer.weight - old.weight) > 2, "the mask is on the product"
    assert torch.equal(pico_model.model.norm.weight, norm) == (options == {"lora_rank": 2})
    (record,) = [entry.figures for entry in journal.entries if entry.message == "trained"]
    every = sum(old.shape[0] * old.shape[1] for old in before.values())
    ranks = sum(2 * sum(old.shape) for old in before.values())
    assert record["weights"] == (ranks if options else every)


def test_codes_stay_and_their_scales_learn(pico_model, pico_ids):
    compress.apply(pico_model, [compress.RTN(group_size=32)])
    before = {n: m.codes for n, m in pico_model.named_modules() if isinstance(m, CompressedLinear)}
    compress.apply(pico_model, [Finetune(steps=2)], pico_ids)
    for name, packed in before.items():
        after = pico_model.get_submodule(name).codes
        assert torch.equal(after.words, packed.words) and not torch.equal(after.scale, packed.scale)


def test_a_teacher_is_opened_only_if_it_is_asked(pico_model, pico_ids):
    assert not Finetune().requires.teacher and Finetune(ce_weight=0.5).requires.teacher is True
    journal = Journal()
    step = Finetune(ce_weight=0.0, train=["norms"], steps=1, top_k=64)
    compress.apply(pico_model, [step], pico_ids, journal=journal)
    (record,) = [entry.figures for entry in journal.entries if entry.message == "trained"]
    assert abs(record["first_loss"]) < 1e-6, "the model is its own teacher"


def test_low_rank_needs_less_memory():
    extent = ProblemSize(weights=1000, scales=0, outside=10, passed=100, vocabulary=64, length=16, itemsize=4)
    assert Finetune().memory(extent) - Finetune(lora_rank=4).memory(extent) == 12 * 1000


RECOVERED = {"plain": (RATES, 0.4), "lora": ({"lora_rank": 8, "learning_rate": 3e-3}, 0.2)}


@pytest.mark.slow
@pytest.mark.parametrize("case", RECOVERED)
def test_it_recovers_a_part_of_what_2_of_4_cost(pico, pico_model, case):
    options, share = RECOVERED[case]
    found = recovered(pico_model, Finetune(**options), texts(pico), [compress.Magnitude(pattern="2:4")])
    assert found > share


WRONG = {
    "alpha": ({"lora_alpha": 8}, "lora_alpha has no effect without lora_rank; set lora_rank, or leave lora_alpha out"),
    "train": (
        {"lora_rank": 8, "train": ["norms"]},
        "lora_rank needs weights in train; write train: .weights., or leave lora_rank out",
    ),
    "rank": ({"lora_rank": 0}, "greater than or equal to 1"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_contradict_each_other_are_errors(case):
    options, message = WRONG[case]
    with pytest.raises(RecipeError, match=message):
        compress.Recipe.from_data({"model": "m", "passes": [{"finetune": options}]})
