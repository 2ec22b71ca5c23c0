"""LKD: zero loss where nothing was compressed, less error of the block where something was, codes and masks that stay."""

import copy
from typing import ClassVar

import pytest
import torch
from torch import nn

import compress
from compress import GPTQ, LKD, RTN, Distill, Wanda
from compress.errors import ModelError, TargetError
from compress.layers.linear import CompressedLinear
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.passes.contract.passes import BlockPass
from compress.passes.contract.processes import ALONE
from compress.passes.families.reconstruction import block_error, relative_square
from compress.train.loop import STATE
from compress.train.student import Student

FIRST = "model.layers.0.*"
RTN3 = {"weights": "int3", "group_size": 32}


@pytest.fixture(scope="module")
def ids(pico_ids):
    return pico_ids[:, :48]


def tuned(model, steps, ids, journal=None):
    return compress.apply(copy.deepcopy(model), steps, ids, batch=1, journal=journal or Journal())


def distance(model, original, ids, layer=1):
    with torch.no_grad():
        found, wanted = (m(input_ids=ids, output_hidden_states=True).hidden_states[layer] for m in (model, original))
    return float((found - wanted).norm() / wanted.norm())


def packed(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.codes is not None}


def record(journal, message):
    return [entry.figures for entry in journal.entries if entry.message == message]


class Untouched(BlockPass):
    """Works on a block and leaves it as it is."""

    paper: ClassVar[str] = "https://example.org/untouched"

    def solve_block(self, block, inputs, log):
        """Nothing."""


# The loss


def test_the_error_by_hand():
    """(1, 2) for (1, 1): ||(0, 1)||^2 / ||(1, 1)||^2 = 1/2."""
    found, wanted = torch.tensor([1.0, 2.0], requires_grad=True), torch.tensor([1.0, 1.0])
    loss = relative_square(found, wanted)
    loss.backward()
    assert loss.item() == 0.5 and found.grad.tolist() == [0.0, 1.0]


def test_the_error_of_a_block_is_over_all_its_batches():
    class Inputs:
        processes = ALONE

        def forward(self, block, batch):
            return block(torch.tensor([[3.0, 4.0], [0.0, 1.0]][batch]))

    targets = torch.tensor([[3.0, 3.0], [0.0, 0.0]])
    error = block_error(nn.Identity(), Inputs(), targets.__getitem__, range(2))
    assert error == pytest.approx((1 + 1) / 18)


def test_a_block_that_equals_its_original_is_left_alone(pico_model, ids):
    journal = Journal()
    before = {name: t.clone() for name, t in pico_model.state_dict().items()}
    after = tuned(pico_model, [Untouched(), LKD(train=["norms"])], ids, journal)
    assert len(record(journal, "the block's output is unchanged; there is nothing to learn")) == 3
    assert not record(journal, "error of the block's output")
    dense = {n.replace(".parts.0.weight", ".weight"): t for n, t in after.state_dict().items()}
    assert before.keys() == dense.keys() and all(torch.equal(before[name], dense[name]) for name in before)


# What it gains, and what it leaves alone


@pytest.mark.parametrize(("train", "share"), [(["norms"], 0.995), (["scales", "norms"], 0.97)])
def test_the_output_is_nearer_to_what_it_was(train, share, pico_model, ids):
    plain = distance(tuned(pico_model, [RTN(**RTN3, targets=FIRST)], ids), pico_model, ids)
    step = LKD(train=train, epochs=6, learning_rate=3e-3, hold_out=0.0, targets=FIRST)
    assert distance(tuned(pico_model, [RTN(**RTN3, targets=FIRST), step], ids), pico_model, ids) < share * plain


def test_norms_alone_leave_scales_and_codes(pico_model, ids):
    plain = tuned(pico_model, [RTN(**RTN3)], ids)
    found = tuned(pico_model, [RTN(**RTN3), LKD(train="norms", learning_rate=0.01, hold_out=0)], ids)
    moved = [n for n, t in found.state_dict().items() if not torch.equal(t, plain.state_dict()[n])]
    assert moved and all("layernorm" in name for name in moved)


@pytest.mark.few(1)
@pytest.mark.parametrize("error", ["symmetric", "asymmetric"])
def test_codes_stay_and_the_same_run_gives_the_same_bits(error, pico_model, ids):
    steps = [RTN(**RTN3, symmetric=False), LKD(error=error, epochs=1, learning_rate=0.01)]
    first, second = (tuned(pico_model, steps, ids) for _ in range(2))
    plain = packed(tuned(pico_model, steps[:1], ids))
    for name, layer in packed(first).items():
        codes, before = layer.codes, plain[name].codes
        assert torch.equal(codes.words, before.words) and torch.equal(codes.zero, before.zero)
        assert torch.equal(codes.scale, second.get_submodule(name).codes.scale)
    assert any(not torch.equal(layer.codes.scale, plain[name].codes.scale) for name, layer in packed(first).items())


def test_pruned_weights_stay_zero_and_the_others_learn(pico_model, ids):
    prune = Wanda(pattern="2:4", targets=FIRST)
    step = LKD(train=["weights"], epochs=6, learning_rate=0.01, weight_rate=0.1, hold_out=0, targets=FIRST)
    pruned, found = tuned(pico_model, [prune], ids), tuned(pico_model, [prune, step], ids)
    assert distance(found, pico_model, ids) < 0.9 * distance(pruned, pico_model, ids)
    for name, layer in found.named_modules():
        if isinstance(layer, CompressedLinear):
            assert torch.equal(layer.mask, pruned.get_submodule(name).mask)
            assert bool((layer.weight[~layer.mask] == 0).all())


@pytest.mark.slow
def test_the_two_targets_agree_in_the_first_block_alone(pico_model, ids):
    """No error comes before it; after it, the activations of the uncompressed model differ more."""
    starts = []
    for error in ("symmetric", "asymmetric"):
        journal = Journal()
        tuned(pico_model, [RTN(**RTN3), LKD(error=error, train="norms", steps=1, learning_rate=1e-5)], ids, journal)
        starts.append([e.figures["start"] for e in journal.entries if "start" in e.figures])
    assert starts[0][0] == starts[1][0]
    assert all(near < far for near, far in zip(starts[0][1:], starts[1][1:], strict=True))


def test_where_nothing_is_gained_the_block_stays_as_it_was(pico_model, ids):
    journal = Journal()
    wild = LKD(train=["scales", "norms"], steps=1, learning_rate=0.9, warmup=0, hold_out=0)
    found, plain = tuned(pico_model, [RTN(**RTN3), wild], ids, journal), tuned(pico_model, [RTN(**RTN3)], ids)
    fallbacks = record(journal, "training did not reduce the error; the block is not changed")
    assert len(fallbacks) == 3 and all(f["start"] <= f["learned"] for f in fallbacks)
    assert all(torch.equal(t, plain.state_dict()[name]) for name, t in found.state_dict().items())


def test_scales_without_floats_stay_and_the_journal_says_so(pico_model, ids):
    journal = Journal()
    tuned(pico_model, [RTN(weights="mxfp4", targets=FIRST), LKD(epochs=1, targets=FIRST)], ids, journal)
    (entry,) = record(journal, "scales that are not stored as floats are not trained")
    assert entry == {"layers": 7, "first": "self_attn.q_proj"}


def test_a_bfloat16_model_learns_in_float32(pico_model, ids):
    model = copy.deepcopy(pico_model).bfloat16()
    plain = tuned(model, [RTN(**RTN3, targets=FIRST)], ids)
    step = LKD(train="norms", epochs=6, learning_rate=0.01, hold_out=0, targets=FIRST)
    found = tuned(model, [RTN(**RTN3, targets=FIRST), step], ids)
    assert {t.dtype for t in found.state_dict().values() if t.is_floating_point()} == {torch.bfloat16}
    assert distance(found.float(), pico_model, ids) < distance(plain.float(), pico_model, ids)


# In a run


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_run_killed_inside_of_a_block_ends_with_the_same_bytes(recipe, tmp_path, monkeypatch):
    asked = recipe(GPTQ(**RTN3), LKD(train="norms", steps=4, checkpoint_every=2, learning_rate=0.01))
    wanted = compress.run(asked, tmp_path / "whole").report
    real, taken = Student.adjust, []

    def dying(self):
        taken.append(self)
        if len(taken) == 8:
            raise Killed
        real(self)

    monkeypatch.setattr(Student, "adjust", dying)  # once in every step
    with pytest.raises(Killed):
        compress.run(asked, tmp_path / "killed")
    (state,) = (tmp_path / "killed" / ".compress" / "passes").glob(f"*/{STATE}")  # that of the first block is gone
    assert "layers-1" in state.parent.name
    monkeypatch.undo()
    found = compress.run(asked, tmp_path / "killed").report
    assert found["checkpoint_sha256"] == wanted["checkpoint_sha256"]
    entries = [[e for e in report["journal"]["entries"] if e["where"] != "evaluate"] for report in (found, wanted)]
    assert entries[0] == entries[1]  # but for the note that the base model was measured before
    assert not (tmp_path / "killed" / ".compress" / "passes").exists()


# Bad input


@pytest.mark.parametrize(
    "chain",
    [
        [LKD()],
        [RTN(targets="model.layers.1.*"), LKD(targets=FIRST)],
        [RTN(**RTN3), Distill(steps=1), LKD()],
    ],
)
def test_without_a_compressed_block_before_it_in_its_sweep_there_is_no_teacher(chain, pico_model, ids):
    where = (
        rf"passes\[{len(chain) - 1}\] lkd: it compares blocks before and after compression, but no pass right before it"
    )
    with pytest.raises(TargetError, match=where + r".*put it directly after the passes that compress them"):
        compress.apply(pico_model, chain, ids)


def test_kinds_that_apply_to_nothing_name_pass_and_block(pico_model, ids):
    with pytest.raises(TargetError, match=r"passes\[1\] lkd model.layers.0: train: biases matches no parameter"):
        compress.apply(pico_model, [RTN(**RTN3), LKD(train=["biases"])], ids)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"error": "both"}, "'symmetric' or 'asymmetric'"),
        ({"batch": 0}, "greater than or equal to 1"),
        ({"patience": 2, "hold_out": 0}, "patience needs held-out sequences"),
        ({"train": "scales and norms"}, "scales"),
    ],
)
def test_a_wrong_option_says_what_is_right(options, message):
    with pytest.raises(OptionError, match=message):
        LKD(**options)


# Blocks that an earlier sweep compressed


def test_behind_another_segment_the_blocks_learn_from_the_model_that_is_given(pico_model, ids):
    journal, original = Journal(), copy.deepcopy(pico_model)
    chain = [RTN(**RTN3), Distill(steps=1), LKD()]
    compress.apply(pico_model, chain, ids, batch=1, journal=journal, teacher=original)
    found = record(journal, "error of the block's output")
    assert found and all(figures["learned"] < figures["start"] for figures in found)


def test_a_model_with_other_blocks_or_states_is_no_original(pico_model, ids):
    other = copy.deepcopy(pico_model)
    other.model.embed_tokens.weight.data.neg_()
    first = compress.apply(copy.deepcopy(pico_model), RTN(**RTN3))
    with pytest.raises(ModelError, match=r"the states that enter the blocks differ by 200%"):
        compress.apply(copy.deepcopy(first), LKD(), ids, teacher=other)
    other = copy.deepcopy(pico_model)
    other.model.layers = other.model.layers[:2]
    with pytest.raises(ModelError, match="it has other blocks"):
        compress.apply(copy.deepcopy(first), LKD(), ids, teacher=other)
    with pytest.raises(TargetError, match=r"or give the uncompressed model \(teacher=...\)"):
        compress.apply(first, LKD(), ids)
