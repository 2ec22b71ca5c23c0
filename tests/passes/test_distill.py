"""Distillation: its objective by hand, what it changes and what not, what it gains on the pico model, and resume."""

import copy
import json
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress.data.ids import token_ids
from compress.errors import CalibrationError, ModelError, NumericError, TargetError
from compress.layers.linear import CompressedLinear
from compress.models.kinds.batch import Examples
from compress.models.kinds.causal import CAUSAL
from compress.numerics.metrics import SoftTargets, divergence, soft_targets, token_weights
from compress.passes.contract.journal import Journal
from compress.passes.contract.options import OptionError
from compress.passes.train.distill import Distill
from compress.train.loop import STATE
from compress.train.objective import LanguageLoss, evenly_spaced_pairs, relative_error
from compress.train.teacher import OnlineTeacher, soft_targets_of_logits

RTN3 = {"weights": "int3", "group_size": 32}


@pytest.fixture(scope="module")
def text(pico):
    """(train, other): ids of the embedded text, [16, 64] and [8, 64]."""
    tokenizer = AutoTokenizer.from_pretrained(pico)
    train = token_ids("embedded", "calibration", tokenizer, 16, 64, seed=0)
    return train, token_ids("embedded", "test", tokenizer, 8, 64, seed=0)


def kl(model, teacher, ids, top_k=None):
    """Mean forward KL over all tokens."""
    with torch.no_grad():
        logits = [m(input_ids=ids).logits.flatten(0, 1) for m in (teacher, model)]
    return float(divergence("forward_kl", logits[1], soft_targets(logits[0], 1.0, top_k), 1.0).mean())


@pytest.fixture
def teacher(pico):
    return AutoModelForCausalLM.from_pretrained(pico).eval()


def packed(model):
    return {n: m for n, m in model.named_modules() if isinstance(m, CompressedLinear) and m.codes is not None}


# The objective


class Answers(nn.Module):
    """A model whose logits are given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(logits=self.logits)


@pytest.mark.parametrize("ce_weight", [0.0, 0.25, 1.0])
def test_the_loss_by_hand(ce_weight):
    """Two tokens of three: p = (.5, .3, .2) for both, q = (.25, .25, .5); the text goes on with token 2, q = .5."""
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.25, 0.25, 0.5])
    model = Answers(q.log().expand(1, 2, 3).clone())
    targets = SoftTargets(p.log().expand(2, 3))
    objective = LanguageLoss(ce_weight, teacher=lambda ids, rows: targets)
    loss = objective(model, Examples.of_ids(torch.tensor([[0, 2]])), [0])
    soft = float((p * (p / q).log()).sum())
    assert loss.item() == pytest.approx((1 - ce_weight) * soft + ce_weight * -float(q[2].log()), rel=1e-5)
    loss.backward()
    from_text = torch.stack([(q - torch.tensor([0.0, 0.0, 1.0])), torch.zeros(3)])
    wanted = (1 - ce_weight) * (q - p) / 2 + ce_weight * from_text
    assert torch.allclose(model.logits.grad[0], wanted, atol=1e-6)


@pytest.mark.parametrize("top_k", [64, None])
def test_an_uncompressed_model_has_nothing_to_lose(pico_model, pico_ids, top_k):
    journal = Journal()
    compress.apply(pico_model, [Distill(train=["norms"], steps=3, top_k=top_k)], pico_ids, journal=journal)
    (record,) = [entry.figures for entry in journal.entries if entry.message == "trained"]
    assert abs(record["first_loss"]) < 1e-6 and record["norms"] == 7 * 128


def test_the_first_loss_is_the_divergence_from_the_teacher(pico_model, teacher, pico_ids):
    journal = Journal()
    wanted = kl(compress.apply(pico_model, [compress.RTN(**RTN3)]), teacher, pico_ids)
    step = Distill(steps=1, batch=6, top_k=None)
    compress.apply(pico_model, [step], pico_ids, journal=journal, teacher=teacher)
    assert journal.entries[-1].figures["first_loss"] == pytest.approx(wanted, rel=1e-4)


# What it changes, and what not


def test_codes_stay_and_scales_and_norms_move(pico_model, teacher, pico_ids):
    compress.apply(pico_model, [compress.RTN(**RTN3, symmetric=False)], pico_ids)
    before = {name: layer.codes for name, layer in packed(pico_model).items()}
    rest = {name: t.clone() for name, t in pico_model.state_dict().items() if not name.startswith(tuple(before))}
    compress.apply(pico_model, [Distill(steps=2)], pico_ids, teacher=teacher)
    assert packed(pico_model).keys() == before.keys()
    for name, layer in packed(pico_model).items():
        for part in ("words", "zero"):
            assert torch.equal(getattr(layer.codes, part), getattr(before[name], part))
        assert not torch.equal(layer.codes.scale, before[name].scale)
    changed = {name for name, t in rest.items() if not torch.equal(t, pico_model.state_dict()[name])}
    assert changed == {name for name in rest if "norm" in name}


def test_pruned_weights_stay_zero_and_the_others_learn(pico_model, teacher, text):
    compress.apply(pico_model, [compress.Wanda(pattern="2:4", repair=0)], text[0])
    masks = {n: m.mask for n, m in pico_model.named_modules() if isinstance(m, CompressedLinear)}
    start = kl(pico_model, teacher, text[1])
    step = Distill(train=["weights", "norms"], epochs=4, batch=4, learning_rate=0.01, weight_rate=0.1)
    compress.apply(pico_model, [step], text[0], teacher=teacher)
    for name, mask in masks.items():
        layer = pico_model.get_submodule(name)
        assert torch.equal(layer.weight != 0, mask & (layer.weight != 0)) and torch.equal(layer.mask, mask)
        assert float((layer.weight[mask] != 0).float().mean()) > 0.99
    assert kl(pico_model, teacher, text[1]) < 0.8 * start


def test_scales_without_floats_stay_and_the_journal_says_so(pico_model, pico_ids):
    journal = Journal()
    chain = [compress.RTN(weights="mxfp4", targets="*.mlp.*"), compress.RTN(group_size=32, targets="*.self_attn.*")]
    compress.apply(pico_model, [*chain, Distill(steps=1)], pico_ids, journal=journal)
    (entry,) = [e for e in journal.entries if e.kind == "fallback"]
    assert entry.message == "scales that are not stored as floats are not trained" and entry.figures["layers"] == 9


# What it gains


OTHERS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("reverse_kl", "js", "tv")]


@pytest.mark.parametrize("kind", ["forward_kl", *OTHERS])
def test_every_divergence_brings_the_model_nearer_to_its_teacher_on_other_text(pico_model, teacher, text, kind):
    compress.apply(pico_model, [compress.RTN(**RTN3)])
    start = kl(pico_model, teacher, text[1])
    step = Distill(divergence=kind, batch=4, epochs=4, learning_rate=5e-3)
    compress.apply(pico_model, [step], text[0], teacher=teacher)
    assert kl(pico_model, teacher, text[1]) < 0.9 * start


@pytest.mark.slow
def test_few_of_the_teachers_tokens_are_nearly_as_good_as_all(pico_model, teacher, text):
    found = []
    for top_k in (64, None):
        chain = [compress.RTN(**RTN3), Distill(batch=4, epochs=1, learning_rate=5e-3, top_k=top_k)]
        found.append(kl(compress.apply(copy.deepcopy(pico_model), chain, text[0]), teacher, text[1]))
    assert found[0] == pytest.approx(found[1], rel=0.02)


@pytest.mark.slow
def test_bf16_learns_as_well(pico_model, teacher, text):
    found = []
    for precision in ("no", "bf16"):
        step = Distill(batch=4, epochs=1, learning_rate=5e-3, precision=precision)
        found.append(
            kl(compress.apply(copy.deepcopy(pico_model), [compress.RTN(**RTN3), step], text[0]), teacher, text[1])
        )
    assert found[0] == pytest.approx(found[1], rel=0.05)


# In a run


class Killed(Exception):
    pass


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes_and_the_same_curve(recipe, tmp_path, monkeypatch):
    asked = recipe(compress.RTN(**RTN3), Distill(steps=6, checkpoint_every=2, hold_out=0.2, evaluate_every=3))
    wanted = compress.run(asked, tmp_path / "whole").report
    taken = []
    real = LanguageLoss.__call__

    def dying(self, model, ids, rows, *weights):
        taken.append(rows)
        if len(taken) == 7:
            raise Killed
        return real(self, model, ids, rows, *weights)

    monkeypatch.setattr(LanguageLoss, "__call__", dying)
    with pytest.raises(Killed):
        compress.run(asked, tmp_path / "killed")
    work = tmp_path / "killed" / ".compress" / "passes"
    assert len(list(work.glob("teacher-*/*.safetensors"))) == 6 and list(work.glob(f"*/{STATE}"))
    monkeypatch.undo()
    found = compress.run(asked, tmp_path / "killed").report
    assert found["checkpoint_sha256"] == wanted["checkpoint_sha256"]
    (curve,) = [entry["curve"] for entry in found["training"].values()]
    assert curve == wanted["training"]["passes[1] distill"]["curve"]
    assert not work.exists()
    again = compress.run(asked, tmp_path / "killed").report
    assert again["training"] == found["training"]


@pytest.mark.slow
def test_the_report_tells_of_the_curve(recipe, tmp_path):
    asked = recipe(compress.RTN(**RTN3), Distill(steps=5, hold_out=0.2, evaluate_every=2))
    compress.run(asked, tmp_path)
    record = json.loads((tmp_path / "report.json").read_text())["training"]["passes[1] distill"]
    assert [point["step"] for point in record["curve"] if "loss" in point] == [1, 2, 3, 4, 5]
    assert [point["step"] for point in record["curve"] if "held_out" in point] == [0, 2, 4, 5]
    assert record["first_loss"] == record["curve"][1]["loss"] and record["last_loss"] == record["curve"][-2]["loss"]
    shown = (tmp_path / "report.md").read_text()
    assert "| pass | steps | loss, first quarter | last quarter | best held out | seconds |" in shown
    assert rf"| passes\[1] distill | 5 | {record['first_loss']:.4g} |" in shown


def test_the_plan_counts_what_training_holds(recipe):
    def memory(*passes):
        text = compress.Calibration(sequences=1, length=512, batch=1)
        return compress.plan(recipe(*passes, calibration=text)).memory_bytes

    plain, whole = memory(compress.RTN(**RTN3)), memory(compress.RTN(**RTN3), Distill())
    assert plain < whole < memory(compress.RTN(**RTN3), Distill(batch=2))
    dense = memory(compress.RTN(**RTN3, targets="*.self_attn.*"), Distill())
    scales = memory(compress.RTN(**RTN3, targets="*.self_attn.*"), Distill(train=["scales", "norms"]))
    assert dense - scales == 20 * 3 * 3 * 128 * 288  # five floats for each weight of the MLPs


# Bad input


def test_without_text_it_cannot_learn(pico_model):
    with pytest.raises(CalibrationError, match="need token ids"):
        compress.apply(pico_model, [Distill()])


def test_a_teacher_of_another_vocabulary_is_refused(pico_model, tiny, pico_ids):
    with pytest.raises(
        ModelError, match="teacher: it has a vocabulary of 64 tokens, the model of 1024; use a teacher with"
    ):
        compress.apply(pico_model, [Distill()], pico_ids, teacher=tiny("llama"))


def states_of(model, ids):
    with torch.no_grad():
        return model(input_ids=ids, output_hidden_states=True).hidden_states


def test_hidden_states_are_held_to_those_of_the_mapped_blocks(pico_model, teacher, pico_ids):
    student = compress.apply(copy.deepcopy(pico_model), [compress.RTN(**RTN3)])
    found, wanted = states_of(student, pico_ids[:1]), states_of(teacher, pico_ids[:1])

    def off(mine, theirs):
        return float(((found[mine] - wanted[theirs]).square().sum(-1) / wanted[theirs].square().sum(-1)).mean())

    online = OnlineTeacher(teacher, 1.0, "here")
    student.requires_grad_(False)
    even = LanguageLoss(teacher=online, ce_weight=0, hidden=2.0)(student, Examples.of_ids(pico_ids[:1]), [0])
    soft = LanguageLoss(teacher=online, ce_weight=0)(student, Examples.of_ids(pico_ids[:1]), [0])
    assert float(even - soft) == pytest.approx(2 * sum(off(i, i) for i in (1, 2, 3)) / 3, rel=1e-3)
    some = LanguageLoss(teacher=online, ce_weight=0, hidden=1.0, layer_map=((0, 1),))(
        student, Examples.of_ids(pico_ids[:1]), [0]
    )
    assert float(some - soft) == pytest.approx(off(1, 2), rel=1e-3)
    near = torch.nn.functional.cosine_similarity(found[-1], wanted[-1], dim=-1).mean()
    cosine = LanguageLoss(teacher=online, ce_weight=0, cosine=1.0)(student, Examples.of_ids(pico_ids[:1]), [0])
    assert float(cosine - soft) == pytest.approx(1 - float(near), rel=1e-2)


def test_blocks_of_a_shallower_student_are_mapped_evenly():
    assert evenly_spaced_pairs(6, 12) == [(0, 1), (1, 3), (2, 5), (3, 7), (4, 9), (5, 11)]
    assert evenly_spaced_pairs(3, 3) == [(0, 0), (1, 1), (2, 2)]


@pytest.mark.slow
def test_training_on_hidden_states_brings_them_nearer(pico_model, teacher, text):
    student, wanted = compress.apply(pico_model, [compress.RTN(**RTN3)]), states_of(teacher, text[1])[2]
    before = float(relative_error(states_of(student, text[1])[2], wanted))
    step = Distill(steps=12, learning_rate=0.01, top_k=None, hidden=10.0, hold_out=0)
    compress.apply(student, [step], text[0], teacher=teacher)
    after = float(relative_error(states_of(student, text[1])[2], wanted))
    assert after < 0.95 * before


def test_tokens_are_weighed_by_the_cross_entropy_of_the_teacher():
    # exp(2 / 2) and exp(4 / 2) for cross-entropies of 2 and 4; a token that none follows has no weight
    weights = token_weights(torch.tensor([-2.0, math.inf, -4.0]), 2.0)
    whole = math.e + math.e**2
    torch.testing.assert_close(weights, torch.tensor([math.e / whole, 0.0, math.e**2 / whole]))


def test_a_token_of_which_the_teacher_is_certain_has_a_weight():
    weights = token_weights(torch.tensor([0.0, -2.0, math.inf]), 2.0)
    torch.testing.assert_close(weights, torch.tensor([1 / (1 + math.e), math.e / (1 + math.e), 0.0]))


def test_the_weights_of_each_sequence_are_those_that_it_has_alone():
    text = torch.tensor([[-2.0, -4.0, math.inf], [-1.0, -9.0, math.inf]])
    found = token_weights(text.flatten(), 2.0, [3, 3]).view(2, 3)
    torch.testing.assert_close(found, torch.stack([token_weights(each, 2.0) / 2 for each in text]))


@pytest.mark.parametrize("top_k", [None, 16])
def test_the_divergence_is_weighed_by_token(pico_model, teacher, pico_ids, top_k):
    """The weights of a teacher that is kept are those of one that runs; at a high temperature all tokens are alike."""
    student = compress.apply(copy.deepcopy(pico_model), [compress.RTN(**RTN3)])
    with torch.no_grad():
        logits = teacher(input_ids=pico_ids[:1]).logits[0].log_softmax(-1)
    text = torch.cat([logits[:-1].gather(1, pico_ids[0, 1:, None])[:, 0], torch.tensor([math.inf])])
    targets = soft_targets_of_logits(
        logits[None], CAUSAL.targets(Examples.of_ids(pico_ids[:1]), [0]), 1.0, top_k, "here"
    )
    torch.testing.assert_close(targets.text, text, atol=1e-4, rtol=1e-4)
    student.requires_grad_(False)
    own = student(input_ids=pico_ids[:1]).logits[0]
    each = divergence("forward_kl", own, targets, 1.0)
    loss = LanguageLoss(ce_weight=0, teacher=lambda ids, rows: targets, token_scale=3.0)(
        student, Examples.of_ids(pico_ids[:1]), [0]
    )
    assert float(loss) == pytest.approx(float((each * token_weights(text, 3.0)).sum()), rel=1e-4)
    flat = LanguageLoss(ce_weight=0, teacher=lambda ids, rows: targets, token_scale=1e6)(
        student, Examples.of_ids(pico_ids[:1]), [0]
    )
    assert float(flat) == pytest.approx(float(each[:-1].mean()), rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hidden": 1.0}, "the teacher in every step; add top_k: null"),
        ({"cosine": 1.0}, "the teacher in every step; add top_k: null"),
        ({"token_scale": 5.0, "ce_weight": 1.0}, "weight 0 with ce_weight: 1"),
        ({"layer_map": [[0, 0]]}, "set hidden, or leave layer_map out"),
    ],
)
def test_losses_that_have_no_meaning_are_refused(options, message):
    with pytest.raises(OptionError, match=message):
        Distill(**options)


def test_a_layer_map_beyond_the_blocks_is_an_error(pico_model, pico_ids):
    step = Distill(steps=1, top_k=None, hidden=1.0, layer_map=[[0, 3]])
    with pytest.raises(
        ModelError, match=r"layer_map: \[0, 3\] does not exist; the model has blocks 0 to 2, the teacher 0 to 2"
    ):
        compress.apply(pico_model, [step], pico_ids)


def test_another_model_can_be_the_teacher(pico_model, tmp_path, pico_ids):
    """One that is the same but for its last block, whose outputs are doubled. The first step has all sequences."""
    other = copy.deepcopy(pico_model)
    with torch.no_grad():
        other.model.layers[2].mlp.down_proj.weight.mul_(2)
    other.save_pretrained(tmp_path / "teacher")
    chain = [compress.RTN(**RTN3), Distill(steps=1, batch=6, teacher=str(tmp_path / "teacher"))]
    journal = Journal()
    before = kl(compress.apply(copy.deepcopy(pico_model), chain[:1]), other, pico_ids)
    compress.apply(pico_model, chain, pico_ids, journal=journal)
    first = next(e for e in journal.entries if e.message == "trained").figures["first_loss"]
    assert first == pytest.approx(before, rel=0.1)


def padded(pico, folder, rows, keep_tokenizer=True):
    """Write the pico model with further rows of its embedding, which no token has, and return its folder."""
    model = AutoModelForCausalLM.from_pretrained(pico)
    model.resize_token_embeddings(1024 + rows, mean_resizing=False)
    with torch.no_grad():
        model.model.embed_tokens.weight[1024:] = 0.5  # likely outputs
    model.save_pretrained(folder)
    if keep_tokenizer:
        AutoTokenizer.from_pretrained(pico).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("top_k", [None, 16])
def test_a_teacher_with_further_rows_is_cut_to_the_vocabulary(top_k, pico, pico_ids, tmp_path):
    source = padded(pico, tmp_path / "teacher", 64)

    def first_loss(teacher):
        model, journal = AutoModelForCausalLM.from_pretrained(pico), Journal()
        model.name_or_path = pico
        step = Distill(steps=1, batch=6, teacher=teacher, top_k=top_k)
        compress.apply(
            model,
            [compress.RTN(**RTN3), step],
            pico_ids,
            journal=journal,
            tokenizer=AutoTokenizer.from_pretrained(pico),
        )
        return next(e for e in journal.entries if e.message == "trained").figures["first_loss"]

    assert first_loss(source) == pytest.approx(first_loss(pico), rel=1e-5)


def test_a_recipe_takes_a_padded_teacher(pico, recipe, tmp_path):
    asked = recipe(compress.RTN(**RTN3), Distill(teacher=padded(pico, tmp_path / "padded", 64), steps=1))
    assert compress.plan(asked)
    for source, rows in (
        (padded(pico, tmp_path / "bare", 64, False), 1088),
        (padded(pico, tmp_path / "fewer", -8), 1016),
    ):
        with pytest.raises(
            ModelError, match=f"has a vocabulary of {rows} tokens, the model of 1024; use a teacher with"
        ):
            compress.plan(recipe(compress.RTN(**RTN3), Distill(teacher=source)))


def test_a_teacher_with_another_tokenizer_is_refused_before_any_work(recipe, tiny_folder, tmp_path):
    asked = recipe(compress.RTN(**RTN3), Distill(teacher=tiny_folder("llama")))
    with pytest.raises(ModelError, match="has a vocabulary of 64 tokens, the model of 1024; use a teacher"):
        compress.run(asked, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_kinds_that_apply_to_nothing_name_the_pass(pico_model, pico_ids):
    with pytest.raises(TargetError, match=r"passes\[0\] distill: train: scales matches no parameter"):
        compress.apply(pico_model, [Distill(train=["scales"])], pico_ids)


def test_a_loss_that_is_no_number_names_pass_and_step(pico_model, pico_ids, monkeypatch):
    monkeypatch.setattr(LanguageLoss, "__call__", lambda *_: torch.tensor(float("nan"), requires_grad=True))
    with pytest.raises(NumericError, match=r"passes\[1\] distill: the loss is nan in step 1 of 12; use a smaller"):
        compress.apply(pico_model, [compress.RTN(), Distill()], pico_ids)
    assert len(packed(pico_model)) == 21
