"""Outlier Suppression+: shift, scale and thresholds by hand, the search against a slow one, and folds that are proved."""

import copy

import pytest
import torch
from draws import random
from gated import Gated, Inputs
from torch import nn

import compress
from compress.layers.linear import linears
from compress.models.structure.links import find_links
from compress.models.structure.shifts import fold_shift, without_bias
from compress.passes.contract.observers import InputRange
from compress.passes.prepare.outlier_suppression import SPAN, OutlierSuppression, suppressing

WIDTH = 6
OUTLIERS = torch.tensor([1.0, 40.0, 1.0, 0.1, 1.0, 8.0])
CENTERS = torch.tensor([0.0, 30.0, -5.0, 0.0, 0.0, 2.0])


class Sweep(Inputs):
    storage = torch.float32

    def forward(self, block, batch):
        return block(self.batches[batch])


class Attention(nn.Module):
    """Values that are averaged over tokens with weights of sum 1, and read by a linear, `repeat` times each."""

    width = WIDTH

    def __init__(self, repeat=1):
        super().__init__()
        torch.manual_seed(0)
        self.repeat = repeat
        self.v, self.o = nn.Linear(WIDTH, WIDTH // repeat), nn.Linear(WIDTH, WIDTH)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.v.bias.data += CENTERS[: WIDTH // repeat]
        self.requires_grad_(False)

    def forward(self, x):
        attention = (x @ x.transpose(-1, -2)).softmax(-1)
        return x + self.o(attention @ self.v(x).repeat_interleave(self.repeat, -1))


def build(norm, biased=True):
    """A block whose norm writes outliers; around centers other than zero, if it has a bias."""
    torch.manual_seed(0)
    block = Gated(norm, WIDTH, 8)
    if biased:
        block.b = nn.Linear(WIDTH, 8).requires_grad_(False)
    block.norm.weight.data = OUTLIERS.clone()
    if getattr(norm, "bias", None) is not None:
        block.norm.bias.data = CENTERS.clone()
    return block


def batches():
    return [random(3, 5, WIDTH, seed=1), random(2, 7, WIDTH, seed=2)]


def solved(block, notes, names=("a", "b"), **options):
    OutlierSuppression(**options).solve_block(block, Sweep(block, batches(), list(names)), notes)
    return block


def inputs_of(block, norm="norm"):
    return torch.cat([block.get_submodule(norm)(x).reshape(-1, WIDTH) for x in batches()])


def test_the_scale_by_hand():
    assert suppressing(torch.tensor([8.0, 2.0, 0.0, 5.0]), 4.0).tolist() == [2.0, 1.0, 1.0, 1.25]


def test_ranges_by_hand():
    seen = InputRange(2, torch.device("cpu"))
    seen.update(torch.tensor([[1.0, -4.0], [5.0, -2.0]]))
    seen.update(torch.tensor([[3.0, -1.0]]))
    assert (seen.low.tolist(), seen.high.tolist(), seen.absmax.tolist()) == ([1.0, -4.0], [5.0, -1.0], [5.0, 4.0])
    seen.subtract(torch.tensor([3.0, -2.0]))
    assert (seen.low.tolist(), seen.high.tolist(), seen.absmax.tolist()) == ([-2.0, -2.0], [2.0, 1.0], [2.0, 2.0])
    seen.divide(torch.tensor([2.0, 1.0]))
    assert (seen.low.tolist(), seen.high.tolist(), seen.absmax.tolist()) == ([-1.0, -2.0], [1.0, 1.0], [1.0, 2.0])


def test_thresholds_by_hand():
    step = OutlierSuppression(steps=2)
    assert step.thresholds(torch.tensor([8.0, 2.0, 0.0])) == pytest.approx([8, 4, 2])
    assert step.thresholds(torch.tensor([SPAN, 1e-9])) == pytest.approx([SPAN, SPAN**0.5, 1])
    assert step.thresholds(torch.tensor([3.0, 3.0])) == [3.0]
    assert step.thresholds(torch.zeros(2)) == [1.0]


def test_a_shift_centers_every_channel_in_the_biases(notes):
    before = build(nn.LayerNorm(WIDTH))
    block = solved(copy.deepcopy(before), notes, steps=1)
    low, high = inputs_of(before).aminmax(dim=0)
    shift = (low + high) / 2
    scale = block.a.weight[0] / before.a.weight[0]
    torch.testing.assert_close(block.norm.bias, (CENTERS - shift) / scale)
    for name in ("a", "b"):
        old, new = before.get_submodule(name), block.get_submodule(name)
        torch.testing.assert_close(new.bias, old.bias + old.weight @ shift)
    low, high = inputs_of(block).aminmax(dim=0)
    torch.testing.assert_close(low, -high, rtol=1e-4, atol=1e-4)
    for x in batches():
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-3)
    assert ("note", "a, b: shifted", {"largest": pytest.approx(float(shift.abs().max()))}) in notes


def test_without_shift_biases_stay(notes):
    before = build(nn.LayerNorm(WIDTH))
    block = solved(copy.deepcopy(before), notes, shift=False)
    assert torch.equal(block.a.bias, before.a.bias) and torch.equal(block.b.bias, before.b.bias)
    for x in batches():
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("norm", "missing"), [(nn.RMSNorm(WIDTH), "norm, b"), (nn.LayerNorm(WIDTH), "b")])
def test_where_a_bias_is_missing_inputs_are_scaled_alone(notes, norm, missing):
    before = build(norm, biased=False)
    block = solved(copy.deepcopy(before), notes)
    assert notes[0] == ("note", f"a, b: not shifted, because {missing} has no bias", {})
    assert torch.equal(block.a.bias, before.a.bias)
    assert not torch.equal(block.a.weight, before.a.weight)
    for x in batches():
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-3)


def test_a_shift_does_not_pass_a_product_and_is_undone(notes):
    before = build(nn.LayerNorm(WIDTH))
    block = solved(copy.deepcopy(before), notes, names=["out"])
    message = "out: not shifted, because a shift of b does not reach them unchanged"
    [(kind, _, figures)] = [note for note in notes if note[1] == message]
    assert kind == "note" and figures["relative_error"] > 1e-3
    assert torch.equal(block.out.bias, before.out.bias)


@pytest.mark.parametrize("repeat", [1, 2])
def test_attention_passes_a_shift_of_its_values_on(notes, repeat):
    before = Attention(repeat)
    block = solved(copy.deepcopy(before), notes, names=["o"], steps=1)
    assert any(message == "o: shifted" for _, message, _ in notes)
    assert not torch.equal(block.o.bias, before.o.bias)
    read = []
    block.o.register_forward_pre_hook(lambda module, args: read.append(args[0].reshape(-1, WIDTH)))
    for x in batches():
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-4)
    low, high = torch.cat(read).aminmax(dim=0)
    torch.testing.assert_close(low, -high, rtol=1e-4, atol=1e-4)


def test_a_shift_is_in_both_biases():
    block = Attention()
    [link] = find_links(block, lambda module: module(random(2, 9, WIDTH)))
    assert (link.source, link.readers) == ("v", ("o",)) and without_bias(block, link) == []
    before = copy.deepcopy(block)
    shift = torch.arange(6.0)
    assert fold_shift(block, link, shift, lambda module: module(random(2, 9, WIDTH))).is_kept
    torch.testing.assert_close(block.v.bias, before.v.bias - shift)
    torch.testing.assert_close(block.o.bias, before.o.bias + before.o.weight @ shift)


def rounded(x, dim, static=False):
    """Round to int8 as a reader of the paper would: a scale per row, or one for all."""
    top = x.abs().max() if static else x.abs().amax(dim, keepdim=True)
    step = top / 127.5
    return (x / step).round().clamp(-128, 127) * step


@pytest.mark.parametrize("activation_scale", ["token", "static"])
def test_the_search_takes_the_threshold_with_the_least_error_of_the_block(notes, activation_scale):
    before = build(nn.RMSNorm(WIDTH), biased=False)
    static = activation_scale == "static"
    block = solved(copy.deepcopy(before), notes, names=["a", "b"], activation_scale=activation_scale)
    absmax, x = inputs_of(before).abs().amax(0), batches()[0]

    def error(threshold):
        scale = (absmax / threshold).clamp(min=1)
        h = before.norm(x) / scale
        top = (absmax / scale).max() / 127.5
        h = (h / top).round().clamp(-128, 127) * top if static else rounded(h, -1)
        a, b = (h @ rounded(layer.weight * scale, 1).T for layer in (before.a, before.b))
        found = x + before.out(torch.tanh(a + before.a.bias) * b)
        return float((found - before(x)).norm() / before(x).norm())

    top, low = float(absmax.max()), float(absmax.min())
    ratio = max(1 / 127, low / top)
    errors = {t: error(t) for t in (top * ratio ** (i / 20) for i in range(21))}
    [figures] = [figures for _, message, figures in notes if message == "a, b: the best of 21 thresholds"]
    assert figures["threshold"] == pytest.approx(min(errors, key=errors.__getitem__))
    assert figures["error"] == pytest.approx(min(errors.values()), rel=1e-3)
    assert figures["unscaled"] == pytest.approx(errors[top], rel=1e-3)
    assert figures["error"] < figures["unscaled"] and figures["range"] == pytest.approx(top)
    scale = (absmax / figures["threshold"]).clamp(min=1)
    torch.testing.assert_close(block.a.weight, before.a.weight * scale)


def test_the_trials_leave_the_block_as_it_was(notes):
    block = build(nn.RMSNorm(WIDTH), biased=False)
    modules = linears(block)
    solved(block, notes, steps=2, names=["a", "b", "out"], weights="int4", group_size=2)
    assert linears(block) == modules


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            {"weights": "int8", "group_size": "channel"},
            "it needs activations: int8, activation_scale: token; write the",
        ),
        (
            {"weights": "int8", "group_size": "channel", "activations": "int8", "activation_scale": "static"},
            "it needs activations: int8, activation_scale: token; write the same options in both passes",
        ),
        ({"weights": "int4", "activations": "int8"}, "it needs weights: int8, group_size: channel, symmetric: true"),
    ],
)
def test_a_pass_that_rounds_otherwise_is_an_error(recipe, later, message):
    with pytest.raises(compress.CompressError, match=message):
        compress.plan(recipe(OutlierSuppression(), compress.RTN(**later), save={"format": "native"}))


def test_no_steps_are_an_error():
    with pytest.raises(compress.CompressError, match="greater than or equal to 1"):
        OutlierSuppression(steps=0)


@pytest.mark.parametrize("family", ["opt", "gpt2"])
def test_models_with_biases_are_shifted_in_the_blocks(tiny, ids, family):
    model = tiny(family)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    tokens = ids()
    with torch.no_grad():
        wanted = model(input_ids=tokens).logits
    int8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}
    found = compress.apply(model, [OutlierSuppression(steps=2), compress.RTN(**int8)], tokens)
    changed = [
        n for n, t in found.state_dict().items() if n in before and n.endswith("bias") and not torch.equal(t, before[n])
    ]
    assert any("norm" in name or "ln_" in name for name in changed)
    with torch.no_grad():
        logits = found(input_ids=tokens).logits
    assert float((logits - wanted).norm() / wanted.norm()) < 0.05
