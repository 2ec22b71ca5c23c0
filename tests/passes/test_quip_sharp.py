"""QuIP#: exact points, the sweep in loops, both rotations, better than grids, files, learned scales, and bad input."""

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import NumericError, TargetError
from compress.layers.parts.lattice import LatticePart, LatticeScheme
from compress.layers.parts.scaled_rows import rotated_back, rotated_rows
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.lattice import GAUSSIAN, decode, nearest
from compress.passes.contract.observers import UnitGram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.quip_sharp import QuipSharp

PLAIN = {"normalize_tokens": False}


def dense(solution):
    """The weight for inputs that are not rotated."""
    (part,), (turn,) = solution.weight, solution.transforms
    return turn.absorbed(part.dense(torch.float32))


def test_weights_that_are_points_stay_as_they_are(layer_of):
    codes = nearest(random(6 * 4, 8) * 1.2, 2)
    points = decode(codes, 2).view(6, 32)
    step = QuipSharp(**PLAIN)
    turn = step.solve(random(6, 32), seen_of(torch.eye(32)), layer_of()).transforms[0]
    weight = turn.absorbed(points * 0.3)  # rotated, it is the points again
    found = step.model_copy(update={"refine": 20}).solve(weight, seen_of(torch.eye(32)), layer_of())
    # the first scale is a guess; least squares and further rounds find 0.3 in most rows
    exact = (dense(found) - weight).norm(dim=1) < 1e-3 * weight.norm(dim=1)
    assert exact.float().mean() > 0.5


def by_loops(weight, hessian, scale):
    """BlockLDLQ in float64: H = L D L^T by blocks of 8, and feedback of all errors so far."""
    width = weight.shape[1]
    lower = torch.linalg.cholesky(hessian.double().flip(0, 1)).flip(0, 1)  # upper: H = U U^T
    blocks = [lower[i : i + 8, i : i + 8] for i in range(0, width, 8)]
    unit = lower @ torch.linalg.inv(torch.block_diag(*blocks))  # identity on the block diagonal
    found, work = torch.zeros_like(weight.double()), weight.double()
    for at in range(0, width, 8):
        here = slice(at, at + 8)
        wanted = work[:, here] + (work[:, :at] - found[:, :at]) @ unit[:at, here]
        found[:, here] = decode(nearest((wanted / scale[:, None]).float(), 2), 2).double() * scale[:, None]
    return found


def test_it_is_the_block_feedback_of_the_paper(layer_of):
    weight, rows = random(16, 48), correlated(300, 48)
    step = QuipSharp(**PLAIN, refine=0)
    seen = seen_of(rows)
    found = step.solve(weight, seen, layer_of())
    turn, (part,) = found.transforms[0], found.weight
    hessian = turn(turn(seen.shrunk(step.regularization)).T.contiguous())
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(48)
    turned = turn(weight)
    scale = (turned.square().mean(1).sqrt() * GAUSSIAN[2]).double()
    torch.testing.assert_close(part.scale.double(), scale, rtol=1e-5, atol=0)
    wanted = by_loops(turned, hessian, scale)
    near = (part.dense(torch.float32) - wanted.float()).abs() < 1e-3
    assert near.float().mean() > 0.98  # a tie between points is decided by the last digit


@pytest.mark.parametrize("rotate", ["inputs", "both"])
def test_the_function_is_that_of_the_rotated_weight(layer_of, rotate):
    rows, weight = correlated(400, 48), random(32, 48)
    found = QuipSharp(**PLAIN, bits=4, rotate=rotate).solve(weight, seen_of(rows), layer_of())
    (part,), (turn,) = found.weight, found.transforms
    assert (part.signs is None) == (rotate == "inputs") and (part.free_scale is None) == (rotate == "both")
    y = turn(rows) @ part.dense(torch.float32).T
    torch.testing.assert_close(y, rows @ dense(found).T, rtol=1e-3, atol=1e-2)
    assert float((y - rows @ weight.T).norm() / (rows @ weight.T).norm()) < 0.05


def test_rotated_rows_come_back():
    weight, signs = random(24, 10), random(24).sign().to(torch.int8)
    turned = rotated_rows(weight, signs, 12)
    assert not torch.allclose(turned, weight)
    torch.testing.assert_close(turned.norm(), weight.norm())
    torch.testing.assert_close(rotated_back(turned, signs, 12), weight, rtol=1e-4, atol=1e-5)


def test_it_is_better_than_a_grid_of_more_bits_and_refining_helps(layer_of):
    rows, weight = random(900, 128) + random(900, 8, seed=1) @ random(8, 128, seed=2), random(64, 128) ** 3

    def error(found):
        return float(((found - weight) @ rows.T).norm())

    whole = error(dense(QuipSharp(**PLAIN).solve(weight, seen_of(rows), layer_of())))
    assert whole < error(dense(QuipSharp(**PLAIN, refine=0).solve(weight, seen_of(rows), layer_of())))
    grid = GPTQ(weights="int2", group_size=32).solve(weight, seen_of(rows), layer_of()).weight.dense()
    assert whole < 0.8 * error(grid)


@pytest.mark.parametrize("rotated", [None, 12])
@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_part_is_read_back_as_it_was_and_is_as_large_as_its_scheme_says(bits, rotated):
    codes = nearest(random(24 * 5, 8), bits).view(24, 5, -1)
    part = LatticePart.of(codes, random(24).abs(), bits, rotated, seed=3)
    scheme = LayerScheme(part.shape, (part.scheme,))
    assert LayerScheme.from_json(scheme.to_json()) == scheme and scheme.quantized
    assert scheme.free_scales == (rotated is None)
    tensors = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    assert sum(t.nbytes for t in tensors.values()) == scheme.size_bytes(torch.float32)
    ((found,), ()) = scheme.read(tensors)
    assert found.sha256() == part.sha256()
    ids = torch.tensor([23, 0])
    torch.testing.assert_close(found.rows_at(ids, torch.float32), part.dense(torch.float32)[ids])
    assert part.in_storage(torch.bfloat16).dtype == torch.bfloat16
    if rotated is not None:
        with pytest.raises(ValueError, match="weight_signs holds other numbers than 1 and -1"):
            scheme.read(tensors | {"weight_signs": torch.zeros(24, dtype=torch.int8)})


def test_descriptions_that_describe_nothing():
    with pytest.raises(ValueError, match="bits of lattice is 5, but it must be one of"):
        LayerScheme.from_json({"shape": [8, 8], "parts": [{"kind": "lattice", "bits": 5}]})
    assert "runs of 8 weights do not divide its 12 inputs" in LatticeScheme(2).refuses((8, 12))
    assert "order 12 does not fit its 16 outputs; use rotate: inputs" in LatticeScheme(2, 12).refuses((16, 16))


@pytest.mark.parametrize("options", [{}, {"rotate": "both", "bits": 3}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    learned = () if options else (compress.Distill(train=["scales"], steps=2, batch=2),)
    asked = recipe(QuipSharp(**options), *learned, save={"format": "native"})
    report = compress.run(asked, tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]


def test_bad_input(recipe, layer_of):
    for options, message in (({"bits": 5}, "bits"), ({"rotate": "outputs"}, "rotate"), ({"refine": -1}, "refine")):
        with pytest.raises(OptionError, match=message):
            QuipSharp(**options)
    assert "runs of 8 weights do not divide its 36 inputs" in QuipSharp().effects(LayerScheme((64, 36))).refusal
    # 8 * 23: the largest order that divides it is 8
    assert "order 16 or more divides its 184 inputs" in QuipSharp().effects(LayerScheme((64, 184))).refusal
    assert (
        "order 16 or more divides its 184 outputs" in QuipSharp(rotate="both").effects(LayerScheme((184, 64))).refusal
    )
    with pytest.raises(NumericError, match="no calibration token reached this layer"):
        QuipSharp().solve(random(8, 16), UnitGram(16, torch.device("cpu")), layer_of())
    with pytest.raises(TargetError, match="format: native|format compressed-tensors"):
        compress.plan(recipe(QuipSharp(), save={"format": "compressed-tensors"}))
