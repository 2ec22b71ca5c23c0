"""Notes of a plan, by hand and in the report."""

import json
import shutil

import pytest
import torch
from schemes import coded

import compress
from compress import GPTQ, RTN, Rotate, SparseGPT, Wanda, plan
from compress.checkpoint.formats import FORMATS
from compress.pipeline.notes import nominal_bits


def notes(asked, word):
    return [note for note in plan(asked).notes if word in note]


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        (coded("int4", 32), 4 + 16 / 32),
        (coded("int4", 48, shape=(6, 64)), 4 + 16 / 48),
        (coded("int3", 64, symmetric=False), 3 + (16 + 8) / 64),
        (coded("int4", "channel"), None),
    ],
)
def test_nominal_bits(scheme, bits):
    assert nominal_bits(scheme, torch.bfloat16) == (bits if bits is None else pytest.approx(bits, abs=1e-3))


def test_groups_that_do_not_divide_a_width_are_told(recipe):
    """128 = 2 * 48 + 32: stored in groups of 16, so three scales for one; 288 = 6 * 48 is as asked."""
    [note] = notes(recipe(RTN(group_size=48)), "bits per weight")
    # 4 bits, and a float32 scale for 16 columns instead of 48
    assert note.startswith("passes[0] rtn: in 18 layers 6.0")
    assert "bits per weight are stored instead of 4.67: group_size 48 does not divide 128 inputs, " in note
    assert (
        "format compressed-tensors stores groups of 16 with repeated scales; group sizes that divide 128: 16, 32, 64, "
        in note
    )
    assert notes(recipe(RTN(group_size=32)), "bits per weight") == []


def test_a_short_last_group_is_told(recipe):
    [note] = notes(recipe(RTN(group_size=100), save={"format": "native"}), "has only 28 of 128 inputs")
    assert "passes[0] rtn: in 18 layers" in note


def test_scales_that_stay_positive_are_told(recipe, monkeypatch):
    weights = {"weights": "int4", "group_size": 32}
    assert notes(recipe(GPTQ(**weights)), "stay positive") == []
    [note] = notes(recipe(GPTQ(**weights, activations="int8")), "stay positive")
    assert note.startswith("passes[0] gptq: scales stay positive: kernels of servers for rounded inputs")
    assert notes(recipe(GPTQ(**weights, activations="int8", scale="absmax")), "stay positive") == []
    monkeypatch.setattr(type(FORMATS["compressed-tensors"]), "negative_scales", False)
    [note] = notes(recipe(GPTQ(**weights)), "stay positive")
    assert note.endswith("not all readers of format compressed-tensors take negative ones")


def test_checkpoints_larger_than_the_model(recipe, pico, tmp_path):
    """With one block, a second weight of 1024 x 128 in 16 bits outweighs what int8 saves."""
    shutil.copytree(pico, tmp_path / "one", ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    (tmp_path / "one" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 1}))
    chain = Rotate(), RTN(weights="int8", group_size="channel")
    options = {"model": str(tmp_path / "one"), "eval": None, "dtype": "float32", "save": {"format": "native"}}
    [note] = notes(recipe(*chain, **options), "larger than the uncompressed model")
    assert "the head, which was tied to the embeddings, is stored separately" in note
    advised = RTN(weights="int8", group_size="channel", targets=["lm_head", "embed_tokens"])
    assert f"rtn: {{weights: int8, group_size: channel, targets: [{', '.join(advised.targets)}]}}" in note
    assert notes(recipe(*chain, advised, **options), "larger than the uncompressed model") == []
    assert notes(recipe(chain[1], **options), "larger than the uncompressed model") == []


@pytest.mark.parametrize(("sequences", "told"), [(8, True), (9, False)])
def test_text_of_fewer_tokens_than_inputs_is_told(recipe, sequences, told):
    """The widest layer has 288 inputs; only passes that solve by Gram matrices need as many tokens."""
    calibration = {"sequences": sequences, "length": 32}
    expected = "passes[0] sparsegpt: calibration has 256 tokens for layers of up to 288 inputs, so the fit may hold "
    expected += "for this text alone; use at least sequences: 9"
    assert notes(recipe(SparseGPT(), calibration=calibration), "inputs, so the fit") == ([expected] if told else [])
    assert notes(recipe(Wanda(repair=0), calibration=calibration), "inputs, so the fit") == []


def test_pruning_that_saves_no_bytes_is_told(recipe, tmp_path):
    chain = Wanda(sparsity=0.3), GPTQ(group_size=32)
    [note] = notes(recipe(*chain), "zeros save no bytes")
    assert note.startswith(
        "passes[0] wanda: its zeros save no bytes: format compressed-tensors stores zeros like other"
    )
    assert plan(recipe(*chain)).checkpoint_bytes == plan(recipe(chain[1])).checkpoint_bytes  # it is true
    little = Wanda(sparsity=0.1), GPTQ(group_size=32)  # a bitmask costs a bit, and a tenth of four bits is saved
    [note] = notes(recipe(*little, save={"format": "native"}), "zeros save no bytes")
    assert "prune more, or by a pattern such as 2:4" in note
    report = compress.run(recipe(*chain, save={"verify": "own"}), tmp_path).report
    assert any("zeros save no bytes" in e["message"] for e in report["journal"]["entries"])
    assert "zeros save no bytes" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("chain", [[Wanda(pattern="2:4"), GPTQ(group_size=32)], [SparseGPT(sparsity=0.5)]])
def test_pruning_that_pays_is_not(chain, recipe):
    asked = recipe(*chain, save={"format": "native"})
    assert notes(asked, "zeros save no bytes") == []
    rest = chain[1:]
    assert plan(asked).checkpoint_bytes < (plan(recipe(*rest)).checkpoint_bytes if rest else plan(asked).dense_bytes)
