"""QAT: codes that are those of training's forward pass, what it gains, learned steps, teachers, grids, bad options."""

import copy

import pytest
import torch
from torch import nn

import compress
from compress import QAT, RTN, Wanda
from compress.errors import NumericError, RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.numerics.quant.grids import GRIDS
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.train.loop import STATE
from compress.train.objective import LanguageLoss
from compress.train.student import Student

FAST = {"group_size": 32, "batch": 2, "learning_rate": 5e-3, "weight_rate": 0.1}


def packed(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.codes is not None}


def worked(model, steps, ids, journal=None):
    return compress.apply(copy.deepcopy(model), steps, ids, journal=journal or Journal())


def loss(model, ids):
    with torch.no_grad():
        logits = model(input_ids=ids).logits[:, :-1]
    return float(nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))


def test_the_codes_are_what_the_last_forward_pass_used(pico_model, pico_ids, monkeypatch):
    """What the model gives when it is looked at after the last step is what it gives with packed codes."""
    seen = []
    real = LanguageLoss.__call__

    def watching(self, model, ids, rows, *weights):
        if torch.is_grad_enabled():
            return real(self, model, ids, rows, *weights)
        seen.append(model(input_ids=pico_ids[:1], use_cache=False).logits)
        return torch.tensor(1 / len(seen))  # the last state is the best

    monkeypatch.setattr(LanguageLoss, "__call__", watching)
    step = QAT(weights="int3", symmetric=False, steps=3, hold_out=0.1, evaluate_every=3, **FAST)
    found = worked(pico_model, [step], pico_ids)
    with torch.no_grad():
        logits = found(input_ids=pico_ids[:1]).logits
    assert torch.allclose(logits, seen[-1], atol=1e-4) and len(packed(found)) == 21
    assert not torch.allclose(logits, seen[0], atol=0.1)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("int2", "binary")]


@pytest.mark.parametrize("weights", ["ternary", *OTHERS])
def test_it_learns_what_rounding_lost(weights, pico_model, pico_ids):
    """At least half of the loss on the text that it learns from comes back; a short training leaves codes alone."""
    start = loss(pico_model, pico_ids)
    rounded = loss(worked(pico_model, [RTN(weights=weights, group_size=32)], pico_ids), pico_ids)
    step = QAT(weights=weights, ce_weight=0, epochs=8, **FAST)
    found = worked(pico_model, [step], pico_ids)
    assert loss(found, pico_ids) < start + 0.5 * (rounded - start)
    assert {layer.codes.grid.name for layer in packed(found).values()} == {weights}


def test_learned_steps_are_scales_among_what_is_trained(pico_model, pico_ids):
    for train, learned in ((None, True), (("weights", "scales"), True), (("weights",), False)):
        journal = Journal()
        worked(pico_model, [QAT(weights="int3", train=train, steps=1, **FAST)], pico_ids, journal)
        figures = journal.entries[-1].figures
        scales = sum(m.weight.numel() // 32 for m in pico_model.model.layers.modules() if isinstance(m, nn.Linear))
        assert figures["scales"] == (scales if learned else 0) and figures["weights"] > 0
        assert bool(figures["norms"]) == (train is None)


def test_scales_without_floats_are_found_and_the_journal_says_so(pico_model, pico_ids):
    journal = Journal()
    options = {name: value for name, value in FAST.items() if name != "group_size"}
    worked(pico_model, [QAT(weights="mxfp4", steps=1, **options)], pico_ids, journal)
    (entry,) = [e for e in journal.entries if e.kind == "fallback"]
    assert "cannot be learned" in entry.message and entry.figures["layers"] == 21


def test_its_own_model_as_a_teacher_has_nothing_to_teach(pico_model, pico_ids):
    """In 8 bits a student is its teacher but for 1e-3; the text alone would move it far more."""
    journal = Journal()
    worked(pico_model, [QAT(weights="int8", group_size=32, ce_weight=0, steps=1)], pico_ids, journal)
    assert abs(journal.entries[-1].figures["first_loss"]) < 1e-3


def test_layers_may_differ_and_others_stay_dense(pico_model, pico_ids):
    overrides = {"*.down_proj": {"weights": "ternary"}, "*.up_proj": {"weights": "none"}}
    step = QAT(weights="int4", overrides=overrides, activations="int8", steps=1, **FAST)
    found = worked(pico_model, [step], pico_ids)
    assert all(layer.rounding.grid is GRIDS["int8"] for layer in packed(found).values())
    grids = {name.rpartition(".")[2]: layer.codes.grid.name for name, layer in packed(found).items()}
    assert grids["down_proj"] == "ternary" and grids["q_proj"] == "int4" and "up_proj" not in grids


def test_what_was_pruned_stays_pruned(pico_model, pico_ids):
    steps = [Wanda(pattern="2:4"), QAT(weights="int3", symmetric=False, steps=3, **FAST)]
    pruned = worked(pico_model, steps[:1], pico_ids)
    for name, layer in packed(worked(pico_model, steps, pico_ids)).items():
        mask = pruned.get_submodule(name).mask
        assert torch.equal(layer.mask, mask) and bool((layer.weight[~mask] == 0).all())


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(recipe, tmp_path, monkeypatch):
    step = QAT(weights="ternary", ce_weight=0.5, steps=5, checkpoint_every=2, **FAST)
    asked = recipe(step, save={"format": "native"})
    wanted = compress.run(asked, tmp_path / "whole").report
    real, taken = Student.adjust, []

    def dying(self):
        taken.append(self)
        if len(taken) == 4:
            raise Killed
        real(self)

    monkeypatch.setattr(Student, "adjust", dying)  # once in every step
    with pytest.raises(Killed):
        compress.run(asked, tmp_path / "killed")
    assert list((tmp_path / "killed" / ".compress" / "passes").glob(f"*/{STATE}"))
    monkeypatch.undo()
    found = compress.run(asked, tmp_path / "killed").report
    assert found["checkpoint_sha256"] == wanted["checkpoint_sha256"]
    assert wanted["size"]["bits_per_weight"] < 3.1  # 2 bits, and a scale in 32 for 32 weights


@pytest.mark.slow
def test_it_learns_without_data_from_what_the_model_writes(recipe, tmp_path, pico):
    own = compress.Calibration(source="self", sequences=4, length=24, batch=4)
    asked = recipe(QAT(weights="int2", ce_weight=0, steps=4, **FAST), calibration=own)
    record = compress.run(asked, tmp_path).report["training"]["passes[0] qat"]
    losses = [point["loss"] for point in record["curve"] if "loss" in point]
    assert len(losses) == 4 and losses[-1] < losses[0]


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": ["scales", "norms"]}, "train must include weights; to learn only scales and norms, use rtn"),
        ({"activations": "int8", "activation_scale": "static"}, "is not supported by this pass; use token"),
        ({"weights": "nvfp4"}, "must share a factor of their scales.*use mxfp4"),
        ({"weights": "ternary", "symmetric": False}, "ternary has no zero point"),
        ({"overrides": {"*.down_proj": {"learning_rate": 0.1}}}, "applies to the whole pass"),
        ({"weights": "int1"}, "grid 'int1' is not known; known: .*ternary, binary"),
        ({"scale": "mean"}, "write absmax, absmean, mse"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        QAT(**options)


def test_weights_without_a_zero_cannot_hold_what_is_pruned(pico_model, pico_ids):
    where = r"passes\[1\] (qat|rtn): .*q_proj is pruned by passes\[0\] wanda, but weights binary have no zero; use tern"
    for step in (QAT(weights="binary"), RTN(weights="binary")):
        with pytest.raises(TargetError, match=where):
            worked(pico_model, [Wanda(), step], pico_ids)


def test_quantized_layers_have_no_weights_to_train(pico_model, pico_ids):
    with pytest.raises(
        RecipeError, match=r"the same layers would be quantized twice, by passes\[0\] rtn and by this pass"
    ):
        worked(pico_model, [RTN(), QAT()], pico_ids)


def test_a_loss_that_is_no_number_names_pass_and_step(pico_model, pico_ids, monkeypatch):
    monkeypatch.setattr(LanguageLoss, "__call__", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(NumericError, match=r"passes\[0\] qat: the loss is nan in step 1"):
        compress.apply(pico_model, [QAT()], pico_ids)


def test_a_grid_brings_its_own_scale():
    assert (QAT(weights="ternary").scale, QAT(weights="int2").scale) == ("absmean", "absmax")
    assert QAT(weights="binary", scale="mse").scale == "mse"
    step = QAT(weights="int4", overrides={"*.q_proj": {"weights": "ternary"}})
    assert step.for_layer("model.layers.0.self_attn.q_proj").scale == "absmean"
    assert step.for_layer("model.layers.0.self_attn.k_proj").scale == "absmax"


def test_scales_may_be_negative_where_the_format_takes_them(pico_model, pico_ids):
    options = {"weights": "int3", "scale": "mse", "steps": 2, "train": ["weights"], **FAST}
    signs = {
        signed: any(
            bool((layer.codes.scale < 0).any())
            for layer in packed(worked(pico_model, [QAT(signed_scales=signed, **options)], pico_ids)).values()
        )
        for signed in (True, False)
    }
    assert signs == {True: True, False: False}
