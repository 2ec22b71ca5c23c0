"""Examples of unequal lengths: the loss is the mean over all tokens, however the examples are divided."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import kind_of
from compress.models.structure.ends import vocabulary_size
from compress.numerics.metrics import token_weights
from compress.passes.contract.journal import Journal
from compress.passes.families.reconstruction import BlockLoss
from compress.train.feed import part_weights
from compress.train.loop import TrainingContext, train
from compress.train.objective import LanguageLoss
from compress.train.options import TrainingOptions
from compress.train.student import KINDS, Student
from compress.train.teacher import OnlineTeacher

LENGTHS = (2, 9, 3, 12)


def examples_of(model):
    """Examples of several lengths; of encoder-decoders, sources of one length and targets of several."""
    kind, generator = kind_of(model), torch.Generator().manual_seed(0)

    def ids(count):
        return torch.randint(5, vocabulary_size(model), (1, count), generator=generator)

    texts = [[ids(6) for _ in range(kind.texts - 1)] + [ids(length)] for length in LENGTHS]
    return Examples(tuple(kind.examples(model, text)[0] for text in texts))


def first_step(model, objective, examples, **options):
    """The loss and the gradient of the first step, and the loss on held-out examples before it."""
    parameters = {name: p.requires_grad_() for name, p in model.named_parameters()}
    gradients = {}

    class Observed(Student):
        def adjust(self):
            gradients.update({name: p.grad.clone() for name, p in parameters.items()})

    groups = {kind: parameters if kind == "weights" else {} for kind in KINDS}
    settings = TrainingOptions(steps=1, learning_rate=1e-12, **options)
    record = train(Observed(model, groups), objective, examples, settings, TrainingContext("here", Journal()))
    values = {key: point[key] for point in reversed(record["curve"]) for key in ("loss", "held_out") if key in point}
    return values, torch.cat([gradient.flatten() for gradient in gradients.values()])


@pytest.mark.parametrize("family", ["llama", "t5", "bart", "bert"])
@pytest.mark.parametrize("ce_weight", [1.0, 0.3])
def test_accumulation_gives_the_step_of_one_batch(family, ce_weight, tiny):
    model, teacher = tiny(family, seed=1).eval(), tiny(family, seed=2).eval()
    kind = kind_of(model).with_masks(0, None) if kind_of(model).masks else kind_of(model)
    if kind.masks:
        kind = type(kind)(mask=4, vocabulary=vocabulary_size(model), special=(0, 1, 2, 3))
    objective = LanguageLoss(ce_weight, teacher=OnlineTeacher(teacher, 1.0, "teacher", kind), lm_objective=kind)
    examples = examples_of(model)
    together, expected = first_step(model, objective, examples, batch=4)
    for options in ({"batch": 1, "accumulate": 4}, {"batch": 2, "accumulate": 2}):
        apart, gradient = first_step(model, objective, examples, **options)
        assert apart["loss"] == pytest.approx(together["loss"], rel=1e-5)
        assert float((gradient - expected).norm() / expected.norm()) < 1e-4


def test_held_out_examples_count_by_their_tokens(tiny):
    model = tiny("t5", seed=1).eval()
    kind = kind_of(model)
    objective, examples = LanguageLoss(lm_objective=kind), examples_of(model)
    results = [first_step(model, objective, examples, batch=batch, hold_out=0.75)[0] for batch in (1, 3)]
    assert results[0]["held_out"] == pytest.approx(results[1]["held_out"], rel=1e-5)
    assert results[0]["held_out"] != pytest.approx(results[0]["loss"], rel=1e-3)


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 50), st.integers(0, 9)), min_size=1, max_size=6))
def test_weights_of_parts(parts):
    """The mean over examples of weighted means is the mean over all items; equal examples have weights of exactly 1."""
    sizes, counts = [size for size, *_ in parts], [(first, second) for _, first, second in parts]
    weights = part_weights(counts, sizes)
    for term in range(2):
        total = sum(count[term] for count in counts)
        shares = [size * weight[term] / sum(sizes) for size, weight in zip(sizes, weights, strict=True)]
        expected = [count[term] / total if total else 0.0 for count in counts]
        assert shares == pytest.approx(expected)
    assert set(part_weights([(7 * size, size) for size in sizes], sizes)) == {(1.0, 1.0)}


def test_calibration_batches_of_a_block_count_by_their_tokens():
    targets = [torch.ones(4, 3), torch.ones(1, 3)]
    outputs = [torch.full((4, 3), 2.0), torch.full((1, 3), 4.0)]
    inputs = SimpleNamespace(forward=lambda block, batch: outputs[batch])
    loss = BlockLoss(inputs, targets.__getitem__, [None, None], [12, 3])
    assert float(loss(None, None, [0, 1])) == pytest.approx((4 * 1 + 1 * 9) / 5)
    [[first], [second]] = part_weights([loss.counts(None, [0]), loss.counts(None, [1])], [1, 1])
    apart = (float(loss(None, None, [0], (first,))) + float(loss(None, None, [1], (second,)))) / 2
    assert apart == pytest.approx((4 * 1 + 1 * 9) / 5)


def test_every_sequence_has_the_same_weight_in_token_scaled_distillation():
    text = torch.tensor([-1.0, -3.0, -2.0, -0.5, -4.0])
    weights = token_weights(text, 2.0, [2, 3])
    assert weights[:2].sum() == pytest.approx(0.5) and weights[2:].sum() == pytest.approx(0.5)
