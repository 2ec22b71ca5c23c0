"""QTIP: exact walks, the sweep in loops, both rotations, better than a lattice, files, learned scales, and bad input."""

from functools import partial

import pytest
import torch
from draws import correlated, random, seen_of
from tolerances import LOGITS

import compress
from compress.errors import NumericError, TargetError
from compress.layers.parts.trellis import TrellisPart, TrellisScheme
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.gaussian_codes import CODES, best_scale, first_table, values_of
from compress.numerics.quant.trellis import Trellis, Viterbi, count_bytes, unpack
from compress.passes.contract.observers import UnitGram
from compress.passes.contract.options import OptionError
from compress.passes.quantize.qtip import QTIP
from compress.passes.quantize.quip_sharp import QuipSharp

PLAIN = {"normalize_tokens": False}
SMALL = {"states": 8, "tile_rows": 8, "tile_columns": 8}


def dense(solution):
    """The weight for inputs that are not rotated."""
    (part,), (turn,) = solution.weight, solution.transforms
    return turn.absorbed(part.dense(torch.float32))


def part_of(code="3inst", bits=2, rotated=None, shape=(16, 24)):
    """A part of random circles of bits, in tiles of 4 x 8."""
    scheme = TrellisScheme(bits, 10, code, 4, 8, rotated)
    count = shape[1] // 8 * scheme.tile_bytes
    draw = torch.Generator().manual_seed(0)
    tensors = {"codes": torch.randint(256, (shape[0] // 4, count), generator=draw, dtype=torch.uint8)}
    tensors["scale"] = random(shape[0]).abs()
    tensors["table"] = first_table() if code == "hyb" else None
    tensors["signs"] = None if rotated is None else random(shape[0], seed=1).sign().to(torch.int8)
    return TrellisPart(scheme, shape, tensors)


@pytest.mark.parametrize(("code", "each"), [*((code, 2) for code in CODES), ("3inst", 1), ("hyb", 1), ("hyb", 2.5)])
def test_a_weight_is_the_value_of_a_window_of_its_tiles_circle_of_bits(code, each):
    part = part_of(code, each)
    values = values_of(code, 10, part.table)
    found = part.dense(torch.float32)
    for row in range(16):
        for column in range(24):
            size = part.scheme.tile_bytes
            circle = part.codes[row // 4, column // 8 * size :][:size]
            bits = "".join(f"{byte:08b}" for byte in circle.tolist()) * 3
            at = row % 4 * 8 + column % 8
            step, place = divmod(at, values.shape[1])
            start = int(each * values.shape[1]) * step
            wanted = values[int(bits[start : start + 10], 2), place] * part.scale[row]
            assert float(found[row, column]) == float(wanted)


def by_loops(weight, hessian, scale, values, trellis):
    """BlockLDLQ in float64: H = L D L^T by blocks of 8 columns, and feedback of all errors so far to tiles of 8 x 8."""
    width = weight.shape[1]
    lower = torch.linalg.cholesky(hessian.double().flip(0, 1)).flip(0, 1)  # upper: H = U U^T
    blocks = [lower[i : i + 8, i : i + 8] for i in range(0, width, 8)]
    unit = lower @ torch.linalg.inv(torch.block_diag(*blocks))  # identity on the block diagonal
    found, work, search = torch.zeros_like(weight.double()), weight.double(), Viterbi(values, trellis)
    for at in range(0, width, 8):
        here = slice(at, at + 8)
        wanted = (work[:, here] + (work[:, :at] - found[:, :at]) @ unit[:at, here]) / scale[:, None]
        for row in range(0, len(weight), 8):
            walk = search.tail_biting(wanted[row : row + 8].float().reshape(1, 64))
            found[row : row + 8, here] = values[walk].reshape(8, 8).double()
        found[:, here] *= scale[:, None]
    return found


def test_it_is_the_block_feedback_of_the_paper(layer_of, monkeypatch):
    monkeypatch.setattr(QTIP, "improve", lambda self, found: None)  # scales stay those of the sweep
    weight, rows = random(16, 48), correlated(300, 48)
    seen = seen_of(rows)
    step = QTIP(**PLAIN, **SMALL)
    found = step.solve(weight, seen, layer_of())
    turn, (part,) = found.transforms[0], found.weight
    hessian = turn(turn(seen.shrunk(step.regularization)).T.contiguous())
    hessian += 0.01 * hessian.diagonal().mean() * torch.eye(48)
    turned, values = turn(weight), values_of("3inst", 8, None)
    scale = (turned.square().mean(1).sqrt() * best_scale(2, values)).double()
    torch.testing.assert_close(part.scale.double(), scale, rtol=1e-5, atol=0)
    wanted = by_loops(turned, hessian, scale, values, Trellis(8, 2))
    near = (part.dense(torch.float32) - wanted.float()).abs() < 1e-3
    assert near.float().mean() > 0.9  # walks of nearly equal errors are decided by the last digit


@pytest.mark.parametrize("rotate", ["inputs", "both"])
def test_the_function_is_that_of_the_rotated_weight(layer_of, rotate):
    rows, weight = correlated(400, 48), random(32, 48)
    found = QTIP(**PLAIN, **SMALL, bits=4, rotate=rotate).solve(weight, seen_of(rows), layer_of())
    (part,), (turn,) = found.weight, found.transforms
    assert (part.signs is None) == (rotate == "inputs") and (part.free_scale is None) == (rotate == "both")
    y = turn(rows) @ part.dense(torch.float32).T
    torch.testing.assert_close(y, rows @ dense(found).T, rtol=1e-3, atol=1e-2)
    assert float((y - rows @ weight.T).norm() / (rows @ weight.T).norm()) < 0.06


def test_it_is_better_than_a_lattice_of_as_many_bits_and_refining_helps(layer_of):
    rows, weight = random(900, 64) + random(900, 8, seed=1) @ random(8, 64, seed=2), random(64, 64) ** 3

    def error(step):
        found = dense(step(**PLAIN).solve(weight, seen_of(rows), layer_of()))
        return float(((found - weight) @ rows.T).norm())

    here = error(partial(QTIP, states=10))
    assert error(partial(QTIP, states=10, refine=1)) < here
    # tiles of fewer columns compensate more; the lattice's runs have 8 columns, too
    narrow = error(partial(QTIP, states=10, tile_rows=32, tile_columns=8))
    assert narrow < here and narrow < 0.95 * error(partial(QuipSharp, refine=0))


@pytest.mark.parametrize("rotated", [None, 8])
@pytest.mark.parametrize(("code", "bits"), [("3inst", 2), ("1mad", 3), ("hyb", 4), ("hyb", 1.5), ("3inst", 1)])
def test_a_part_is_read_back_as_it_was_and_is_as_large_as_its_scheme_says(code, bits, rotated):
    part = part_of(code, bits, rotated)
    scheme = LayerScheme(part.shape, (part.scheme,))
    assert LayerScheme.from_json(scheme.to_json()) == scheme and scheme.quantized
    assert scheme.free_scales == (rotated is None)
    tensors = {f"weight_{name}": tensor for name, tensor in part.tensors().items()}
    assert sum(t.nbytes for t in tensors.values()) == scheme.size_bytes(torch.float32)
    assert part.codes.nbytes == count_bytes(16 * 24, bits)
    ((found,), ()) = scheme.read(tensors)
    assert found.sha256() == part.sha256()
    ids = torch.tensor([15, 0, 6])
    torch.testing.assert_close(found.rows_at(ids, torch.float32), part.dense(torch.float32)[ids])
    assert part.in_storage(torch.bfloat16).dtype == torch.bfloat16
    if code == "hyb":
        with pytest.raises(ValueError, match="weight_table holds a number that is not finite"):
            scheme.read(tensors | {"weight_table": tensors["weight_table"] * torch.nan})


def test_every_circle_of_bits_is_a_weight():
    part = part_of()
    states = unpack(part.codes.reshape(-1, part.scheme.tile_bytes), part.scheme.trellis)
    assert int(states.max()) < 1024 and bool(
        part.dense(torch.float32).isfinite().all()
    )  # so tampered codes harm no one


def test_descriptions_that_describe_nothing():
    trellis = {"kind": "trellis", "bits": 2, "states": 12, "code": "3inst"}
    for changed, message in (
        ({"bits": 5}, "bits of trellis is 5, but it must be one of"),
        (
            {"bits": 1.5},
            "bits 1.5 does not suit code: 3inst, which has one weight a state; use code: hyb, or whole bits",
        ),
        ({"bits": 1.5, "code": "hyb", "tile_rows": 3, "tile_columns": 8}, "use a multiple of 16 weights"),
        ({"states": 17}, "states 17 does not suit 2 bits with code: 3inst; use 2 to 16"),
        ({"tile_rows": 3, "tile_columns": 3}, "a tile of 3 x 3 weights does not fill whole bytes"),
    ):
        with pytest.raises(ValueError, match=message):
            LayerScheme.from_json({"shape": [16, 16], "parts": [trellis | changed]})
    assert "tile_rows 16 does not divide its 24 outputs; use tile_rows: 1, 2, 3, 4, 6, 8" in TrellisScheme(
        2, 12, "3inst"
    ).refuses((24, 16))
    assert "order 12 does not fit its 16 outputs; use rotate: inputs" in TrellisScheme(
        2, 12, "3inst", rotated=12
    ).refuses((16, 16))


@pytest.mark.parametrize("options", [{}, {"rotate": "both", "bits": 3, "code": "hyb"}, {"bits": 1.5, "code": "hyb"}])
def test_a_run_and_its_checkpoint(recipe, tmp_path, options):
    learned = () if options else (compress.Distill(train=["scales"], steps=2, batch=2),)
    asked = recipe(QTIP(states=6, **options), *learned, save={"format": "native"})
    report = compress.run(asked, tmp_path, progress=False).report
    assert report["verified"]["own"] <= LOGITS
    assert report["size"]["tensor_bytes"] == report["predicted"]["tensor_bytes"]


def test_bad_input(recipe, layer_of):
    for options, message in (
        ({"bits": 5}, "bits"),
        ({"bits": 2.25}, "bits"),
        ({"bits": float("nan")}, "bits"),
        ({"bits": "two"}, "bits"),
        ({"bits": 2.5}, "bits 2.5 does not suit code: 3inst"),
        ({"rotate": "outputs"}, "rotate"),
        ({"refine": -1}, "refine"),
        ({"states": 3, "bits": 4}, "states 3 does not suit 4 bits with code: 3inst; use 4 to 16"),
        ({"states": 7, "bits": 4, "code": "hyb"}, "states 7 does not suit 4 bits with code: hyb; use 8 to 16"),
        ({"tile_rows": 5, "tile_columns": 5}, "does not fill whole bytes"),
    ):
        with pytest.raises(OptionError, match=message):
            QTIP(**options)
    assert "tile_columns 16 does not divide its 24 inputs" in QTIP().effects(LayerScheme((64, 24))).refusal
    # 8 * 23: the largest order that divides it is 8
    odd = QTIP(tile_columns=8)
    assert "order 16 or more divides its 184 inputs" in odd.effects(LayerScheme((64, 184))).refusal
    with pytest.raises(NumericError, match="no calibration token reached this layer"):
        QTIP().solve(random(16, 16), UnitGram(16, torch.device("cpu")), layer_of())
    with pytest.raises(TargetError, match="format: native|format compressed-tensors"):
        compress.plan(recipe(QTIP(), save={"format": "compressed-tensors"}))
