"""AWQ: one salient channel and one clipped group by hand, errors against the products themselves, functions kept."""

import copy

import numpy as np
import pytest
import torch
from draws import random
from gated import Gated, Inputs, TwoReaders
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import compress
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.scale import Scale
from compress.models.structure.links import Link
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.options import OptionError
from compress.passes.quantize import awq
from compress.passes.quantize.awq import AWQ, InputStatistics, Moments, diagonal_blocks, normalized, weight_mean

WIDTH, HIDDEN = 16, 24
CPU = torch.device("cpu")


def fed_by(rows):
    moments = Moments(rows.shape[1], CPU)
    moments.update(rows)
    return InputStatistics(lambda: moments)


def build(act=torch.tanh, kind=Gated):
    """A block whose norm has two salient channels."""
    torch.manual_seed(0)
    block = kind(nn.LayerNorm(WIDTH), WIDTH, HIDDEN, act)
    block.norm.weight[[3, 7]] = torch.tensor([30.0, 8.0])
    return block


@pytest.fixture
def batches():
    return [random(3, 25, WIDTH, seed=1), random(2, 30, WIDTH, seed=2)]


def rows_into(block, name, batches):
    found = []
    hook = block.get_submodule(name).register_forward_pre_hook(lambda m, args: found.append(args[0].flatten(0, 1)))
    for batch in batches:
        block(batch)
    hook.remove()
    return torch.cat(found)


def weight_of(block, name):
    return CompressedLinear.of(block.get_submodule(name)).weight


def rounded_error(step, rows, weight, aim, scale=None):
    """||Q(W s) (X / s) - aim||^2, by the products themselves."""
    scale = torch.ones(weight.shape[1]) if scale is None else scale
    found = quantize(weight * scale, step.grid, step.group_size, step.symmetric).dense()
    return float(((rows / scale) @ found.T - aim).square().sum())


# By hand


def test_one_salient_channel_decides_the_scale(notes):
    """The step is 1 because of a weight that is never used; the channel that matters is rounded from 0.4 to 0."""
    rows, weight = torch.tensor([[0.01, 0.0], [0.0, 100.0]]), torch.tensor([[7.5, 0.4]])
    step, statistics = AWQ(weights="int4", group_size="channel", duo=False), fed_by(rows)
    block = nn.ModuleDict({"x": nn.Linear(2, 1, bias=False).requires_grad_(False)})
    block["x"].weight.copy_(weight)
    scale = step.scale_of(block, {statistics: ["x"]}, ["x"], lambda s: s, notes)
    # s = (0.005, 50)^alpha / 0.5^alpha, so s_1 / s_0 = 10^(4 alpha). At alpha = 0.25 the step, 1 in units of the first
    # column, makes 0.4 * 10 a whole number: only 7.5, rounded to 7 or 8 as always, is still wrong.
    assert float(scale[1] / scale[0]) == pytest.approx(10, rel=1e-4)
    assert float(scale[0] * scale[1]) == pytest.approx(1)
    [(kind, message, figures)] = notes
    assert (kind, message) == ("note", "x: the best of 20 scales")
    assert (figures["formula"], figures["alpha"]) == ("inputs", 0.25)
    before, after = (0.5 * 0.01) ** 2 + (0.4 * 100) ** 2, (0.5 * 0.01) ** 2
    assert figures["less_error"] == pytest.approx(1 - (after / before) ** 0.5, rel=1e-3)


def test_one_outlier_that_is_hardly_used_is_clipped():
    """Steps of 8/7.5 make zeros of 0.5; half the range makes them 0.5333, and every share in between is worse."""
    weight, rows = torch.tensor([[8.0, 0.5, -0.5, 0.5]]), torch.diag(torch.tensor([1e-3, 1.0, 1.0, 1.0]))
    step, hessian = AWQ(group_size="channel"), fed_by(rows).hessian
    found = step.clipped(weight, hessian, diagonal_blocks(hessian, "channel"))
    assert found.tolist() == [[4.0, 0.5, -0.5, 0.5]]
    assert quantize(found, step.grid, "channel").dense()[0, 1] == pytest.approx(4 / 7.5)


def test_an_outlier_that_is_used_stays():
    weight, hessian = torch.tensor([[8.0, 0.5, -0.5, 0.5]]), torch.diag(torch.tensor([100.0, 1.0, 1.0, 1.0]))
    found = AWQ(group_size="channel").clipped(weight, hessian, diagonal_blocks(hessian, "channel"))
    assert torch.equal(found, weight)


def test_with_zero_points_both_ends_are_cut_by_the_same_share():
    weight, rows = torch.tensor([[8.0, 0.25, -1.0, 0.25]]), torch.diag(torch.tensor([1e-3, 1.0, 1e-3, 1.0]))
    step, hessian = AWQ(group_size="channel", symmetric=False), fed_by(rows).hessian
    found = step.clipped(weight, hessian, diagonal_blocks(hessian, "channel"))
    kept = float(found[0, 0]) / 8
    assert kept < 1 and found[0].tolist() == pytest.approx([8 * kept, 0.25, -kept, 0.25])
    # the best of the eleven: the step is 9/15 of the share, and 0.25 is rounded to a multiple of it
    shares = [1 - i / 20 for i in range(11)]
    assert kept == pytest.approx(min(shares, key=lambda k: abs(round(0.25 / (0.6 * k)) * 0.6 * k - 0.25)))


def test_normalized_scales_and_the_mean_weight():
    assert normalized(torch.tensor([4.0, 1.0, 0.25])).tolist() == [4.0, 1.0, 0.25]
    assert normalized(torch.tensor([8.0, 2.0])).tolist() == [2.0, 0.5]
    weights = [torch.tensor([[2.0, -1.0, 4.0]]), torch.tensor([[0.0, 1.0, 3.0]])]
    # shares of the largest in groups of 2, the last group short: (1, 1/2, 1) and (0, 1, 1)
    torch.testing.assert_close(weight_mean(weights, 2), torch.tensor([0.5, 0.75, 1.0]))


def test_diagonal_blocks_with_a_short_last_one():
    hessian = random(5, 5)
    found = diagonal_blocks(hessian, 2)
    assert found.shape == (3, 2, 2)
    assert torch.equal(found[1], hessian[2:4, 2:4])
    assert torch.equal(found[2], torch.tensor([[hessian[4, 4], 0], [0, 0]]))
    assert torch.equal(diagonal_blocks(hessian, "channel"), hessian[None])


def test_moments_are_those_of_all_rows_and_follow_the_scale():
    rows = random(50, 6)
    moments = Moments(6, CPU)
    for part in rows.split(20):
        moments.update(part)
    torch.testing.assert_close(moments.mean, rows.abs().mean(0))
    statistics, scale = InputStatistics(lambda: moments), random(6, seed=3).abs() + 0.5
    statistics.divide(scale)
    statistics.divide(scale)
    divided = rows / scale**2
    torch.testing.assert_close(statistics.mean, divided.abs().mean(0))
    torch.testing.assert_close(statistics.hessian, 2 / 50 * divided.T @ divided, rtol=1e-4, atol=1e-6)


# Against the products themselves


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("duo", [True, False])
def test_the_scale_is_the_best_of_all_that_were_tried(batches, notes, symmetric, duo):
    block = build()
    before, rows = copy.deepcopy(block), rows_into(block, "a", batches)
    step = AWQ(weights="int3", group_size=8, symmetric=symmetric, duo=duo, clip=False)
    step.solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    weights = [before.a.weight, before.b.weight]
    [moments] = Inputs(before, batches, ["a", "b"]).observe(Moments).values()  # ties are broken by the last bit
    trials = step.trials(moments.mean, weight_mean(weights, 8), lambda s: s)
    assert len(trials) == (40 if duo else 20)
    errors = [sum(rounded_error(step, rows, w, rows @ w.T, scale) for w in weights) for scale in trials.values()]
    best = min(range(len(errors)), key=errors.__getitem__)
    [(kind, _, figures)] = notes
    assert kind == "note" and (figures["formula"], figures["alpha"]) == list(trials)[best] and best > 0
    assert figures["less_error"] == pytest.approx(1 - (errors[best] / errors[0]) ** 0.5, rel=1e-3)
    torch.testing.assert_close(block.a.weight, before.a.weight * list(trials.values())[best])


@pytest.mark.parametrize("act", [torch.tanh, torch.relu])
@pytest.mark.parametrize("name", ["a", "out"])
@pytest.mark.parametrize("options", [{}, {"symmetric": False}, {"weights": "nf4"}, {"weights": "int3", "duo": False}])
def test_the_error_is_less_than_that_of_plain_rounding(batches, notes, act, name, options):
    """With a ReLU the last linear is linked to both before it, and the second scale reckons with the first."""
    block = build(act)
    before = copy.deepcopy(block)
    step, inputs = AWQ(group_size=8, **options), Inputs(block, batches, [name])
    assert len(inputs.links) == (2 if name == "out" and act is torch.relu else 1)
    step.solve_block(block, inputs, notes)
    rows, weight = rows_into(before, name, batches), weight_of(before, name)
    aim = rows @ weight.T
    plain = rounded_error(step, rows, weight, aim)
    assert rounded_error(step, rows_into(block, name, batches), weight_of(block, name), aim) < 0.98 * plain


@settings(max_examples=40)
@given(
    seed=st.integers(0, 1000),
    shift=st.sampled_from([0.0, 3.0]),
    weights=st.sampled_from(["int2", "int3", "int4", "nf4", "fp4_e2m1_pow2"]),
    symmetric=st.booleans(),
)
def test_no_row_is_clipped_to_its_harm(seed, shift, weights, symmetric):
    """Errors of groups add up when inputs have a mean, which the search within groups does not see."""
    step = AWQ(weights=weights, group_size=8, symmetric=symmetric or GRIDS[weights].symmetric_only)
    weight, rows = random(12, 36, seed=seed) ** 3, random(40, 36, seed=seed + 1) + shift
    statistics = fed_by(rows)
    found = step.clipped(weight, statistics.hessian, diagonal_blocks(statistics.hessian, 8))
    errors = [((step.rounded(w) - weight) @ rows.T).square().sum(1) for w in (weight, found)]
    assert (errors[1] <= errors[0] * (1 + 1e-4)).all()
    assert (found.abs() <= weight.abs()).all() and (found * weight >= 0).all()


def test_a_row_whose_clipped_groups_harm_each_other_stays(notes):
    """Alone, each of two groups gains by clipping; the inputs are such that the two errors then add up."""
    weight = torch.tensor([[8.0, 0.5, 8.0, 0.5]])
    step = AWQ(group_size=2)
    apart = torch.diag(torch.tensor([1e-3, 1.0, 1e-3, 1.0]))
    assert step.clipped(weight, apart, diagonal_blocks(apart, 2)).tolist() == [[4.0, 0.5, 4.0, 0.5]]
    together = apart.clone()
    together[1, 3] = together[3, 1] = -1.0  # what the two 0.5 become must only be the same: rounded to 0 they are
    found = step.clipped(weight, together, diagonal_blocks(together, 2))
    assert torch.equal(found, weight)


# Blocks


@pytest.mark.parametrize("act", [torch.tanh, torch.relu])
def test_scaling_alone_leaves_the_function_as_it_was(batches, notes, act):
    block = build(act)
    before = copy.deepcopy(block)
    AWQ(group_size=8, clip=False).solve_block(block, Inputs(block, batches, ["a", "b", "out"]), notes)
    assert {kind for kind, _, _ in notes} == {"note"}
    for x in batches:
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-2)  # outputs are some hundreds
    assert not torch.equal(block.norm.weight, before.norm.weight)
    assert not any(torch.equal(weight_of(block, name), weight_of(before, name)) for name in ("a", "b", "out"))


def test_columns_of_one_channel_share_their_scale():
    """As with key-value heads that several queries read."""
    link = Link("v", ("o",), torch.tensor([0, 1, 0, 1]), "linear")
    inputs, weights = torch.tensor([1.0, 9.0, 4.0, 2.0]), torch.ones(4)
    trials = AWQ().trials(link.equalize(inputs), weights, link.equalize)
    assert all(torch.equal(scale, link.equalize(scale)) for scale in trials.values())
    assert trials["inputs", 0.5].tolist() == pytest.approx([(2 / 3) ** 0.5, 1.5**0.5, (2 / 3) ** 0.5, 1.5**0.5])


def test_linears_that_nothing_is_linked_to_are_left_alone_and_noted(batches, notes):
    block = build(kind=TwoReaders)
    before = copy.deepcopy(block)
    AWQ(group_size=8, clip=False).solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    assert notes == [("note", "a, b: no module before them can absorb a scale, so they are not scaled", {})]
    assert all(torch.equal(t, before.state_dict()[n]) for n, t in block.state_dict().items())


def test_linears_that_nothing_is_linked_to_divide_their_inputs_on_request(batches, notes):
    block = build(kind=TwoReaders)
    before = copy.deepcopy(block)
    step = AWQ(group_size=8, unlinked="scale", clip=False)
    step.solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    scale = block.a.transform_of(Scale).scale
    assert torch.equal(scale, block.b.transform_of(Scale).scale) and not torch.equal(scale, torch.ones(WIDTH))
    torch.testing.assert_close(block.a.weight, before.a.weight * scale)
    for x in batches:
        torch.testing.assert_close(block(x), before(x), rtol=1e-4, atol=1e-2)
    rows = rows_into(before, "a", batches)
    aims = {name: rows @ weight_of(before, name).T for name in "ab"}
    plain = sum(rounded_error(step, rows, weight_of(before, name), aims[name]) for name in "ab")
    assert sum(rounded_error(step, rows / scale, weight_of(block, name), aims[name]) for name in "ab") < plain


def test_a_fold_that_would_change_the_output_is_undone_and_noted(batches, notes):
    block = build(kind=TwoReaders)
    before = {name: tensor.clone() for name, tensor in block.state_dict().items()}
    inputs = Inputs(block, batches, ["a", "b"])
    inputs.links = [Link("norm", ("a", "b"), torch.arange(WIDTH), "norm")]  # which find_links would not give
    AWQ(group_size=8, clip=False).solve_block(block, inputs, notes)
    assert all(torch.equal(tensor, before[name]) for name, tensor in block.state_dict().items())
    kind, message, figures = notes[-1]
    assert (kind, message) == (
        "fallback",
        "a, b: folding the scale into norm changed the block's output, so it was undone",
    )
    assert figures["relative_error"] > 0.01


def test_linears_that_no_token_reached_are_left_alone_and_noted(notes):
    block = build()
    before = copy.deepcopy(block)
    AWQ(group_size=8).solve_block(block, Inputs(block, [], ["a", "b"]), notes)
    assert notes == [
        ("fallback", "a, b: no calibration token reached them, so they are not scaled", {}),
        ("fallback", "a, b: no calibration token reached them, so they are not clipped", {}),
    ]
    assert all(torch.equal(t, before.state_dict()[n]) for n, t in block.state_dict().items())


def test_only_the_chosen_linears_are_clipped_and_count(batches, notes):
    block, both = build(), build()
    before = copy.deepcopy(block)
    step = AWQ(weights="int2", group_size=8)
    step.solve_block(block, Inputs(block, batches, ["a"]), notes)
    step.solve_block(both, Inputs(both, batches, ["a", "b"]), notes)
    (_, _, one), (_, _, two) = notes
    assert one["less_error"] != two["less_error"]
    scale = before.norm.weight / block.norm.weight
    torch.testing.assert_close(block.b.weight, before.b.weight * scale)  # scaled along, and no more
    assert float((block.a.weight - before.a.weight * scale).abs().max()) > 0.1


def test_masks_stay(batches, notes):
    block = build()
    mask = random(HIDDEN, WIDTH, seed=4) > 0
    block.a = CompressedLinear.of(block.a)
    block.a.put(block.a.weight * mask, mask)
    AWQ(group_size=8, symmetric=False).solve_block(block, Inputs(block, batches, ["a", "b"]), notes)
    assert torch.equal(block.a.mask, mask)
    assert torch.equal(block.a.weight != 0, mask)


def test_channels_that_were_always_zero_count_as_the_quietest():
    step = AWQ(duo=False)
    trials = step.trials(torch.tensor([0.0, 4.0, 0.25]), torch.ones(3), lambda s: s)
    assert trials["inputs", 0.5].tolist() == pytest.approx([0.5, 2.0, 0.5])
    silent = step.trials(torch.zeros(3), torch.ones(3), lambda s: s)
    assert all(torch.equal(scale, torch.ones(3)) for scale in silent.values())


def test_no_more_than_a_chunk_of_rows_is_rounded_at_once(batches, notes, monkeypatch):
    """And the result is that of whole weights."""
    step = AWQ(group_size=8, symmetric=False)
    whole = build()
    step.solve_block(whole, Inputs(whole, batches, ["a", "b", "out"]), notes)
    sizes = []
    original = awq.quantize
    monkeypatch.setattr(awq, "quantize", lambda w, *rest: sizes.append(w.numel()) or original(w, *rest))
    monkeypatch.setattr(awq, "CHUNK", 5 * HIDDEN)
    chunked = build()
    step.solve_block(chunked, Inputs(chunked, batches, ["a", "b", "out"]), notes)
    assert set(sizes) == {7 * WIDTH, 3 * WIDTH, 5 * HIDDEN, HIDDEN}  # of 24 rows: 7, 7, 7, 3; of 16: 5, 5, 5, 1
    for name in ("a", "b", "out"):
        torch.testing.assert_close(weight_of(chunked, name), weight_of(whole, name))


def test_a_few_rows_choose_the_finalists_and_all_rows_decide(monkeypatch):
    rows, weight = random(60, WIDTH), random(64, WIDTH, seed=5)
    step, statistics = AWQ(group_size=8), fed_by(rows)
    scales = list(step.trials(statistics.mean, weight_mean([weight], 8), lambda s: s).values())
    monkeypatch.setattr(awq, "SKETCH", 16)
    seen = []
    original = AWQ.rounded
    monkeypatch.setattr(AWQ, "rounded", lambda self, w: seen.append(len(w)) or original(self, w))
    best, error, unscaled = step.best(scales, {statistics: [weight]})
    assert seen == [16] * 40 + [64] * 3
    assert error / 2 == pytest.approx(rounded_error(step, rows, weight, rows @ weight.T, scales[best]), rel=1e-3)
    assert unscaled / 2 == pytest.approx(rounded_error(step, rows, weight, rows @ weight.T), rel=1e-3)
    assert error <= unscaled


# Models and options


@pytest.mark.slow
@pytest.mark.few(1)
@torch.no_grad()
def test_rounding_after_it_is_closer_to_the_model(pico_model, pico_ids, texts):
    held_out = torch.from_numpy(np.load(texts["test"]).astype(np.int64))
    wanted = pico_model(held_out).logits.log_softmax(-1)
    rounding = compress.PASSES["rtn"](weights="int3", group_size=32)

    def divergence(*before):
        model = compress.apply(copy.deepcopy(pico_model), [*before, rounding], pico_ids[:4])
        found = model(held_out).logits.log_softmax(-1)
        return float((wanted.exp() * (wanted - found)).sum(-1).mean())

    assert divergence(AWQ(weights="int3", group_size=32)) < 0.9 * divergence()


def test_one_range_for_all_rows_is_refused():
    with pytest.raises(OptionError, match="group_size: tensor has one range for all rows, which cannot be searched"):
        AWQ(group_size="tensor")


def test_its_grid_is_checked_as_in_quantizing_passes():
    with pytest.raises(OptionError, match="symmetric: false needs an integer grid; nf4 has no zero point"):
        AWQ(weights="nf4", symmetric=False)
    with pytest.raises(OptionError, match="write 16, or leave group_size out"):
        AWQ(weights="nvfp4", group_size=64)
    assert AWQ(weights="nvfp4").group_size == 16
    with pytest.raises(OptionError, match="'leave' or 'scale'"):
        AWQ(unlinked="fold")


def test_it_comes_before_anything_is_quantized():
    assert AWQ.never_after == {"quantized", "cache_quantized"}
    with pytest.raises(compress.errors.RecipeError, match="quantized"):
        compress.Recipe(model="m", passes=[compress.PASSES["rtn"](), AWQ()])


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (
            [],
            r"^passes\[0\] awq: only rescales weights; add a quantizing pass after it, such as gptq$",
        ),
        ([compress.Wanda()], r"^passes\[0\] awq: only rescales weights; add a quantizing pass"),
        (
            [compress.RTN(weights="int8", group_size=32)],
            r"passes\[1\] rtn does not do what it is prepared for: it needs "
            r"weights: int4, group_size: 32, symmetric: true; write the same options in both passes",
        ),
        ([compress.RTN(group_size=16)], "does not do what it is prepared for"),
        ([compress.RTN(group_size=32, symmetric=False)], "does not do what it is prepared for"),
        (
            [compress.RTN(group_size=32, ignore="*.up_proj")],
            r"awq: model\.layers\.0\.mlp\.up_proj: only rescales weights; add a quantizing pass after it, such as gptq, "
            "or leave the layer out with ignore",
        ),
        (
            [compress.RTN(group_size=32, overrides={"*.o_proj": {"weights": "int8"}})],
            r"o_proj: passes\[1\] rtn does not",
        ),
    ],
)
def test_a_preparation_without_its_rounding_is_an_error_before_any_work(later, message, recipe, pico_model, pico_ids):
    chain = [AWQ(group_size=32), *later]
    with pytest.raises(compress.CompressError, match=message):
        compress.apply(pico_model, chain, pico_ids)
    with pytest.raises(compress.CompressError, match=message.removeprefix("^")):
        compress.plan(recipe(*chain))


def test_the_rounding_may_be_another_passs_and_of_some_layers(recipe):
    exact = {"weights": "int4", "group_size": 32}
    compress.plan(recipe(AWQ(**exact), compress.SparseGPT(pattern="2:4", **exact)))
    compress.plan(recipe(AWQ(**exact), compress.OWQ(**exact), save={"format": "native"}))
    rest = compress.RTN(overrides={"*.down_proj": {"weights": "none"}}, **exact)
    compress.plan(recipe(AWQ(ignore="*.down_proj", **exact), rest))
