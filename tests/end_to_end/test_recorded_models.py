"""Models that transcribe recordings, from a folder with WAV files to a checkpoint and its report, and in memory."""

import copy
from typing import ClassVar

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from encoders import tokenizer
from model_families import tiny_model
from speech import TEXTS, extractor, moonshine, speech_to_text, sweep, write_model, write_recordings
from tolerances import LOGITS, same_logits
from transformers import AutoModelForSpeechSeq2Seq

import compress
from compress import AWQ, GPTQ, LKD, RTN, Calibration, Distill, Evaluate, Finetune, SignRound, SmoothQuant, Wanda
from compress.cli import main
from compress.data.ids import model_sample
from compress.data.text_source import as_source
from compress.errors import CalibrationError, ModelError, RecipeError, TargetError
from compress.layers.linear import CompressedLinear
from compress.models.forward import logits_of, mean_loss
from compress.models.kinds.batch import Examples
from compress.models.kinds.kinds import kind_of, objective_of
from compress.models.kinds.speech import Speech, recording
from compress.passes.contract.layers import Solution
from compress.passes.contract.observers import InputNorm
from compress.passes.contract.passes import LayerPass
from compress.passes.contract.processes import Processes
from compress.pipeline.divide import check_divided, own_batches
from compress.pipeline.evaluation import evaluate
from compress.train.curvature import weight_curvature
from compress.train.objective import LanguageLoss

INT4 = {"weights": "int4", "group_size": 16}
LABELS = [[5, 6, 7, 3], [8, 9, 10, 3], [11, 12, 13, 14, 15, 3], [16, 3], [17, 18, 19, 20, 21, 3], [22, 23, 24, 3]]
"""The target tokens of `TEXTS`: the words and the end."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("speech"))


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    return write_recordings(tmp_path_factory.mktemp("recordings"))


@pytest.fixture
def asked(recipe, folder, recordings):
    """asked(*passes, **options): a recipe for the model."""
    text = Calibration(source=recordings, sequences=6, batch=2, divided=False)
    measured = Evaluate(perplexity=(recordings,), windows=6)

    def build(*passes, **options):
        usual = {"calibration": text, "eval": measured, "save": {"format": "native"}, "model": folder}
        return recipe(*passes, **{**usual, **options})

    return build


@pytest.fixture(scope="module")
def rows(folder, recordings):
    """The recordings as the model reads them."""
    return model_sample(AutoModelForSpeechSeq2Seq.from_pretrained(folder), tokenizer(), recordings, "test", 6, 512)[0]


def heard(i):
    """The features of a recording, by the extractor, from the 16 bits of its file."""
    sound = np.round(2**15 * sweep(0.3 + 0.1 * i, first=200.0 * (i + 1), last=4000.0)) / 2**15
    return extractor()(sound.astype(np.float32), sampling_rate=16000, return_tensors="pt").input_features


def loss_of_transformers(model, labels=LABELS, features=heard):
    """The mean over all targets of the losses that transformers computes from labels, one recording at a time."""
    with torch.no_grad():
        name = model.main_input_name
        each = [model(**{name: features(i)}, labels=torch.tensor([tokens])).loss for i, tokens in enumerate(labels)]
    counts = torch.tensor([len(tokens) for tokens in labels])
    return float((torch.stack(each) * counts).sum() / counts.sum())


# Runs


def test_from_a_recipe_to_a_checkpoint(asked, folder, recordings, tmp_path):
    """The loss is that of transformers, also of the reloaded and of the stock model, and both transcribe alike."""
    report = compress.run(asked(GPTQ(**INT4)), tmp_path / "out").report
    (quality,) = report["perplexity"]
    assert quality["base"]["of"] == quality["compressed"]["of"] == "target tokens"
    assert (quality["windows"], quality["length"], quality["base"]["tokens"]) == (6, 6, 26)
    assert quality["divergence"]["mean"] > 0 and report["verified"]["own"] <= LOGITS
    assert len(report["layers"]) == 2 * 6 + 3 * 10
    assert "pipeline_tag: automatic-speech-recognition" in (tmp_path / "out" / "README.md").read_text()
    model, _ = compress.load(tmp_path / "out", verify=True)
    packed = {name for name, module in model.named_modules() if isinstance(module, CompressedLinear)}
    assert len(packed) == 42 and any("encoder_attn.k_proj" in name for name in packed)
    original, stock = (AutoModelForSpeechSeq2Seq.from_pretrained(path) for path in (folder, tmp_path / "out"))
    assert quality["base"]["loss"] == pytest.approx(loss_of_transformers(original), rel=1e-4)
    for each in (model, stock):
        assert quality["compressed"]["loss"] == pytest.approx(loss_of_transformers(each), rel=1e-4)
    made = [each.generate(input_features=heard(2), max_new_tokens=6, do_sample=False) for each in (model, stock)]
    assert torch.equal(*made) and made[0].shape[1] > 1
    done = CliRunner().invoke(main, ["eval", folder, str(tmp_path / "out"), "--text", recordings, "--windows", "6"])
    shown = (f"{quality[which]['perplexity']:.4f}"[:4] for which in ("base", "compressed"))
    assert done.exit_code == 0 and all(figure in done.stdout for figure in shown), done.output
    again = CliRunner().invoke(main, ["compare", str(tmp_path / "out"), str(tmp_path / "out")])
    assert again.exit_code == 0, again.output


def test_a_dense_export_is_an_ordinary_checkpoint(asked, tmp_path):
    report = compress.run(asked(Wanda(sparsity=0.5), save={"format": "dense"}), tmp_path / "out").report
    assert report["verified"]["transformers"] <= LOGITS
    compress.run(asked(RTN(**INT4), eval=None), tmp_path / "packed")
    compress.export(tmp_path / "packed", tmp_path / "dense", format="dense")
    one, two = (AutoModelForSpeechSeq2Seq.from_pretrained(tmp_path / name) for name in ("packed", "dense"))
    assert loss_of_transformers(one) == pytest.approx(loss_of_transformers(two), rel=1e-5)
    assert (tmp_path / "dense" / "preprocessor_config.json").exists()


def test_a_format_of_others(asked, tmp_path):
    steps, save = RTN(weights="int4", group_size=16), {"format": "compressed-tensors"}
    report = compress.run(asked(steps, save=save, eval=None), tmp_path / "out").report
    assert report["verified"]["own"] <= LOGITS and report["verified"]["transformers"] <= 1e-3


@pytest.mark.parametrize("block", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_killed_run_goes_on_in_either_stack(block, asked, stop, tmp_path):
    again = asked(GPTQ(**INT4, error="asymmetric"), eval=None)
    wanted = compress.run(again, tmp_path / "whole").report["checkpoint_sha256"]
    stop(again, tmp_path / "killed", lambda entry: entry.kind == "block" and entry.figures["block"] == block)
    assert compress.run(again, tmp_path / "killed").report["checkpoint_sha256"] == wanted


def test_run_stores_what_apply_computes(asked, folder, rows, tmp_path):
    """`apply` takes a batch as transformers spells it."""
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0)).tolist()
    out = compress.run(asked(GPTQ(**INT4), eval=None), tmp_path).folder
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    labels = torch.full((6, 6), -100)
    for i, number in enumerate(order):
        labels[i, : len(LABELS[number])] = torch.tensor(LABELS[number])
    given = {"input_features": torch.cat([heard(i) for i in order]), "labels": labels}
    compress.apply(model, GPTQ(**INT4), given, batch=2)
    stored, _ = compress.load(out)
    assert same_logits(logits_of(stored, rows[0]), logits_of(model, rows[0]))


def test_the_plan_knows_bytes_and_memory(asked, recordings, tmp_path):
    planned = compress.plan(asked(GPTQ(**INT4)), time=True)
    report = compress.run(asked(GPTQ(**INT4)), tmp_path).report
    assert planned.checkpoint_bytes == report["predicted"]["tensor_bytes"]
    every = compress.plan(
        asked(GPTQ(**INT4), calibration=Calibration(source=recordings, sequences=None, length=None, divided=False))
    )
    for fit in (planned.fit, every.fit):
        parts = [need.parts for need in fit.needs if "decoder" in need.where]
        assert any(part.get("outputs of the stack before") == 6 * 12 * 32 * 4 for part in parts)
    one = 4 * 8 * 24 + 2 * 8 * 32  # the most targets that the decoder has positions for
    for wanted, count in ((Evaluate(perplexity=(recordings,), windows=4), 4), (None, 0)):
        fit = compress.plan(asked(GPTQ(**INT4), eval=wanted)).fit
        assert {need.parts["examples"] for need in fit.needs} == {(6 + 6 + count) * one}
        fit = compress.plan(asked(RTN(**INT4), eval=wanted)).fit  # runs on one recording
        assert {need.parts["examples"] for need in fit.needs} == {(6 + 1 + count) * one}


def test_a_recipe_to_start_from(folder, tmp_path):
    more, path = write_recordings(tmp_path / "more", TEXTS * 11), tmp_path / "start.yaml"
    done = CliRunner().invoke(main, ["init", folder, "--text", more, "-o", str(path)])
    assert done.exit_code == 0, done.output
    started = compress.Recipe.from_yaml(path)
    assert started.calibration.source == more and [as_source(text).source for text in started.eval.perplexity] == [more]
    compress.plan(started)
    other = CliRunner().invoke(main, ["init", folder, "-o", str(tmp_path / "other.yaml")])
    assert other.exit_code == 2 and "embedded holds none; write calibration: " in other.stderr


# Statistics and losses


counted: dict[str, int] = {}


class Counting(LayerPass):
    """Counts the tokens that each layer sees, and leaves its weight."""

    paper: ClassVar[str] = "none"
    observes: ClassVar = InputNorm

    def solve(self, weight, seen, layer):
        counted[layer.name] = seen.tokens
        return Solution(weight)


def test_no_padding_counts_in_a_statistic(folder, rows):
    counted.clear()
    compress.apply(AutoModelForSpeechSeq2Seq.from_pretrained(folder), Counting(), _given(rows), batch=4)
    for name, tokens in counted.items():
        of_recording = "encoder.layers" in name or "encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name
        assert tokens == (6 * 12 if of_recording else 26), name
    assert len(counted) == 42


def _given(rows):
    """The mapping that `compress.apply` takes, of the recordings in the order of the list."""
    labels = torch.nn.utils.rnn.pad_sequence([torch.tensor(t) for t in LABELS], batch_first=True, padding_value=-100)
    return {"input_features": torch.cat([heard(i) for i in range(len(rows))]), "labels": labels}


@pytest.mark.parametrize("made", [speech_to_text, moonshine])
def test_other_models_of_recordings(made):
    """They are told by transformers, not by name: other features, of any length."""
    torch.manual_seed(0)
    model, features = made()
    model.eval().requires_grad_(False)
    assert kind_of(model) == Speech()
    pairs = zip(features, LABELS, strict=True)
    ids = Examples(tuple(recording(model, one, torch.tensor(tokens)) for one, tokens in pairs))
    found = LanguageLoss(lm_objective=objective_of(model, None))(model, ids, range(6))
    assert float(found) == pytest.approx(loss_of_transformers(model, features=lambda i: features[i][None]), rel=1e-5)
    before = {name: p.clone() for name, p in model.named_parameters()}
    compress.apply(model, GPTQ(**INT4, error="asymmetric"), ids, batch=2)
    compress.apply(made()[0].requires_grad_(False), RTN(**INT4))  # without recordings
    layers = [name for name, module in model.named_modules() if isinstance(module, CompressedLinear)]
    for name in layers:
        weight = before[f"{name}.weight"]
        assert 0 < float((model.get_submodule(name).weight - weight).norm() / weight.norm()) < 0.2, name
    assert len(layers) == 6 + 10


def test_the_loss_is_that_of_transformers(folder, rows):
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    lm_objective = objective_of(model, tokenizer())
    wanted = pytest.approx(loss_of_transformers(model), rel=1e-5)
    assert mean_loss(model, rows, lm_objective) == wanted
    with torch.no_grad():
        assert float(LanguageLoss(lm_objective=lm_objective)(model, rows, range(6))) == wanted


def test_padded_samples_are_no_positions():
    """A batch of samples of two lengths with its mask is calibrated as the recordings without their padding."""
    model, features = moonshine()
    labels = torch.tensor([[5, 6, 3], [8, 9, 3]])
    samples = torch.nn.utils.rnn.pad_sequence(features[:2], batch_first=True)
    mask = (torch.arange(samples.shape[1]) < torch.tensor([[len(one)] for one in features[:2]])).long()
    counted.clear()
    compress.apply(model, Counting(), {"input_values": samples, "attention_mask": mask, "labels": labels})
    alone = sum(model.get_encoder()(one[None]).last_hidden_state.shape[1] for one in features[:2])
    assert counted["model.encoder.layers.0.mlp.fc1"] == alone


@pytest.mark.parametrize("step", [Finetune, Distill])
def test_training_learns_targets_and_a_teacher(step, folder, rows):
    teacher = AutoModelForSpeechSeq2Seq.from_pretrained(folder).eval()
    model = compress.apply(copy.deepcopy(teacher), RTN(weights="int3", group_size=32))

    def distance():
        if step is Finetune:
            return loss_of_transformers(model)
        found = 0.0
        for row in rows:
            log_p, log_q = (logits_of(each, row).log_softmax(-1) for each in (teacher, model))
            found += float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
        return found

    before = distance()
    compress.apply(model, step(steps=8, batch=4, learning_rate=0.01), _given(rows), teacher=teacher)
    assert distance() < before


@pytest.mark.parametrize(
    "steps",
    [
        [AWQ(**INT4), RTN(**INT4)],
        [SmoothQuant(), RTN(weights="int8", group_size="channel", activations="int8")],
        [SignRound(**INT4, iterations=2)],
        [RTN(**INT4), LKD(train=["scales", "norms"], steps=2, batch=2)],
    ],
    ids=lambda steps: steps[0].key(),
)
def test_passes_work_on_transcripts_of_several_lengths(steps, folder, rows):
    model = AutoModelForSpeechSeq2Seq.from_pretrained(folder)
    before = loss_of_transformers(model)
    compress.apply(model, steps, _given(rows), batch=4)
    assert before != loss_of_transformers(model) == pytest.approx(before, rel=0.1)


def test_the_curvature_reaches_the_encoder(rows):
    """Derivatives must not start at the token embeddings, which only the decoder reads."""
    model = tiny_model("whisper", decoder_start_token_id=2)
    names = ["model.encoder.layers.0.fc1", "model.decoder.layers.0.fc1"]
    found, places = weight_curvature(model, names, rows[:2].sequences, 0, lambda _: None)
    assert all(bool((found[name] > 0).any()) for name in names) and places == 8


# What is refused


def refused(*arguments):
    """The one line with which a command refuses its arguments."""
    done = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert done.exit_code == 2 and done.stderr.count("\n") == 1, done.output
    return done.stderr


def test_a_text_is_no_recording(asked, folder, recordings, rows, tmp_path):
    """Text alone is refused by the plan, in one line that says what to write instead."""
    path = tmp_path / "r.yaml"
    for options in ({"calibration": Calibration()}, {"eval": Evaluate()}):
        path.write_text(asked(RTN(**INT4), **options).to_yaml())
        line = refused("plan", path)
        assert "transcribes recordings, and embedded holds none; write" in line and '"audio": ' in line
    assert "eval: {perplexity: [FILE.jsonl]}" in refused("eval", folder)
    with pytest.raises(CalibrationError, match=r"these are token ids; give a mapping with input_features and labels"):
        compress.apply(tiny_model("whisper"), RTN(**INT4), torch.zeros(2, 8).long())
    with pytest.raises(CalibrationError, match=r'mapping with input_features, labels; give .* batch\["input_ids"\]'):
        compress.apply(tiny_model("llama"), RTN(**INT4), _given(range(6)))
    with pytest.raises(CalibrationError, match="holds input_features, labels; give input_ids and labels"):
        compress.apply(tiny_model("t5"), RTN(**INT4), _given(range(6)))
    with pytest.raises(
        CalibrationError, match="T5ForConditionalGeneration .* takes no input_features.*; give token ids"
    ):
        compress.apply(tiny_model("t5"), RTN(**INT4), rows)


def test_prompts_of_text_are_refused(folder):
    assert "transcribes recordings and generates no text from a prompt" in refused("generate", folder, "w5")
    assert "transcribes recordings and decodes no prompt" in refused("bench", folder)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"stride": 16, "length": 16},
            "eval: stride 16: .* transcribes recordings, each of which is one window; write",
        ),
        ({"generation": True}, "eval generation: .* transcribes recordings and answers no prompts of text; leave gen"),
        ({"speed": True}, "eval speed: .* transcribes recordings and answers no prompts of text; leave speed out"),
        (
            {"tasks": ("arc_easy",)},
            "eval tasks: .* transcribes recordings and answers no tasks, which need next tokens",
        ),
    ],
)
def test_what_a_recording_does_not_answer(options, said, asked, folder, recordings):
    """The plan says so, and `compress eval`; nothing that is asked for is left out in silence."""
    wanted = Evaluate(perplexity=(recordings,), **options)
    with pytest.raises((RecipeError, CalibrationError), match=said):
        compress.plan(asked(RTN(**INT4), eval=wanted))
    with pytest.raises((RecipeError, CalibrationError), match=said):
        evaluate([folder], wanted, work=None)


def test_what_only_a_suite_asks_is_left_out_with_a_note(asked, recordings, tmp_path):
    (tmp_path / "own.yaml").write_text("tasks: [arc_easy]\ngeneration: true\nspeed: true\n")
    suite = {"suite": str(tmp_path / "own.yaml"), "perplexity": [recordings], "windows": 2}
    said = "transcribes recordings, so generation and speed and tasks of the suite are left out"
    recipe = asked(RTN(**INT4), eval=Evaluate.model_validate(suite))
    assert any(note.endswith(said) for note in compress.plan(recipe).notes)
    out = compress.run(recipe, tmp_path / "out").folder
    again = compress.Recipe.from_yaml(out / "recipe.yaml")  # as it was measured, so that it can be run again
    assert again.eval is not None and (again.eval.tasks, again.eval.generation, again.eval.speed) == ((), False, False)
    done = CliRunner().invoke(main, ["eval", str(out), "--suite", suite["suite"], "--text", recordings])
    assert done.exit_code == 0 and said in " ".join(done.output.split()), done.output
    named = refused("eval", out, "--suite", suite["suite"], "--text", recordings, "--tasks", "arc_easy")
    assert "eval tasks: Whisper" in named


def test_compared_models_hear_the_same_features(folder, recordings, tmp_path):
    other = write_model(tmp_path / "other", num_mel_bins=16)
    extractor(feature_size=16).save_pretrained(other)
    line = refused("eval", folder, other, "--text", recordings)
    assert "reads 8 bins and 24 frames, " in line and "16 bins and 24 frames; evaluate them in two calls" in line


@pytest.mark.parametrize("step", [compress.DropBlocks(count=1), compress.KVCache(keys="int8", values="int8")])
def test_passes_for_one_stack_say_so(step, asked):
    with pytest.raises(TargetError, match="with one stack of blocks, but Whisper"):
        compress.plan(asked(step))


def test_a_teacher_hears_the_same_features(asked, tmp_path):
    other = write_model(tmp_path / "teacher", num_mel_bins=16)
    with pytest.raises(ModelError, match=r"teacher: .* reads 16 bins and 24 frames, the model 8 bins and 24 frames"):
        compress.plan(asked(RTN(**INT4), Distill(teacher=other, steps=1)))


def test_fewer_recordings_than_processes(rows):
    """A batch has transcripts of one length: here 2, 2 and 1 of them for a batch of 2 or more."""
    with pytest.raises(CalibrationError, match="2 sequences cannot be divided over the 3 processes of the launcher"):
        check_divided([("passes[0] gptq", GPTQ(**INT4), [])], rows[:2], 2, Processes(0, 3))
    with pytest.raises(CalibrationError, match="use a shorter calibration.length, to which more transcripts are cut"):
        check_divided([("passes[0] signround", SignRound(**INT4), [])], rows, 4, Processes(0, 2))
    shares = [own_batches(rows, 4, Processes(rank, 3)) for rank in range(3)]
    seen = [row.content() for share in shares for part in share for row in part.split()]
    assert sorted(seen) == sorted(row.content() for row in rows) and all(shares)
