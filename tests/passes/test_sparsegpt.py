"""SparseGPT: less output error than any mask without updates, every order, grid and option; all of it in one sweep."""

import pytest
import torch
from draws import correlated, random, seen_of

import compress
from compress.layers.linear import linears
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import fit
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.facts import ANY_LAYER
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.options import OptionError
from compress.passes.prune.sparsegpt import SparseGPT
from compress.passes.prune.wanda import Wanda

WIDTH = 40
PATTERNS = ["layer", "row", "2:4", "4x1", "4x2"]
ORDERS = ["none", "static"]


def error(found, weight, rows):
    return float(((found - weight) @ rows.T).norm())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_output_error_is_less_than_that_of_pruning_alone(layer_of, pattern, order):
    rows, weight = correlated(seed=5), random(16, WIDTH, seed=4)
    step = SparseGPT(pattern=pattern, act_order=order, prune_block=None if ":" in pattern else 20)
    found = step.solve(weight, seen_of(rows), layer_of())
    plain = Wanda(repair=0, pattern=pattern).solve(weight, seen_of(rows, InputNorm), layer_of())
    assert error(found.weight, weight, rows) < 0.85 * error(plain.weight, weight, rows)
    assert torch.equal(found.weight != 0, found.mask)
    assert not (found.weight[~found.mask].signbit()).any()
    assert int((~found.mask).sum()) == round(found.zeros.expected_sparsity * weight.numel())
    assert found.zeros.requested_sparsity == 0.5


def test_removing_one_weight_leaves_the_least_squares_optimum(layer_of):
    rows, weight = correlated(width=6), random(1, 6, seed=2)
    found = SparseGPT(sparsity=1 / 6, damping=1e-7, shrinkage=0, repair=0).solve(weight, seen_of(rows), layer_of())
    [gone] = (~found.mask[0]).nonzero()[:, 0].tolist()
    # the columns before it were compressed already and stay; the later ones are fitted to what is left of the output
    later, target = rows[:, gone + 1 :], rows[:, gone:] @ weight[0, gone:]
    wanted = torch.linalg.lstsq(later.double(), target.double()[:, None]).solution[:, 0]
    torch.testing.assert_close(found.weight[0, gone + 1 :].double(), wanted, rtol=1e-3, atol=1e-3)
    assert torch.equal(found.weight[0, :gone], weight[0, :gone])


@pytest.mark.parametrize("repair", [0, 2])
@pytest.mark.parametrize(("shrinkage", "kept"), [(0, 2.2), (0.5, 2.1)])
def test_shrinkage_by_hand(layer_of, shrinkage, kept, repair):
    rows = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 2.0]])  # X^T X = [[2, 1], [1, 5]]
    step = SparseGPT(damping=1e-7, shrinkage=shrinkage, repair=repair)
    found = step.solve(torch.tensor([[1.0, 2.0]]), seen_of(rows), layer_of())
    # the second weight takes over the first: 2 + (1 - shrinkage) * 1 * 1 / 5
    torch.testing.assert_close(found.weight, torch.tensor([[0.0, kept]]))


def test_the_score_is_the_error_of_removing_one_weight():
    rows, weight = correlated(tokens=400, width=8).double(), random(2, 8, seed=3)
    score = SparseGPT(damping=1e-7, shrinkage=0).score(weight, seen_of(rows.float()))
    target = rows @ weight[0].double()
    for j in range(8):
        others = [i for i in range(8) if i != j]
        rest = torch.linalg.lstsq(rows[:, others], target[:, None])
        lost = (rows[:, others] @ rest.solution[:, 0] - target).square().sum()
        assert float(score[0, j]) == pytest.approx(float(lost) * 2 / 400, rel=1e-2)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("size", [8, 16, 64, "channel", "tensor"])
@pytest.mark.parametrize("pattern", ["layer", "2:4", "4x2"])
def test_pruned_and_rounded_in_one_sweep(layer_of, pattern, size, order):
    rows, weight = correlated(seed=5), random(16, WIDTH, seed=4)
    step = SparseGPT(pattern=pattern, weights="int4", group_size=size, act_order=order)
    found = step.solve(weight, seen_of(rows), layer_of())
    dense = found.weight.dense()
    assert (dense[~found.mask] == 0).all()
    assert float((dense[found.mask] != 0).float().mean()) > 0.7
    plain = Wanda(repair=0, pattern=pattern).solve(weight, seen_of(rows, InputNorm), layer_of())
    assert error(dense, weight, rows) < error(plain.weight, weight, rows)
    assert (
        step.effects(ANY_LAYER).facts == {"masked", "quantized"}
        and step.effects(LayerScheme(weight.shape)).scheme.codes.group_size == size
    )


@pytest.mark.parametrize("weights", [name for name, grid in GRIDS.items() if grid.has_zero])
def test_every_grid_with_a_zero_is_rounded_to(layer_of, weights):
    rows, weight = correlated(seed=5), random(8, WIDTH, seed=4)
    found = SparseGPT(pattern="2:4", weights=weights).solve(weight, seen_of(rows), layer_of())
    dense = found.weight.dense()
    assert (dense[~found.mask] == 0).all()
    assert found.weight.grid is GRIDS[weights]


def test_fixed_scales_fit_what_is_likely_to_be_kept(layer_of):
    rows, weight = torch.eye(WIDTH), random(6, WIDTH, seed=1)
    found = SparseGPT(weights="int4", group_size="channel", pattern="2:4").solve(weight, seen_of(rows), layer_of())
    wanted, _ = fit(weight * found.mask, GRIDS["int4"], "channel", True)
    assert torch.equal(found.weight.scale, wanted)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("options", [{}, {"weights": "int4", "group_size": 8}], ids=["pruned", "rounded"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_what_was_pruned_stays_pruned(layer_of, pattern, options, order):
    rows, weight, mask = correlated(), random(8, WIDTH, seed=1), random(8, WIDTH, seed=2) > -0.2
    found = SparseGPT(pattern=pattern, act_order=order, **options).solve(weight * mask, seen_of(rows), layer_of(mask))
    dense = found.weight if isinstance(found.weight, torch.Tensor) else found.weight.dense()
    assert not (found.mask & ~mask).any() and (dense[~found.mask] == 0).all()


def test_a_tail_of_columns_stays_dense(layer_of, notes):
    rows, weight = correlated(width=38), random(4, 38)
    for order in ORDERS:
        found = SparseGPT(pattern="2:4", act_order=order).solve(weight, seen_of(rows), layer_of())
        assert found.mask[:, 36:].all() and (found.mask[:, :36].reshape(-1, 4).sum(1) == 2).all()
        assert found.zeros.expected_sparsity == 18 / 38
    assert notes[0][1] == "pattern 2:4 fits the first 4 rows and 36 columns; the rest stays dense"


def test_columns_that_were_always_zero_are_pruned_first(layer_of):
    rows = correlated()
    rows[:, [3, 30]] = 0
    found = SparseGPT(pattern="row").solve(random(8, WIDTH), seen_of(rows), layer_of())
    assert not found.mask[:, [3, 30]].any()
    none = SparseGPT(pattern="2:4").solve(random(8, WIDTH), seen_of(torch.zeros(4, WIDTH)), layer_of())
    assert (none.mask.reshape(-1, 4).sum(1) == 2).all()


def test_the_whole_model_with_rounding_keeps_its_pattern(tiny, ids):
    model = compress.apply(tiny("llama"), [SparseGPT(pattern="2:4", weights="int4", group_size=16)], ids())
    layers = [layer for name, layer in linears(model).items() if "layers" in name]
    assert len(layers) == 21
    for layer in layers:
        assert layer.quantized
        assert ((layer.weight != 0).reshape(-1, 4).sum(1) <= 2).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": 32}, "group_size has no effect without rounding; add weights: int4, or leave it out"),
        ({"symmetric": False}, "symmetric has no effect without rounding"),
        ({"weights": "binary"}, "binary has no zero, which pruned weights need"),
        ({"scale": "mse"}, "scale has no effect without rounding"),
        ({"weights": "int5.5"}, "grid 'int5.5' is not known"),
        ({"weights": "nf4", "symmetric": False}, "symmetric: false needs an integer grid; nf4 has no zero point"),
        ({"weights": "mxfp4", "group_size": 64}, "mxfp4 has one scale for 32 columns"),
        ({"pattern": "2:4", "prune_block": 64}, "prune_block has no effect with pattern 2:4"),
        ({"pattern": "4x3"}, "prune_block 128 is not a multiple of the 3 columns of 4x3"),
        ({"pattern": "3:6", "weights": "int4", "group_size": 16}, "group_size 16 is not a multiple of the 6 columns"),
        ({"prune_block": 0}, "greater than 0"),
        ({"damping": 0}, "greater than 0"),
        ({"act_order": "group"}, "input should be 'none' or 'static'"),
        ({"pattern": "2:4", "allocate": "owl"}, "but pattern 2:4 fixes the sparsity; use pattern: row or layer"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        SparseGPT(**options)


def test_without_a_grid_the_weight_stays_dense():
    assert SparseGPT().effects(LayerScheme((8, 64))).scheme.plain and SparseGPT().effects(ANY_LAYER).facts == {"masked"}
    assert SparseGPT(weights="mxfp4").effects(LayerScheme((8, 64))).scheme.codes.group_size == 32
