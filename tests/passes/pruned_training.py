"""What the tests of passes that prune in training share: a linear in training, and the pico model's perplexity."""

import copy

import torch
from masks import most_of
from torch import nn
from transformers import AutoTokenizer

import compress
from compress.data.ids import token_ids
from compress.evaluation.perplexity import perplexity
from compress.layers.linear import CompressedLinear
from compress.train.linear import TrainedLinear

WEIGHT = torch.tensor(
    [[0.4, -0.3, 0.2, 0.1], [0.1, 0.8, -0.7, 0.6], [-0.5, 0.6, 0.05, -0.04], [0.9, 1.0, -1.1, 1.2]]
)  # each row is a group of 2:4


RATES = {"epochs": 1, "batch": 4, "learning_rate": 3e-4, "weight_rate": 1.0}
"""With which the pico model wins back about half of what 2:4 costs, in 32 steps."""


def in_training(step, weight=WEIGHT, mask=None):
    """(linear, weight) of a pass's own parametrization, in training."""
    layer = CompressedLinear(weight.clone() if mask is None else weight * mask, None)
    layer.put(layer.weight, mask)
    linear = TrainedLinear(layer)
    return linear, linear.train_weight(step.parametrize("layer", layer))


def stepped(linear, weight, gradient, rate, done, of):
    """One plain step of gradient descent, as the loop goes about it: gradient, adjust, decay, step, update; what it told."""
    weight.grad = None
    (linear.parametrization(weight) * gradient).sum().backward()
    linear.adjust()
    linear.decay(rate)
    with torch.no_grad():
        weight -= rate * weight.grad
    return linear.update(done, of)


def texts(pico):
    """(train, other): ids of the embedded text, [128, 128] and [16, 128]."""
    tokenizer = AutoTokenizer.from_pretrained(pico)
    return (
        token_ids("embedded", "calibration", tokenizer, 128, 128, seed=0),
        token_ids("embedded", "test", tokenizer, 16, 128, seed=0),
    )


def recovered(model, step, text, start=None):
    """The share of the log-perplexity lost to 2:4 magnitude pruning that a pass wins back, on other text.

    start: passes before it.
    """
    dense, pruned = copy.deepcopy(model), compress.apply(copy.deepcopy(model), [compress.Magnitude(pattern="2:4")])
    found = compress.apply(copy.deepcopy(model), [*(start or []), step], text[0])
    loss = [perplexity(m, text[1]).loss for m in (dense, pruned, found)]
    return (loss[1] - loss[2]) / (loss[1] - loss[0])


def check_masks(model, n=1, m=1):
    """Every linear of the blocks has a mask, which keeps n of every m, and weights outside of it are exactly zero."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear)}
    assert len(layers) == 21
    for name, layer in layers.items():
        assert layer.mask is not None and bool((layer.weight[~layer.mask] == 0).all()), name
        assert most_of(layer.mask, m) == n
    assert not any(isinstance(m, nn.Linear) for m in model.model.layers.modules())
