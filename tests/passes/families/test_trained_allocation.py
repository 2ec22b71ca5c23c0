"""Passes that prune while they train share out the sparsity as one-shot passes do; the model before training decides."""

import pytest

import compress
from compress import GMP, IterativePruning, Magnitude, TopKAST
from compress.errors import VerificationError
from compress.evaluation.sparsity import check_sparsity
from compress.layers.linear import CompressedLinear
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError

SHORT = {"steps": 4, "batch": 2, "warmup": 0}
STEPS = [
    GMP(pattern="layer", **SHORT),
    TopKAST(pattern="layer", **SHORT),
    IterativePruning(pattern="layer", rounds=2, **SHORT),
]
every_step = pytest.mark.parametrize("step", STEPS, ids=lambda step: step.key())


def allocating(step, value):
    return type(step).model_validate({**step.model_dump(mode="json"), "allocate": value})


def sparsities(model):
    """Share of removed weights by layer, and over all layers."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.mask is not None}
    removed = {n: int((~m.mask).sum()) for n, m in layers.items()}
    total = sum(m.mask.numel() for m in layers.values())
    return {n: removed[n] / layers[n].mask.numel() for n in layers}, sum(removed.values()) / total


@every_step
@pytest.mark.parametrize("written", ["global", "owl", "sensitivity"])
def test_the_mean_is_the_sparsity_of_the_pass_and_layers_differ(step, written, pico_model, pico_ids):
    journal = Journal()
    compress.apply(pico_model, [allocating(step, written)], pico_ids, journal=journal)
    found, mean = sparsities(pico_model)
    assert len(found) == 21 and mean == pytest.approx(0.5, abs=2e-3)
    assert max(found.values()) - min(found.values()) > 0.01
    (record,) = [
        entry.figures for entry in journal.entries if entry.message == f"sparsities of the layers by {written}"
    ]
    assert record["least"] == pytest.approx(min(found.values()), abs=2e-3)
    assert record["most"] == pytest.approx(max(found.values()), abs=2e-3)


def test_one_threshold_is_that_of_one_shot_pruning(pico, pico_model, pico_ids):
    """Without a step that moves a weight, the masks of GMP are those of magnitude pruning."""
    step = GMP(pattern="layer", allocate="global", learning_rate=1e-12, end=0.25, **SHORT)
    compress.apply(pico_model, [step], pico_ids)
    other, _ = compress.load(pico)
    compress.apply(other, [Magnitude(pattern="layer", allocate="global")], pico_ids)
    assert sparsities(pico_model)[0] == pytest.approx(sparsities(other)[0], abs=1e-3)


def test_a_run_counts_the_zeros_and_ends_as_apply_does(recipe, pico_model, pico_ids, tmp_path):
    step = GMP(pattern="layer", allocate="owl", **SHORT)
    report = compress.run(recipe(step, save={"format": "native"}), tmp_path).report
    shares = {layer["achieved"] for layer in report["sparsity"]["layers"].values()}
    assert report["sparsity"]["achieved"] == pytest.approx(0.5, abs=1e-3) and len(shares) > 3


def test_fewer_zeros_than_asked_for_are_an_error(pico_model):
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    step = GMP(pattern="layer", allocate="owl", **SHORT)
    with pytest.raises(VerificationError, match=r"sparsity 0\.5 was asked, but the mean of the layers is 0\.0"):
        check_sparsity([("passes[0]", step, names)], [], pico_model)


@pytest.mark.parametrize("kind", ["gmp", "sr_ste", "top_kast", "iterative_pruning"])
def test_a_pattern_with_a_sparsity_of_its_own_cannot_be_allocated(kind):
    with pytest.raises(OptionError, match="allocate: owl needs different sparsities per layer, but pattern 2:4 fixes"):
        compress.PASSES[kind](pattern="2:4", allocate="owl")
