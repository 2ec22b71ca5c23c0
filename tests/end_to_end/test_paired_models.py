"""Models with an encoder and a decoder, from a folder with a tokenizer to a checkpoint and its report, and in memory."""

import copy
import json
from pathlib import Path

import pytest
import torch
from batches import batch_of
from click.testing import CliRunner
from encoders import tokenizer, write_words
from tolerances import LOGITS, same_logits
from transformers import AutoModelForSeq2SeqLM

import compress
from compress import GPTQ, RTN, Calibration, Distill, Evaluate, Finetune, Wanda
from compress.cli import main
from compress.data.ids import model_sample
from compress.data.self_sampling import self_sampled
from compress.errors import CalibrationError, ModelError, RecipeError, TargetError
from compress.evaluation.perplexity import perplexity
from compress.models.forward import logits_of, mean_loss
from compress.models.kinds.contract import text_lengths
from compress.models.kinds.encoder_decoder import EncoderDecoder
from compress.models.kinds.kinds import adapter_of, examples_of, kind_of, objective_of, prompt_length
from compress.train.objective import LanguageLoss

INT4 = {"weights": "int4", "group_size": 16}


@pytest.fixture(scope="module")
def folder(tiny, tmp_path_factory):
    """folder(family) -> a model with a tokenizer that puts special tokens around a text."""
    made = tmp_path_factory.mktemp("pairs")

    def save(family):
        if not (made / family).exists():
            tiny(family).save_pretrained(made / family)
            tokenizer().save_pretrained(made / family)
        return str(made / family)

    return save


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text of the tokenizer's words."""
    return write_words(tmp_path_factory.mktemp("texts") / "words.txt", 400)


@pytest.fixture
def asked(recipe, folder, words):
    """asked(family, *passes, **options): a recipe for a model of a family."""
    text = Calibration(source=words, sequences=6, length=20, batch=2)
    measured = Evaluate(perplexity=(words,), windows=4, length=20)

    def build(family, *passes, **options):
        usual = {"calibration": text, "eval": measured, "save": {"format": "native"}}
        return recipe(*passes, model=folder(family), **{**usual, **options})

    return build


def loss_of_transformers(model, ids):
    """The mean loss that transformers computes from labels: the second half of each row."""
    half = ids.shape[1] // 2
    with torch.no_grad():
        return float(model(input_ids=ids[:, :half].contiguous(), labels=ids[:, half:].contiguous()).loss)


def rows_of(examples):
    """The source and the target of each example in one row."""
    return torch.cat([torch.cat([each.inputs["input_ids"], each.labels], dim=1) for each in examples])


# Inputs


@pytest.mark.parametrize("family", ["t5", "bart", "mbart", "pegasus"])
def test_the_decoder_reads_what_transformers_makes_of_the_labels(family, tiny, ids):
    model, text = tiny(family), ids(3, 12)
    assert kind_of(model) == EncoderDecoder()
    batch = batch_of(text, model)
    given = batch.inputs
    assert torch.equal(given["input_ids"], text[:, :6])
    if family != "mbart":  # whose decoder starts with the last token, the language
        assert given["decoder_input_ids"].tolist() == [[0, *row[6:-1]] for row in text.tolist()]
    with torch.no_grad():
        wanted = model(input_ids=text[:, :6].contiguous(), labels=text[:, 6:].contiguous()).logits
    assert same_logits(logits_of(model, batch), wanted)
    assert prompt_length(model, text) == 1


def test_models_without_a_rule_of_their_own_get_the_start_token(tiny, ids):
    model = tiny("bart")
    expected = batch_of(ids(), model).inputs
    model.prepare_decoder_input_ids_from_labels = None
    assert torch.equal(batch_of(ids(), model).inputs["decoder_input_ids"], expected["decoder_input_ids"])
    model.config.decoder_start_token_id = None
    with pytest.raises(ModelError, match="does not say which token its decoder starts with"):
        batch_of(ids(), model)


def test_a_row_is_divided_into_equal_texts(tiny):
    assert [text_lengths(2, n) for n in (12, 13, 1)] == [[6, 6], [7, 6], [1, 0]] and text_lengths(1, 5) == [5]
    batch = batch_of(torch.arange(10).reshape(2, 5), tiny("t5"))
    assert batch.inputs["input_ids"].tolist() == [[0, 1, 2], [5, 6, 7]] and batch.labels.tolist() == [[3, 4], [8, 9]]
    assert adapter_of(tiny("t5")).of_ids(tiny("t5"), torch.arange(10).reshape(2, 5)).tokens == 10


def test_sources_and_targets_of_several_lengths(tiny):
    """A batch of transformers: what is calibrated and lost is that of each pair alone."""
    model = tiny("t5")
    ids, labels = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]]), torch.tensor([[11, 12, -100], [13, 14, 15]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    examples = examples_of(model, {"input_ids": ids, "attention_mask": mask, "labels": labels})
    assert [each.inputs["input_ids"].tolist() for each in examples] == [[[5, 6, 7, 8]], [[9, 10]]]
    assert [each.labels.tolist() for each in examples] == [[[11, 12]], [[13, 14, 15]]]
    with torch.no_grad():
        alone = [
            float(model(input_ids=each.inputs["input_ids"], labels=each.labels).loss) * each.labels.numel()
            for each in examples
        ]
    assert mean_loss(model, examples, objective_of(model, None)) == pytest.approx(sum(alone) / 5, rel=1e-5)
    found = LanguageLoss(lm_objective=objective_of(model, None))(model, examples, [0, 1])
    assert float(found) == pytest.approx(sum(alone) / 5, rel=1e-5)
    with pytest.raises(CalibrationError, match="calibration: holds input_ids; give input_ids and labels"):
        examples_of(model, {"input_ids": ids})
    with pytest.raises(CalibrationError, match="do not belong together; write integers"):
        examples_of(model, {"input_ids": ids, "labels": labels[:1]})


def test_each_half_of_a_window_stands_between_special_tokens(tiny, words):
    text = tokenizer()(Path(words).read_text(encoding="utf-8"), add_special_tokens=False).input_ids
    found, _ = model_sample(tiny("t5"), tokenizer(), words, "test", 3, 12)
    rows = [text[8 * i : 8 * i + 8] for i in range(3)]
    assert [each.inputs["input_ids"][0].tolist() for each in found] == [[2, *row[:4], 3] for row in rows]
    assert [each.labels[0].tolist() for each in found] == [[2, *row[4:], 3] for row in rows]
    with pytest.raises(CalibrationError, match="eval: length 5 has no room for text next to the special tokens"):
        model_sample(tiny("t5"), tokenizer(), words, "test", 3, 5)
    with pytest.raises(CalibrationError, match="length 129 exceeds the model's 128 positions; use length <= 128"):
        model_sample(tiny("bart"), tokenizer(), words, "test", 1, 129)
    with pytest.raises(CalibrationError, match=r"predicts target tokens .* and cannot generate text \(source self\)"):
        self_sampled(tiny("bart"), tokenizer(), 1, 8, 0)


# Runs


@pytest.mark.parametrize("family", ["t5", "t5-gated", "bart"])
def test_from_a_recipe_to_a_checkpoint(family, asked, folder, words, tmp_path):
    """The loss is the one that transformers computes from labels, also of the reloaded and of the stock model."""
    report = compress.run(asked(family, GPTQ(**INT4)), tmp_path / "out").report
    (quality,) = report["perplexity"]
    assert quality["base"]["of"] == quality["compressed"]["of"] == "target tokens"
    assert quality["base"]["tokens"] == 4 * 10 and quality["divergence"]["mean"] > 0
    assert report["verified"]["own"] <= LOGITS
    assert "| perplexity of target tokens, " in (tmp_path / "out" / "report.md").read_text()
    assert "pipeline_tag: text2text-generation" in (tmp_path / "out" / "README.md").read_text()
    model, known = compress.load(tmp_path / "out")
    text = rows_of(model_sample(model, known, words, "test", 4, 20)[0])
    original = AutoModelForSeq2SeqLM.from_pretrained(folder(family))
    stock = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out")
    assert quality["base"]["loss"] == pytest.approx(loss_of_transformers(original, text), rel=1e-5)
    for each in (model, stock):
        assert quality["compressed"]["loss"] == pytest.approx(loss_of_transformers(each, text), rel=1e-5)
    done = CliRunner().invoke(
        main, ["eval", str(tmp_path / "out"), "--text", words, "--windows", "4", "--length", "20"]
    )
    assert done.exit_code == 0 and "target" in done.stdout, done.output  # a narrow terminal folds "target tokens"
    assert f"{quality['compressed']['perplexity']:.4f}"[:4] in done.stdout, "the last digits are those of another sum"


def test_a_dense_export_is_an_ordinary_checkpoint(asked, folder, words, tmp_path):
    """Tensors of one table that several modules share are stored once, as transformers does."""
    report = compress.run(asked("bart", Wanda(sparsity=0.5), save={"format": "dense"}), tmp_path / "out").report
    assert report["verified"]["transformers"] <= LOGITS
    compress.run(asked("t5", RTN(**INT4)), tmp_path / "packed")
    compress.export(tmp_path / "packed", tmp_path / "dense", format="dense")
    one, two = (AutoModelForSeq2SeqLM.from_pretrained(tmp_path / name) for name in ("packed", "dense"))
    torch.testing.assert_close(*(logits_of(model, batch_of(torch.arange(24)[None], model)) for model in (one, two)))
    saved = json.loads((tmp_path / "dense" / "model.safetensors.index.json").read_text())["weight_map"]
    names = [name for name in saved if "embed_tokens" in name or "shared" in name or "lm_head" in name]
    assert names == ["shared.weight"]


@pytest.mark.parametrize(
    ("family", "block"),
    [("t5", 3), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("t5", 0), ("t5", 1), ("bart", 1)))],
)
def test_a_killed_run_goes_on_in_either_stack(family, block, asked, stop, tmp_path):
    """Block 1 is the last of the encoder."""
    step = GPTQ(**INT4, error="asymmetric")
    again = asked(family, step, eval=Evaluate(perplexity=()))
    wanted = compress.run(again, tmp_path / "whole").report["checkpoint_sha256"]
    stop(again, tmp_path / "killed", lambda entry: entry.kind == "block" and entry.figures["block"] == block)
    assert compress.run(again, tmp_path / "killed").report["checkpoint_sha256"] == wanted


def test_scales_in_16_bits_make_the_position_biases_that_the_checkpoint_has(asked, tmp_path):
    """The first blocks of T5 make them from a weight that is stored as rounded, so the sweep rounds it first."""
    report = compress.run(asked("t5", GPTQ(**INT4), save={"format": "native", "dtype": "bfloat16"}), tmp_path).report
    assert report["verified"]["own"] <= LOGITS


def test_run_stores_what_apply_computes(asked, folder, words, tmp_path):
    out = compress.run(asked("bart", GPTQ(**INT4), eval=Evaluate(perplexity=())), tmp_path).folder
    model = AutoModelForSeq2SeqLM.from_pretrained(folder("bart")).eval()
    text, _ = model_sample(model, tokenizer(), words, "calibration", 6, 20, 0)
    compress.apply(model, GPTQ(**INT4), text, batch=2)
    stored, _ = compress.load(out)
    text = text.batch()
    assert same_logits(logits_of(stored, text), logits_of(model, text))
    compress.save(model, tmp_path / "saved", "native")
    assert same_logits(logits_of(compress.load(tmp_path / "saved")[0], text), logits_of(model, text))


def test_the_plan_knows_bytes_and_memory(asked, tmp_path):
    planned = compress.plan(asked("bart", GPTQ(**INT4)), time=True)
    report = compress.run(asked("bart", GPTQ(**INT4)), tmp_path).report
    assert planned.checkpoint_bytes == report["predicted"]["tensor_bytes"]
    parts = [need.parts for need in planned.fit.needs if "decoder" in need.where]
    assert any(part.get("outputs of the stack before") == 6 * 10 * 32 * 4 for part in parts)
    assert planned.timing.unknown == ("the passes: the model has two stacks of blocks",)


# Quality and training


def test_the_loss_is_that_of_transformers(tiny, ids):
    model, text = tiny("t5"), ids(3, 12)
    wanted = loss_of_transformers(model, text)
    assert mean_loss(model, examples_of(model, text), objective_of(model, None)) == pytest.approx(wanted, rel=1e-6)
    found = perplexity(model, examples_of(model, text), lm_objective=objective_of(model, None))
    assert found.loss == pytest.approx(wanted, rel=1e-6) and found.of == "target tokens"


def test_a_run_that_is_killed_between_two_segments_ends_with_the_same_bytes(asked, stop, tmp_path):
    again = asked("t5", Finetune(steps=2, batch=2), RTN(**INT4), eval=Evaluate(perplexity=()))
    wanted = compress.run(again, tmp_path / "whole").report["checkpoint_sha256"]
    stop(again, tmp_path / "killed", lambda entry: entry.kind == "segment")
    assert compress.run(again, tmp_path / "killed").report["checkpoint_sha256"] == wanted


@pytest.mark.parametrize("step", [Finetune(steps=8, batch=4, learning_rate=0.01), Distill(steps=8, batch=4)])
def test_training_learns_targets_and_a_teacher(step, tiny, ids):
    teacher, text = tiny("t5"), ids(8, 16)
    model = compress.apply(copy.deepcopy(teacher), RTN(weights="int3", group_size=32), text)

    def distance():
        if isinstance(step, Finetune):
            return loss_of_transformers(model, text)
        log_p, log_q = (logits_of(each, batch_of(text, each)).log_softmax(-1) for each in (teacher, model))
        return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())

    before = distance()
    compress.apply(model, step.model_copy(update={"learning_rate": 0.01}), text, teacher=teacher)
    assert distance() < before


def progressions(count, seed):
    """Rows of ids in arithmetic progressions: the target continues the source."""
    generator = torch.Generator().manual_seed(seed)
    start, step = (torch.randint(*limits, (count, 1), generator=generator) for limits in ((0, 8), (1, 6)))
    return (start + step * torch.arange(16)) % 61 + 3


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_on_a_trained_model_calibration_pays(family, tiny):
    """The loss of rounding to 3 bits is larger than that of GPTQ, which is larger than with the original's inputs."""
    model = tiny(family).requires_grad_(True)
    for parameter in model.parameters():
        parameter.data *= 0.5 if family == "t5" else 1  # its logits are large
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for seed in range(250):
        source, target = progressions(32, seed).split(8, dim=1)
        model(input_ids=source.contiguous(), labels=target.contiguous()).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.requires_grad_(False)
    unseen, text = progressions(32, 10**6), progressions(64, 10**6 + 1)
    options, losses = {"weights": "int3", "group_size": 32}, []
    for step in (RTN(**options), GPTQ(**options), GPTQ(**options, error="asymmetric")):
        compressed = compress.apply(copy.deepcopy(model), step, text, batch=16)
        losses.append(loss_of_transformers(compressed, unseen) - loss_of_transformers(model, unseen))
    assert losses[0] > 2 * losses[1] > 0 and losses[1] > losses[2] > 0


def test_hidden_states_of_two_stacks_are_not_compared(tiny, ids):
    with pytest.raises(RecipeError, match=r"passes\[0\] distill: hidden and cosine compare the hidden states of one"):
        compress.apply(tiny("t5"), Distill(steps=1, hidden=1.0, top_k=None), ids())


def test_it_generates_from_a_prompt(folder):
    done = CliRunner().invoke(main, ["generate", folder("bart"), "w7 w8 w9", "--tokens", "4"])
    assert done.exit_code == 0, done.output
    model = AutoModelForSeq2SeqLM.from_pretrained(folder("bart"))
    made = model.generate(torch.tensor([[2, 7, 8, 9, 3]]), max_new_tokens=4, do_sample=False)[0, 1:]
    assert done.stdout.strip() == tokenizer().decode(made, skip_special_tokens=True).strip()


# What is refused


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["sensitivity"], "the sensitivity of layers is measured on next tokens"),
        (["roofline"], "the roofline is that of a decoder alone"),
    ],
)
def test_commands_for_next_tokens_say_so(command, said, folder, tmp_path):
    more = ["--choice", "int4", "--out", str(tmp_path / "found.json")] if command == ["sensitivity"] else []
    result = CliRunner().invoke(main, [*command, folder("bart"), *more])
    assert result.exit_code == 2 and said in result.stderr and result.stderr.count("\n") == 1, result.output


def test_a_shared_table_is_no_target_and_may_be_ignored(asked, tmp_path):
    for target in ("lm_head", "embed_tokens"):
        with pytest.raises(TargetError, match=f"pattern '{target}' matches no linear"):
            compress.plan(asked("bart", RTN(**INT4, targets=["*", target])))
    compress.plan(asked("bart", RTN(**INT4, ignore=["lm_head"])))


def test_a_head_of_its_own_is_a_target(tiny, recipe, ids, tmp_path):
    tiny("bart", tie_word_embeddings=False).save_pretrained(tmp_path / "model")
    step = GPTQ(**INT4, targets=["*", "lm_head"])
    asked = recipe(step, model=str(tmp_path / "model"), save={"format": "native"}, eval=Evaluate(perplexity=()))
    report = compress.run(asked, tmp_path / "out").report
    assert "lm_head" in {layer["layer"] for layer in report["layers"]} and report["verified"]["own"] <= LOGITS


def test_the_plan_says_that_transformers_cannot_read_a_format(asked):
    """transformers initializes T5 by reading the weights of its linears."""
    packed = {"save": {"format": "compressed-tensors"}}
    reason = "transformers initializes this model's linears by their weight"
    for family, is_told in (("t5", True), ("bart", False)):
        planned = compress.plan(asked(family, RTN(weights="int4", group_size=16), **packed))
        assert any(reason in note for note in planned.notes) == is_told
