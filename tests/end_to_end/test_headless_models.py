"""Models without a language-model head, of every kind: every pass works or says why not, and a run is judged by the
agreement of the answers with those of the base model, from a folder to a checkpoint, its report and its commands."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
import yaml
from batches import batch_of, ids_of
from click.testing import CliRunner
from encoders import tokenizer, write_words
from headless import KINDS, headless
from tolerances import LOGITS, same_logits

import compress
from compress import GPTQ, RTN, Calibration, Distill, Evaluate, Finetune
from compress.cli import main
from compress.errors import CalibrationError, ModelError, RecipeError
from compress.models.forward import logits_of
from compress.models.kinds.contract import DISTRIBUTIONS
from compress.models.kinds.kinds import kind_of
from compress.numerics.metrics import relative_error
from compress.passes import PASSES
from compress.recipe.schema import read_passes

INT4 = {"weights": "int4", "group_size": 16}
INT8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}
TAUGHT = {"steps": 2, "ce_weight": 0}
SPECIAL = {
    "aqlm": [{"aqlm": {"bits": 4, "rounds": 1}}],
    "billm": [{"billm": {"block_size": 32, "most_salient": 8}}],
    "spqr": [{"spqr": {"outliers": 0.01}}],
    "quantease": [{"quantease": {**INT4, "iterations": 4}}],
    "bcq": [{"bcq": {"group_size": 16}}],
    "qtip": [{"qtip": {"states": 6}}],
    "pb_llm": [{"pb_llm": {"group_size": 16}}],
    "squeezellm": [{"squeezellm": {"bits": 2, "sensitivity": "none"}}],
    "awq": [{"awq": INT4}, {"rtn": INT4}],
    "block_ap": [{"block_ap": {**INT4, "steps": 2}}],
    "channel_permutation": [{"channel_permutation": {}}, {"wanda": {"pattern": "2:4"}}],
    "distill": [{"rtn": INT4}, {"distill": {"steps": 2}}],
    "drop_blocks": [{"drop_blocks": {"count": 1}}],
    "finetune": [{"finetune": TAUGHT}],
    "gmp": [{"gmp": {"sparsity": 0.5, **TAUGHT}}],
    "iterative_pruning": [{"iterative_pruning": {"sparsity": 0.5, "rounds": 1, **TAUGHT}}],
    "lkd": [{"rtn": INT4}, {"lkd": {"steps": 2}}],
    "lorc": [{"rtn": INT4}, {"lorc": {"rank": 2}}],
    "mixed_precision": [{"rtn": INT8}, {"mixed_precision": {}}],
    "narrow": [{"narrow": {"ffn": 0.25}}],
    "omniquant": [{"omniquant": {**INT4, "epochs": 1}}],
    "owq": [{"owq": {"group_size": 16}}],
    "qat": [{"qat": {**INT4, **TAUGHT}}],
    "rotate": [{"rotate": {"residual": False}}, {"rtn": INT4}],
    "signround": [{"signround": {**INT4, "iterations": 2}}],
    "smoothquant": [{"smoothquant": {}}, {"rtn": INT8}],
    "outlier_suppression": [{"outlier_suppression": {"steps": 2}}, {"rtn": INT8}],
    "fptq": [{"fptq": {}}, {"rtn": {"weights": "int8", "group_size": "channel"}}],
    "rptq": [
        {"rptq": {"clusters": 4, "activation_scale": "token"}},
        {"rtn": {"weights": "int8", "group_size": "channel"}},
    ],
    "qllm": [{"qllm": {**INT8, "rank": 1, "steps": 2}}, {"rtn": INT8}],
    "sparsegpt": [{"sparsegpt": {"pattern": "2:4"}}],
    "sr_ste": [{"sr_ste": TAUGHT}],
    "top_kast": [{"top_kast": {"sparsity": 0.5, **TAUGHT}}],
}
"""Recipes that small models need, or other passes beside that of their key."""
REFUSED = {
    "kv_cache": ({}, r"has no KV cache \(no attention module passes keys"),
    "drop_experts": ({"count": 1}, "no block of this model has experts"),
    "slicegpt": ({"multiple": 4}, "a rotation of the hidden states would mix heads"),
}
"""The options of a pass, and why no encoder has it."""


def chain_of(key):
    """The recipe of a pass: a special one, its defaults, or int4 if it rounds to a grid of the recipe."""
    grids = PASSES.kind(key) == "quantize" and "weights" in PASSES[key].model_fields
    return SPECIAL.get(key, [{key: INT4 if grids else {}}])


WORKS = {key: chain_of(key) for key in PASSES if key not in REFUSED}
"""Passes by the key of the one that they are for."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """folder(name) -> a model of `KINDS` with a tokenizer that has no token for padding."""
    made = tmp_path_factory.mktemp("headless")

    def save(name: str) -> str:
        place = made / name.replace(" ", "-")
        if not place.exists():
            headless(name).save_pretrained(place)
            tokenizer(pad_token=None).save_pretrained(place)
        return str(place)

    return save


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    """A text of the tokenizer's words."""
    return write_words(tmp_path_factory.mktemp("texts") / "words.txt", 600)


@pytest.fixture
def asked(recipe, folder, words):
    """asked(name, *passes, **options): a recipe for a model of a kind."""
    text = Calibration(source=words, sequences=8, length=24)
    measured = Evaluate(agreement=(words,), windows=6, length=24)

    def build(name, *passes, **options):
        return recipe(*passes, model=folder(name), **{"calibration": text, "eval": measured, **options})

    return build


def told(*args, code: int = 2) -> str:
    """The one line on standard error of a command that must fail."""
    result = CliRunner().invoke(main, [str(a) for a in args])
    assert result.exit_code == code and result.stderr.count("\n") == 1, result.output
    return result.stderr


@pytest.mark.few(16, slow=32)
@pytest.mark.parametrize("name", ["encoder", "spans", "classes", "tokens", "score"])
@pytest.mark.parametrize("key", WORKS)
def test_every_pass_works_on_every_kind(name, key, ids):
    model = headless(name, **({"n_layers": 3} if name == "classes" else {"num_hidden_layers": 3}))
    before = logits_of(model, batch_of(ids()))
    compress.apply(model, read_passes(WORKS[key]), ids())
    after = logits_of(model, batch_of(ids()))
    assert after.shape == before.shape and bool(after.isfinite().all())
    assert relative_error(after, before) < 1.5


@pytest.mark.parametrize("name", ["encoder", "spans"])
def test_passes_that_need_what_no_encoder_has_are_refused(name, ids):
    for key, (options, reason) in REFUSED.items():
        with pytest.raises(compress.errors.CompressError, match=reason):
            compress.apply(headless(name), read_passes([{key: options}]), ids())


@pytest.mark.parametrize("name", KINDS)
def test_a_run_of_every_kind(name, asked, tmp_path, ids):
    result = compress.run(asked(name, GPTQ(**INT4), save={"format": "native"}), tmp_path)
    (found,) = result.report["agreement"]
    model = headless(name)
    assert result.report["perplexity"] == [] and found["windows"] == 6
    assert found["compared"] == kind_of(model).compared_in(model.config)
    assert result.report["verified"]["own"] <= LOGITS
    loaded, _ = compress.load(tmp_path)
    other = type(model).from_pretrained(tmp_path).eval()
    assert same_logits(logits_of(loaded, batch_of(ids())), logits_of(other, batch_of(ids())))
    exact = {
        "cosine": 1,
        "rank": 1,
        "same": 1,
        "kl": 0,
        "same_span": 1,
        "overlap": 1,
        "score_rank": 1,
        "score_error": 0,
    }
    assert found["measures"] and all(abs(m["value"] - exact[n]) < 1 for n, m in found["measures"].items())
    distance = relative_error(logits_of(loaded, batch_of(ids())), logits_of(model, batch_of(ids())))
    assert 0 < distance < 0.5


@pytest.mark.parametrize("name", ["encoder", "tokens", "spans"])
def test_transformers_reads_compressed_tensors(name, asked, tmp_path):
    result = compress.run(asked(name, RTN(**INT4), eval=None), tmp_path)
    assert result.report["verified"]["transformers"] <= LOGITS


def test_the_report_speaks_of_agreement(asked, tmp_path):
    compress.run(asked("encoder", RTN(**INT4)), tmp_path)
    text, page, card = ((tmp_path / name).read_text() for name in ("report.md", "report.html", "README.md"))
    assert "; the embeddings agree to 0.9" in text and "rank as before to" in text
    assert "the embeddings agree to 0.9" in page and "Agreement with the base model" in page
    assert "pipeline_tag: feature-extraction" in card and "import AutoModel, AutoTokenizer" in card
    assert "perplexity of" not in text and "quality was not measured" not in text + page
    report = json.loads((tmp_path / "report.json").read_text())
    assert set(report["agreement"][0]["measures"]["cosine"]) == {"value", "stderr"}
    with pytest.raises(ValueError, match="compared"):
        changed = copy.deepcopy(report)
        changed["agreement"][0]["compared"] = "perplexities"
        compress.results.result.RunResult.from_json(changed)


def test_the_commands(asked, tmp_path, folder, words):
    path, out, other = tmp_path / "r.yaml", tmp_path / "out", tmp_path / "other"
    path.write_text(asked("classes", RTN(**INT4)).to_yaml())
    run = lambda *args: CliRunner().invoke(main, [str(a) for a in args], catch_exceptions=False)  # noqa: E731
    assert run("plan", path).exit_code == 0
    assert run("run", path, "-o", out).exit_code == 0
    assert run("run", path, "--set", "passes.0.rtn.weights=int8", "-o", other).exit_code == 0
    shape = ("--text", words, "--windows", 6, "--length", 24)
    shown = run("eval", folder("classes"), out, *shape, "--work", tmp_path / "work", "--json")
    (base, found) = json.loads(shown.stdout)["models"]
    assert base["agreement"] is None and base["perplexity"] == []
    reported = json.loads((out / "report.json").read_text())["agreement"]  # which names no folder
    assert found["agreement"] == [text | {"text": str(words)} for text in reported]
    assert [text["text"] for text in reported] == [Path(words).name]
    table = run("eval", folder("classes"), out, *shape, "--work", tmp_path / "work").stdout
    assert "predicted" in table and "perplexity" not in table
    compared = run("compare", out, other, "-o", tmp_path / "plot.html")
    assert compared.exit_code == 0 and "changed classes" in compared.stdout and "nats:" not in compared.stdout
    assert "changed classes" in (tmp_path / "plot.html").read_text()
    measured = run("compare", out, other, "--base", folder("classes"), *shape, "--work", tmp_path / "work", "--json")
    assert [one["measure"] for one in json.loads(measured.stdout)] == ["changed classes"] * 2
    assert run("inspect", out).exit_code == 0
    assert "needs next tokens" not in told("generate", out, "w5") and "generates no text" in told("generate", out, "w5")
    assert "measured on next tokens" in told("sensitivity", folder("classes"), "--choice", "int4", "--text", words)


def test_a_model_alone_has_no_agreement(folder, words, tmp_path):
    line = told("eval", folder("spans"), "--text", words, "--length", 24, "--work", tmp_path)
    assert "BertForQuestionAnswering is a question answering model, whose quality is its agreement with a base" in line


def test_models_of_two_kinds_are_not_compared(folder, words, tmp_path):
    args = "eval", folder("spans"), folder("encoder"), "--text", words, "--length", "24", "--work", str(tmp_path)
    line = CliRunner().invoke(main, args).stderr.splitlines()[-1]
    assert "is a question answering model" in line and "is an encoder; evaluate them in two calls" in line


# Learning from a teacher


def distance(model, base, text) -> float:
    """Of the probabilities in the answers, or of the answers where they have none."""
    compared = kind_of(base).compared_in(base.config)
    both = [logits_of(each, batch_of(text)) for each in (model, base)]
    logits = [DISTRIBUTIONS[compared](answer) for answer in both]
    return relative_error(*(both if logits[0] is None else [each.softmax(-1) for each in logits]))


@pytest.mark.parametrize("name", ["encoder", "classes", "labels", "score", "tokens", "spans"])
@pytest.mark.parametrize("options", [{}, {"top_k": None, "hidden": 1.0}], ids=["stored", "hidden"])
def test_distillation_brings_the_answers_back(name, options, ids):
    base, text = headless(name), ids(16, 16)
    model = compress.apply(copy.deepcopy(base), [RTN(weights="int3", group_size=32)])
    before = distance(model, base, text)
    step = Distill(steps=30, batch=8, learning_rate=0.005, **options)
    compress.apply(model, [step], text, teacher=base)
    assert distance(model, base, text) < 0.9 * before


def test_a_loss_on_the_text_is_refused_before_the_run(asked, tmp_path, ids):
    reason = r"passes\[0\] finetune: BertModel is an encoder without a language-model head, so it has no loss on the "
    with pytest.raises(RecipeError, match=reason + "text; write ce_weight: 0"):
        compress.run(asked("encoder", Finetune(steps=1)), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(RecipeError, match="drop_blocks: .* write by: influence"):
        compress.apply(headless("encoder"), read_passes([{"drop_blocks": {"count": 1, "by": "loss"}}]), ids())
    with pytest.raises(RecipeError, match="leave token_scale out"):
        compress.apply(headless("encoder"), [RTN(**INT4), Distill(steps=1, token_scale=1.0)], ids())


def test_a_teacher_of_another_kind_or_with_other_labels_is_refused(ids, tiny):
    steps = [RTN(**INT4), Distill(steps=1)]
    with pytest.raises(ModelError, match="teacher: it is an encoder, the model is a question answering model"):
        compress.apply(headless("spans"), steps, ids(), teacher=headless("encoder"))
    with pytest.raises(ModelError, match="teacher: it predicts next tokens, the model is an encoder"):
        compress.apply(headless("encoder"), steps, ids(), teacher=tiny("llama"))
    with pytest.raises(ModelError, match="teacher: it has num_labels 2, the model 5"):
        compress.apply(headless("classes"), steps, ids(), teacher=headless("classes", num_labels=2))


# Texts


def test_the_special_tokens_are_around_every_window(folder, words):
    opened = compress.checkpoint.opening.open_model(folder("encoder"))
    ids, _ = compress.data.ids.model_sample(opened.model, opened.tokenizer, words, "test", 3, 10)
    ids = ids_of(ids)
    assert ids.shape == (3, 10) and ids[:, 0].tolist() == [2] * 3 and ids[:, -1].tolist() == [3] * 3


def test_perplexity_is_refused_with_what_to_write(asked, words, tmp_path):
    path = tmp_path / "r.yaml"
    values = yaml.safe_load(asked("encoder", RTN(**INT4)).to_yaml())
    path.write_text(yaml.safe_dump({**values, "eval": {"perplexity": [words], "windows": 4, "length": 24}}))
    for command in (["plan", path], ["run", path, "-o", tmp_path / "out"]):
        line = told(*command)
        assert f"eval: BertModel is an encoder, which has no perplexity; write agreement: [{words}]" in line
    assert not (tmp_path / "out").exists()
    path.write_text(yaml.safe_dump({**values, "eval": {"perplexity": []}}))
    assert CliRunner().invoke(main, ["plan", str(path)]).exit_code == 0


def test_agreement_is_refused_for_a_language_model(recipe, words):
    with pytest.raises(
        RecipeError, match=r"LlamaForCausalLM predicts next tokens, so its loss .* write perplexity: \["
    ):
        compress.plan(recipe(RTN(**INT4), eval=Evaluate(agreement=(words,))))


def test_the_written_recipe_runs_again(asked, tmp_path):
    compress.run(asked("encoder", RTN(**INT4)), tmp_path / "one")
    again = compress.Recipe.from_yaml(tmp_path / "one" / "recipe.yaml")
    result = compress.run(again, tmp_path / "two")
    assert result.report["agreement"] == json.loads((tmp_path / "one" / "report.json").read_text())["agreement"]


def test_a_text_shorter_than_a_sequence(asked, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text("w5 w6 w7 w8")
    with pytest.raises(
        CalibrationError, match="text has 4 tokens, fewer than one sequence of 22; use a shorter length"
    ):
        compress.run(
            asked("encoder", GPTQ(**INT4), calibration=Calibration(source=str(short), length=24)), tmp_path / "out"
        )


def test_a_folder_without_tokenizer(recipe, tmp_path, texts):
    headless("tokens").save_pretrained(tmp_path / "model")
    asked = recipe(GPTQ(**INT4), model=str(tmp_path / "model"), eval=None)
    assert compress.run(asked, tmp_path / "out").report["verified"]["own"] <= LOGITS  # ids of a .npy file need none
    with pytest.raises(CalibrationError, match="the model has no tokenizer; use token ids in a .npy file"):
        text = Calibration(source="embedded", sequences=2, length=16)
        compress.plan(recipe(GPTQ(**INT4), model=str(tmp_path / "model"), eval=None, calibration=text))


@pytest.mark.parametrize("shape", [(0, 8), (4, 0), (0, 0)])
def test_no_tokens_are_no_calibration(shape, tmp_path, asked, ids):
    with pytest.raises(CalibrationError, match=r"calibration: holds no tokens .* use token ids \[sequences, length\]"):
        compress.apply(headless("encoder"), [GPTQ(**INT4)], torch.zeros(shape, dtype=torch.int64))
    np.save(tmp_path / "none.npy", np.zeros(shape, dtype=np.int64))
    with pytest.raises(CalibrationError, match="holds no tokens"):
        text = Calibration(source=str(tmp_path / "none.npy"), sequences=None, length=None)
        compress.plan(asked("encoder", GPTQ(**INT4), calibration=text))


def test_a_decoder_that_classifies_without_a_token_for_padding(ids):
    """transformers refuses batches of such a model, in which it cannot find the last token of a text."""
    sizes = {key: value for key, value in KINDS["decoder without a head"][1].items() if key != "pad_token_id"}
    torch.manual_seed(0)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**sizes, num_labels=3)).eval()
    compress.apply(model, [GPTQ(**INT4)], ids())
    compress.apply(model, [Distill(steps=2, batch=4)], ids())
    assert logits_of(model, batch_of(ids(1))).shape == (1, 3)


def test_init_writes_agreement(folder, tmp_path):
    result = CliRunner().invoke(main, ["init", folder("encoder"), "-o", str(tmp_path / "r.yaml")])
    assert result.exit_code == 0, result.output
    written = compress.Recipe.from_yaml(tmp_path / "r.yaml").eval
    assert written.agreement == ("embedded",) and "perplexity" not in written.model_fields_set


# Files of sentence-transformers


def with_modules(folder: str, out: Path, pooling: str = "pooling_mode_cls_token") -> Path:
    """A copy of a model with the files of sentence-transformers."""
    for path in Path(folder).iterdir():
        out.mkdir(exist_ok=True)
        (out / path.name).write_bytes(path.read_bytes())
    paths = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    listed = [{"idx": i, "name": f"{i}", "path": path, "type": kind} for i, (path, kind) in enumerate(paths.items())]
    (out / "modules.json").write_text(json.dumps(listed))
    (out / "1_Pooling").mkdir()
    (out / "1_Pooling" / "config.json").write_text(json.dumps({pooling: True, "word_embedding_dimension": 32}))
    (out / "sentence_bert_config.json").write_text('{"max_seq_length": 64}')
    return out


def test_the_files_of_sentence_transformers_travel_and_say_how_to_pool(asked, folder, tmp_path):
    model, out = with_modules(folder("encoder"), tmp_path / "model"), tmp_path / "out"
    mean = compress.run(asked("encoder", RTN(**INT4)), tmp_path / "mean").report["agreement"][0]["measures"]
    result = compress.run(asked("encoder", RTN(**INT4)).model_copy(update={"model": str(model)}), out)
    for name in ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json"):
        assert (out / name).read_bytes() == (model / name).read_bytes()
    compress.load(out, verify=True)
    assert result.report["agreement"][0]["measures"] != mean  # the first token's state is another embedding


def test_modules_with_weights_are_told(asked, folder, tmp_path):
    model = with_modules(folder("encoder"), tmp_path / "model")
    (model / "1_Pooling" / "model.safetensors").write_bytes(b"")
    result = compress.run(asked("encoder", RTN(**INT4)).model_copy(update={"model": str(model)}), tmp_path / "out")
    notes = [entry["message"] for entry in result.report["journal"]["entries"]]
    assert "1_Pooling/model.safetensors of sentence-transformers was not copied, nor modules.json; copy them" in notes
    assert not (tmp_path / "out" / "modules.json").exists()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{}", "it holds no list of objects"),
        ('[{"path": ".."}]', "outside of the folder"),
        ('[{"path": 3}]', "each of"),
        ('[{"path": "a/b"}]', "each of"),
        ("[", "not a valid JSON file"),
        ("3", "it holds no list of objects"),
        ("[" * 70 + "]" * 70, "nested in more than 64 levels"),
    ],
)
def test_modules_that_are_none(asked, folder, tmp_path, text, reason):
    model = with_modules(folder("encoder"), tmp_path / "model")
    (model / "modules.json").write_text(text)
    with pytest.raises(ModelError, match=f"modules.json cannot be read: .*{reason}"):
        compress.plan(asked("encoder", RTN(**INT4)).model_copy(update={"model": str(model)}))
