"""Negative scales of integers: found where the longer tail needs the additional level, stored, and read by all readers."""

import copy

import pytest
import torch
from tolerances import LOGITS

import compress
from compress.checkpoint.formats import FORMATS
from compress.checkpoint.formats.base import Format
from compress.numerics.quant.codes import fit, quantize
from compress.numerics.quant.grids import GRIDS

READ = [
    ("native", {"weights": "int3", "group_size": 32}),
    ("compressed-tensors", {"weights": "int4", "group_size": 32}),
    ("compressed-tensors", {"weights": "int4", "group_size": "channel"}),
    ("gptq", {"weights": "int4", "group_size": 32}),
    ("awq", {"weights": "int4", "group_size": 32}),
    ("gguf", {"weights": "int4", "group_size": 32}),
    ("gguf", {"weights": "int8", "group_size": 32}),
    ("dense", {"weights": "int4", "group_size": 32}),
]


@pytest.mark.parametrize("search", ["mse", "importance"])
def test_the_longer_tail_has_the_additional_level(search):
    below = torch.tensor([[-8.0, -5.0, 3.0, 7.0]]) / 4
    for weight, sign in ((below, 1), (-below, -1)):
        given = {"importance": torch.ones(4)} if search == "importance" else {}
        scale, _ = fit(weight, GRIDS["int4"], "channel", True, search, signed=True, **given)
        codes = GRIDS["int4"].encode(weight, scale, None)
        assert scale.item() == pytest.approx(sign / 4, rel=0.02)
        assert codes.tolist() == [[-8, -5, 3, 7]]
        plain, _ = fit(weight, GRIDS["int4"], "channel", True, search, **given)
        assert plain.item() > 0


@pytest.mark.parametrize("name", ["int2", "int3", "int4", "int8"])
@pytest.mark.parametrize("group_size", [32, 48, "channel", "tensor"])
def test_the_error_is_never_larger_than_with_positive_scales(name, group_size):
    weight = torch.randn(6, 96, generator=torch.Generator().manual_seed(1)) ** 3

    def error(signed):
        found = quantize(weight, GRIDS[name], group_size, search="mse", signed=signed)
        return (found.dense() - weight).abs().pow(2.4).sum(), (found.scale < 0).any()

    (signed, some), (positive, none) = error(True), error(False)
    assert signed <= positive and not none
    assert group_size == "tensor" or name == "int8" or some


def test_grids_with_zero_points_or_without_integers_are_not_concerned():
    weight = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    for name in ("nf4", "fp8_e4m3", "mxfp4", "uint4"):
        size = GRIDS[name].group_size or 32
        one, other = (quantize(weight, GRIDS[name], size, name != "uint4", "mse", signed=s) for s in (False, True))
        assert torch.equal(one.scale, other.scale) and torch.equal(one.codes, other.codes)
    one, other = (quantize(weight, GRIDS["int4"], 32, False, "mse", signed=s) for s in (False, True))
    assert torch.equal(one.scale, other.scale)


@pytest.mark.few(3)
@pytest.mark.parametrize(("format_", "options"), READ)
def test_every_format_that_takes_them_reads_them_back(pico, texts, tmp_path, format_, options):
    if format_ == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    recipe = compress.Recipe(
        model=pico,
        calibration=compress.Calibration(source="embedded", sequences=4, length=32),
        passes=[compress.GPTQ(scale="mse", act_order="static", **options)],
        save=compress.Save(format=format_),
        eval=None,
    )
    report = compress.run(recipe, tmp_path).report
    verified = report["verified"]
    assert verified["own"] <= LOGITS
    assert verified["skipped"] or verified["transformers"] <= LOGITS
    assert FORMATS[format_].negative_scales
    if format_ not in ("gguf", "dense"):
        assert negative(compress.load(tmp_path)[0]) > 0


def test_a_format_takes_none_until_it_says_so(monkeypatch, pico_model):
    assert not Format.negative_scales and not FORMATS["bitsandbytes"].negative_scales

    def rounded(**options):
        step = compress.RTN(weights="int3", group_size=32, scale="mse", **options)
        return negative(compress.apply(copy.deepcopy(pico_model), step))

    assert rounded() > 0 and rounded(signed_scales=False) == 0
    monkeypatch.setattr(type(FORMATS["native"]), "negative_scales", False)
    assert rounded() == 0


def negative(model):
    """The number of negative scales in a model."""
    return sum(
        int((tensor < 0).sum()) for name, tensor in model.state_dict().items() if name.endswith((".scale", "_scale"))
    )
