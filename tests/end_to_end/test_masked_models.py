"""Models of masked tokens, from a folder with a tokenizer to a checkpoint and its report, and in memory."""

import copy
import json
from pathlib import Path

import pytest
import torch
from batches import ids_of
from click.testing import CliRunner
from encoders import VOCAB, tokenizer, write_words
from tolerances import LOGITS

import compress
from compress import RTN, Distill, DropBlocks, Finetune
from compress.cli import main
from compress.data.ids import model_sample
from compress.data.opening import special_tokens_around
from compress.errors import CalibrationError, ModelError, RecipeError
from compress.models.forward import mean_loss, skipping
from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import objective_of
from compress.models.structure.blocks import find_blocks
from compress.passes.contract.journal import Journal
from compress.train.objective import LanguageLoss
from compress.train.teacher import OnlineTeacher

TRIPLE = {"ce_weight": 2 / 7, "temperature": 2.0, "cosine": 1 / 7, "top_k": None}  # 5 : 2 : 1, as in the authors' code
RTN4 = {"weights": "int4", "group_size": 16}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """A model of two blocks with its tokenizer."""
    made = tmp_path_factory.mktemp("models") / "masked"
    tiny("bert", num_hidden_layers=2).save_pretrained(made)
    tokenizer().save_pretrained(made)
    return str(made)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text of the tokenizer's words."""
    return write_words(tmp_path_factory.mktemp("texts") / "words.txt", 400)


@pytest.fixture
def asked(recipe, folder, words):
    """asked(*passes, **options): a recipe for the folder's model."""
    text = compress.Calibration(source=words, sequences=8, length=24, divided=False)
    measured = compress.Evaluate(perplexity=(words,), windows=8, length=24)

    def build(*passes, **options):
        return recipe(*passes, model=folder, **{"calibration": text, "eval": measured, **options})

    return build


def test_the_triple_loss_from_a_recipe_to_a_checkpoint(asked, words, tmp_path):
    report = compress.run(asked(RTN(**RTN4), Distill(**TRIPLE, steps=12, learning_rate=0.01)), tmp_path).report
    (quality,) = report["perplexity"]
    assert quality["base"]["of"] == quality["compressed"]["of"] == "masked tokens"
    assert quality["base"]["tokens"] == quality["compressed"]["tokens"] == 8 * 3  # 15% of 22
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] is not None
    assert "| perplexity of masked tokens, " in (tmp_path / "report.md").read_text()
    model, known = compress.load(tmp_path)
    with torch.no_grad():
        ids = torch.tensor([known(text="w9 [MASK] w33").input_ids])
        assert ids.tolist() == [[2, 9, 4, 33, 3]] and model(input_ids=ids).logits.shape == (1, 5, VOCAB)
    done = CliRunner().invoke(main, ["eval", str(tmp_path), "--text", words, "--windows", "8", "--length", "24"])
    assert done.exit_code == 0 and "masked tokens" in done.stdout
    assert f"{quality['compressed']['perplexity']:.4f}" in done.stdout


def test_windows_of_a_text_stand_between_special_tokens(tiny, words, texts):
    text = tokenizer()(Path(words).read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    found, _ = model_sample(tiny("bert"), tokenizer(), words, "test", 3, 10)
    assert ids_of(found).tolist() == [[2, *text[8 * i : 8 * i + 8], 3] for i in range(3)]
    plain, _ = model_sample(tiny("llama"), tokenizer(), words, "test", 3, 10)
    assert ids_of(plain).tolist() == [[2, *text[9 * i : 9 * i + 9]] for i in range(3)]
    stored, _ = model_sample(tiny("bert"), tokenizer(), texts["tiny"], "test", None, None)
    assert stored.sha256() == model_sample(tiny("llama"), None, texts["tiny"], "test", None, None)[0].sha256()
    assert special_tokens_around(tokenizer()) == ([2], [3])
    with pytest.raises(CalibrationError, match="eval: length 2 has no room for text next to the special tokens"):
        model_sample(tiny("bert"), tokenizer(), words, "test", 3, 2)


def loss_of(model, teacher, ids):
    """The mean triple loss of all sequences under the masks of a pass."""
    lm_objective = objective_of(model, tokenizer())
    objective = LanguageLoss(
        2 / 7,
        temperature=2.0,
        cosine=1 / 7,
        lm_objective=lm_objective,
        teacher=OnlineTeacher(teacher, 2.0, "here", lm_objective),
    )
    with torch.no_grad():
        return float(objective(model, Examples.of_ids(ids), range(len(ids))))


def test_what_is_learned_makes_the_triple_loss_smaller(tiny, ids):
    teacher, text = tiny("bert"), ids(8, 24).clamp(min=5)
    model = compress.apply(copy.deepcopy(teacher), [RTN(weights="int3", group_size=32)])
    before = loss_of(model, teacher, text)
    step = Distill(**TRIPLE, steps=8, batch=8, learning_rate=0.02)
    head = model.cls.predictions.bias.clone()
    compress.apply(model, [step], text, teacher=teacher, tokenizer=tokenizer())
    assert loss_of(model, teacher, text) < before - 0.05
    assert torch.equal(model.cls.predictions.bias, head)  # the head's bias is no norm


@pytest.mark.parametrize(
    "step",
    [
        Finetune(steps=1),
        Finetune(steps=1, mask_probability=0.4, ce_weight=0.5),
        compress.GMP(steps=2, sparsity=0.5),
        compress.SRSTE(steps=1),
        compress.TopKAST(steps=1, sparsity=0.5),
        compress.QAT(steps=1, **RTN4),
        compress.IterativePruning(steps=2, rounds=1, sparsity=0.5),
    ],
    ids=lambda step: step.key(),
)
def test_every_training_asks_for_masked_tokens(step, tiny, ids, monkeypatch):
    real, predictions = LanguageLoss.__call__, []
    monkeypatch.setattr(LanguageLoss, "__call__", lambda s, *a: predictions.append(s.lm_objective) or real(s, *a))
    compress.apply(tiny("bert"), [step], ids(2), tokenizer=tokenizer())
    assert {(p.predicts, p.probability) for p in predictions} == {("masked tokens", step.mask_probability or 0.15)}


def test_the_block_that_goes_is_the_one_that_masked_tokens_miss_least(tiny, ids):
    model, journal, lm_objective = tiny("bert"), Journal(), objective_of(tiny("bert"), tokenizer())
    blocks = find_blocks(model)
    losses = []
    for block in blocks:
        with skipping(blocks, [block.index]):
            losses.append(mean_loss(model, Examples.of_ids(ids(3)), lm_objective))
    step = DropBlocks(count=1, by="loss")
    compress.apply(model, [step], ids(3), journal=journal, tokenizer=tokenizer())
    (record,) = [entry for entry in journal.entries if entry.message == "dropped"]
    assert record.figures["loss"] == pytest.approx(min(losses), abs=1e-5)
    assert record.where.endswith(f".{losses.index(min(losses))}")


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 16])
def test_a_killed_run_ends_with_the_same_bytes(asked, tmp_path, monkeypatch, top_k):
    options = {**TRIPLE, "top_k": top_k, "cosine": 0 if top_k else TRIPLE["cosine"]}
    step = Distill(**options, steps=4, checkpoint_every=2, hold_out=0.2, evaluate_every=2)
    again = asked(RTN(**RTN4), step, eval=compress.Evaluate(perplexity=()))
    wanted = compress.run(again, tmp_path / "whole").report["checkpoint_sha256"]
    real, taken = LanguageLoss.__call__, []

    def dying(*args):
        taken.append(args)
        if len(taken) == 8:
            raise KeyboardInterrupt
        return real(*args)

    with monkeypatch.context() as patch:
        patch.setattr(LanguageLoss, "__call__", dying)
        with pytest.raises(KeyboardInterrupt):
            compress.run(again, tmp_path / "killed")
    journal = Journal()
    assert compress.run(again, tmp_path / "killed", journal=journal).report["checkpoint_sha256"] == wanted
    assert any(entry.message == "training resumes" for entry in journal.entries)


# Bad input


def test_a_model_that_cannot_write_is_not_asked_for_a_text(asked, tmp_path):
    own = compress.Calibration(source="self", sequences=2, length=8)
    with pytest.raises(CalibrationError, match=r"cannot generate text \(source self\); use another source"):
        compress.run(asked(RTN(**RTN4), calibration=own), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("passes", "measured"), [([RTN(**RTN4)], True), ([Distill()], False), ([DropBlocks(count=1, by="loss")], False)]
)
def test_without_a_mask_token_nothing_begins_that_needs_one(recipe, tiny_folder, tmp_path, passes, measured):
    options = {} if measured else {"eval": compress.Evaluate(perplexity=())}
    with pytest.raises(ModelError, match="predicts masked tokens, but it has no tokenizer; save a tokenizer"):
        compress.run(recipe(*passes, model=tiny_folder("bert"), **options), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_without_a_mask_token_all_else_is_done(recipe, tiny_folder, tmp_path, tiny, ids):
    measured = compress.Evaluate(perplexity=())
    compress.run(recipe(RTN(**RTN4), model=tiny_folder("bert"), eval=measured), tmp_path)
    assert json.loads((tmp_path / "report.json").read_text())["perplexity"] == []
    compress.apply(tiny("bert"), [DropBlocks(count=1), compress.Wanda()], ids())
    with pytest.raises(ModelError, match=r"pass one to compress.apply \(tokenizer=\)"):
        compress.apply(tiny("bert"), [Finetune(steps=1)], ids())


def test_a_share_of_masks_says_nothing_of_next_tokens(tiny, ids):
    with pytest.raises(RecipeError, match="finetune: mask_probability has no effect on a model of next tokens"):
        compress.apply(tiny("llama"), [Finetune(steps=1, mask_probability=0.3)], ids())
    model = tiny("llama")
    before = model.state_dict()["model.layers.0.mlp.up_proj.weight"].clone()
    with pytest.raises(RecipeError, match=r"passes\[1\] finetune: mask_probability"):  # before the pass in front of it
        compress.apply(model, [compress.Wanda(), Finetune(steps=1, mask_probability=0.3)], ids())
    assert torch.equal(model.state_dict()["model.layers.0.mlp.up_proj.weight"], before)


def test_a_teacher_in_memory_must_predict_the_same(tiny, ids):
    with pytest.raises(ModelError, match="teacher: it predicts next tokens, the model predicts masked tokens"):
        compress.apply(tiny("bert"), [Distill()], ids(), teacher=tiny("llama"), tokenizer=tokenizer())


def test_ids_of_special_tokens_alone_are_told(tiny):
    with pytest.raises(CalibrationError, match="sequence 0 holds only special tokens"):
        compress.apply(tiny("bert"), [Finetune(steps=1)], torch.zeros(1, 8, dtype=torch.int64), tokenizer=tokenizer())
