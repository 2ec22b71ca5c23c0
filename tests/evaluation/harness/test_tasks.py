"""Tasks of lm-eval on local files: agreement with lm-eval's own backend, failures, and kept results."""

import json

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import compress
from compress import Evaluate
from compress.cli import main
from compress.errors import RecipeError
from compress.evaluation.base import EvaluationContext
from compress.evaluation.harness.adapter import harness_model, quiet
from compress.evaluation.harness.tasks import check_tasks, load_tasks, local_files, run_task, task_manager
from compress.evaluation.store import Results, Store
from compress.evaluation.tasks import Tasks, compare, pairing
from compress.passes.contract.context import Run
from compress.passes.contract.journal import Journal
from compress.results.measurements.tasks import TaskScore, TasksMeasurement, TasksResult

pytest.importorskip("lm_eval", reason="the package lm-eval is not installed")

ROWS = {
    "piqa": [
        {"goal": f"To open the {thing}", "sol1": f"turn the {thing} to the left.", "sol2": "eat it.", "label": i % 2}
        for i, thing in enumerate(["door", "jar", "box", "window", "can", "book"])
    ],
    "boolq": [
        {"passage": "The module defines functions.", "question": f"is {name} a function", "label": i % 2, "idx": i}
        for i, name in enumerate(["print", "list", "open", "class"])
    ],
    "winogrande": [
        {"sentence": f"The {a} hit the {b} because the _ was fast.", "option1": a, "option2": b, "answer": "1"}
        for a, b in [("car", "bus"), ("dog", "cat"), ("boy", "ball")]
    ],
    "lambada_openai": [{"text": f"The value of the expression is the {word}"} for word in ("object", "module", "list")],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder of local files as --data takes it."""
    folder = tmp_path_factory.mktemp("tasks")
    for task, rows in ROWS.items():
        (folder / task).mkdir()
        split = "test" if task == "lambada_openai" else "validation"
        (folder / task / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def measure(pico, data):
    """measure(model, **settings): the result of all tasks on a model, and the journal."""

    def run(model, store=None, template=None, **settings):
        asked = Evaluate(**{"tasks": tuple(ROWS), "data": str(data), **settings})
        tokenizer, journal = AutoTokenizer.from_pretrained(pico), Journal()
        tokenizer.chat_template = template
        context = EvaluationContext(Run(journal=journal), tokenizer=tokenizer, settings=asked, store=store or Store())
        return Tasks().measure(model, context), journal

    return run


def test_results_are_those_of_the_backend_of_lm_eval(pico_model, pico, measure, data):
    from lm_eval.models.huggingface import HFLM

    found, journal = measure(pico_model)
    assert found["scores"].keys() == ROWS.keys() and found["failed"] == {} and journal.entries == []
    settings = Evaluate(tasks=tuple(ROWS), data=str(data))
    with quiet():
        theirs = HFLM(pretrained=pico_model, tokenizer=AutoTokenizer.from_pretrained(pico), batch_size=3)
    for name in ROWS:
        [(_, task)] = load_tasks(name, task_manager(settings), settings).items()
        wanted = run_task(name, task, theirs, settings)
        assert wanted["metrics"].keys() == found["scores"][name]["metrics"].keys()
        for metric, values in wanted["metrics"].items():
            ours = found["scores"][name]["metrics"][metric]
            assert ours["value"] == pytest.approx(values["value"], rel=1e-5), (name, metric)
            assert ours["stderr"] == pytest.approx(values["stderr"], rel=1e-4)
        assert found["scores"][name]["items"] == len(ROWS[name])


def test_plain_tasks_need_no_index_of_all(tmp_path):
    """The files of a few tasks are those that the index of all has; a group or an unknown name needs that."""
    names = ("piqa", "arc_challenge", "hellaswag", "gsm8k", "mmlu_anatomy")
    few, whole = task_manager(Evaluate(tasks=names)), task_manager(Evaluate(tasks=("arc_easy", "mmlu")))
    assert len(few.all_tasks) < 1000 < len(whole.all_tasks)
    for name in names:
        assert few.task_index[name].yaml_path == whole.task_index[name].yaml_path, name
    for others in (("piqa", "no_such_task"), ("openllm",), (str(tmp_path / "own.yaml"),)):
        assert task_manager(Evaluate(tasks=others)) is whole
    (tmp_path / "own.yaml").write_text("task: own\ndataset_path: json\n")
    assert "own" in task_manager(Evaluate(tasks=names, data=str(tmp_path))).all_tasks


def test_the_settings_of_a_task_are_recorded(pico_model, measure):
    found, _ = measure(pico_model, tasks=("piqa",), limit=2, fewshot=1, seed=3)
    score = TaskScore.model_validate(found["scores"]["piqa"])
    assert (score.items, score.of, score.fewshot) == (2, 6, 1)
    assert (found["limit"], found["seed"], found["chat_template"]) == (2, 3, False) and found["lm_eval"]
    plain, _ = measure(pico_model, tasks=("piqa",), limit=2)
    assert plain["scores"]["piqa"]["fewshot"] == 0


def test_a_task_that_fails_does_not_lose_the_others(pico_model, measure, data):
    (data / "sciq").mkdir(exist_ok=True)
    (data / "sciq" / "test.jsonl").write_text('{"question": "What?", "distractor1": "a"}\n')
    found, journal = measure(pico_model, tasks=("sciq", "arc_easy", "piqa"))
    assert found["scores"].keys() == {"piqa"} and found["failed"].keys() == {"sciq", "arc_easy"}
    assert "task sciq cannot be" in found["failed"]["sciq"]
    assert "distractor" in found["failed"]["sciq"] or "support" in found["failed"]["sciq"]
    unreachable = found["failed"]["arc_easy"]
    assert "task arc_easy cannot be loaded and" in unreachable and "holds no data file of it" in unreachable
    assert "use a data folder with arc_easy/validation.parquet" in unreachable
    assert [entry.message for entry in journal.entries] == list(found["failed"].values())


def test_nan_logits_fail_the_task(pico_model, measure):
    with torch.no_grad():
        pico_model.lm_head.weight[5] = float("nan")
    found, _ = measure(pico_model, tasks=("piqa",))
    assert "task piqa cannot be run: the model's logits are NaN" in found["failed"]["piqa"]


def test_a_model_that_predicts_masked_tokens_fails_tasks(tiny, measure):
    found, _ = measure(tiny("bert"), tasks=("piqa",))
    assert "predicts masked tokens; tasks need next tokens" in found["failed"]["piqa"]


def test_a_chat_template_that_does_not_exist(pico_model, measure):
    found, _ = measure(pico_model, tasks=("piqa",), chat_template=True)
    assert "has no chat template; write chat_template: false" in found["failed"]["piqa"]


def test_prompts_of_a_chat_template_are_those_of_the_backend_of_lm_eval(pico_model, pico, measure, data):
    from lm_eval.models.huggingface import HFLM

    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "<{{ m.role }}>{{ m.content }}{% endfor %}"
    )
    found, _ = measure(pico_model, template=template, tasks=("piqa",), chat_template=True)
    settings = Evaluate(tasks=("piqa",), data=str(data), chat_template=True)
    tokenizer = AutoTokenizer.from_pretrained(pico)
    tokenizer.chat_template = template
    [(_, task)] = load_tasks("piqa", task_manager(settings), settings).items()
    with quiet():
        theirs = HFLM(pretrained=pico_model, tokenizer=tokenizer, batch_size=3)
        wanted = run_task("piqa", task, theirs, settings)
    for metric, values in wanted["metrics"].items():
        assert found["scores"]["piqa"]["metrics"][metric]["value"] == pytest.approx(values["value"], rel=1e-5)


def test_a_chat_template_without_end_fails_the_task(pico_model, measure):
    found, _ = measure(pico_model, template="{{ 'a' * 10 ** 10 }}", tasks=("piqa",), limit=1, chat_template=True)
    assert "task piqa cannot be run" in found["failed"]["piqa"] and "1 GiB of memory" in found["failed"]["piqa"]


def test_a_killed_evaluation_continues(pico_model, measure, tmp_path):
    store, calls = Store(tmp_path, "m"), []
    whole, _ = measure(pico_model, store)
    path = tmp_path / "m" / "requests" / "0.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[: len(lines) // 2]) + lines[-1][:30])  # killed half-way, in a line
    pico_model.register_forward_pre_hook(lambda *_: calls.append(1))
    again, _ = measure(pico_model, store)
    computed = len(calls)
    for name in ROWS:
        for metric, values in whole["scores"][name]["metrics"].items():
            assert again["scores"][name]["metrics"][metric]["value"] == pytest.approx(values["value"], rel=1e-6)
    measure(pico_model, store)
    assert 0 < computed == len(calls)  # the third one computes nothing


def test_prompts_that_are_too_long_are_noted(pico_model, measure):
    pico_model.config.max_position_embeddings = 12
    _, journal = measure(pico_model, tasks=("piqa",))
    assert "are longer than the model's context of 12 and lost their start" in journal.entries[0].message


def test_rolling_loglikelihoods_and_generation_are_those_of_lm_eval(pico_model, pico):
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    tokenizer = AutoTokenizer.from_pretrained(pico)
    with quiet():
        theirs = HFLM(pretrained=pico_model, tokenizer=tokenizer, batch_size=1, max_length=16)
    ours = harness_model(pico_model, tokenizer, Results(None), lambda *_: None, lambda _: None)
    text = "The module defines a number of functions that return the value of an object."
    rolling = [Instance("loglikelihood_rolling", {}, (text,), 0)]
    with quiet():
        assert ours.loglikelihood_rolling(rolling) == pytest.approx(
            HFLM(pretrained=pico_model, tokenizer=tokenizer, batch_size=1).loglikelihood_rolling(rolling), rel=1e-5
        )
        asked = [Instance("generate_until", {}, (text[:20], {"until": ["."], "max_gen_toks": 8}), 0)]
        assert ours.generate_until(asked) == theirs.generate_until(asked)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tasks": ("arc_esy",)}, "eval tasks: 'arc_esy' is not known; did you mean 'arc_easy'?"),
        ({"tasks": ("piqa",), "data": "no/such/folder"}, "eval data: no folder no/such/folder"),
    ],
)
def test_what_is_checked_before_a_model_is_loaded(settings, message):
    with pytest.raises(RecipeError, match=message.replace("?", r"\?")):
        check_tasks(Evaluate(**settings))


def test_local_files_by_split(tmp_path):
    (tmp_path / "t").mkdir()
    for name in ("train.parquet", "dev.parquet", "notes.txt"):
        (tmp_path / "t" / name).write_text("")
    assert local_files("t", str(tmp_path)) == {
        "training_split": str(tmp_path / "t" / "train.parquet"),
        "validation_split": str(tmp_path / "t" / "dev.parquet"),
    }
    assert local_files("other", str(tmp_path)) == local_files("t", None) == {}


def test_task_files_in_the_folder_are_tasks(pico_model, measure, data, tmp_path):
    rows = data / "piqa" / "validation.jsonl"
    (tmp_path / "own.yaml").write_text(
        f"task: own_piqa\ndataset_path: json\ndataset_kwargs: {{data_files: {{validation: {rows}}}}}\n"
        "output_type: multiple_choice\nvalidation_split: validation\ndoc_to_text: '{{goal}}'\n"
        "doc_to_target: label\ndoc_to_choice: '{{[sol1, sol2]}}'\nmetric_list: [{metric: acc}]\n"
    )
    found, _ = measure(pico_model, tasks=("own_piqa",), data=str(tmp_path))
    assert found["scores"]["own_piqa"]["items"] == 6
    again, _ = measure(pico_model, tasks=(str(tmp_path / "own.yaml"),), data=None)
    assert again["scores"]["own_piqa"]["metrics"] == found["scores"]["own_piqa"]["metrics"]


def test_pairs_by_hand():
    found = pairing([0, 0, 1, 1], [1, 0, 0, 0])
    assert (found.gained, found.lost, found.p) == (1, 2, 1.0) and found.difference == -0.25
    assert found.low < -0.25 < found.high
    plain = pairing([0.5, 1.5], [1.0, 2.5])
    assert plain.difference == 0.75 and plain.p is None and plain.stderr == pytest.approx(0.25)
    assert pairing([1.0], None) is None and pairing([1.0], [1.0, 0.0]) is None


def test_both_models_on_the_same_items(pico_model, measure):
    base, _ = measure(pico_model, tasks=("piqa", "lambada_openai"))
    other, _ = measure(compress.apply(pico_model, compress.RTN(weights="int2")), tasks=("piqa", "lambada_openai"))
    result = TasksResult.model_validate(Tasks().combine(other, base))
    rows = {(row.task, row.metric): row for row in result.scores}
    assert rows.keys() == {
        ("piqa", "acc"),
        ("piqa", "acc_norm"),
        ("lambada_openai", "acc"),
        ("lambada_openai", "perplexity"),
    }
    right = rows["piqa", "acc"]
    assert right.paired.gained - right.paired.lost == round(6 * (right.compressed - right.base))
    assert rows["lambada_openai", "perplexity"].paired is None
    same = compare(*(TaskScore.model_validate(base["scores"]["piqa"]),) * 2, "acc")
    assert (same.paired.gained, same.paired.lost, same.paired.p) == (0, 0, 1.0)
    assert len(TasksMeasurement.summary(result)) == 4 and "p " in TasksMeasurement.summary(result)[0][3]


def test_compress_eval_prints_tasks_and_fails_for_those_that_failed(pico, data, tmp_path):
    args = ["eval", pico, pico, "--text", "none", "--tasks", "piqa", "--data", str(data), "--work", str(tmp_path / "w")]
    done = CliRunner().invoke(main, [*args, "-o", str(tmp_path / "found.json")])
    assert done.exit_code == 0, done.output
    assert "acc_norm" in done.stdout and "6 of 6" in done.stdout
    [model] = json.loads((tmp_path / "found.json").read_text())["models"]
    assert model["items"]["piqa"]["items"] == 6 and model["tasks"] is None
    broken = CliRunner().invoke(main, [*args[:6], "arc_easy,piqa", *args[7:]])
    assert broken.exit_code == 1 and "1 tasks failed" in broken.stderr and "6 of 6" in broken.stdout
    assert "failed: " in broken.stdout


def test_tasks_of_a_tied_model_whose_embedding_is_packed(pico, data, tmp_path):
    """lm-eval ties the weights of the model again."""
    from lm_eval.models.huggingface import HFLM

    model = AutoModelForCausalLM.from_pretrained(pico)
    compress.apply(model, compress.RTN(targets=["*", "lm_head", "embed_tokens"], weights="int8", group_size="channel"))
    tokenizer = AutoTokenizer.from_pretrained(pico)
    folder = str(compress.save(model, tmp_path / "packed", tokenizer=tokenizer))
    args = ["eval", folder, "--text", "none", "--tasks", "piqa", "--data", str(data), "--work", str(tmp_path / "w")]
    done = CliRunner().invoke(main, [*args, "--json"])
    assert done.exit_code == 0, done.output
    ours = json.loads(done.stdout)["models"][0]["items"]["piqa"]["metrics"]["acc"]["values"]
    with quiet():
        theirs = HFLM(pretrained=compress.load(folder, dtype="float32")[0], tokenizer=tokenizer, batch_size=3)
    settings = Evaluate(tasks=("piqa",), data=str(data))
    [(_, task)] = load_tasks("piqa", task_manager(settings), settings).items()
    assert run_task("piqa", task, theirs, settings)["metrics"]["acc"]["values"] == ours


def test_a_recipe_measures_tasks_and_answers(recipe, data, tmp_path, monkeypatch, texts):
    monkeypatch.setattr("compress.evaluation.generation.PROMPTS", ("What?",))
    measured = Evaluate(
        perplexity=(texts["test"],), windows=2, length=None, tasks=("piqa",), data=str(data), generation=True
    )
    result = compress.run(recipe(compress.RTN(weights="int2", group_size=32), eval=measured), tmp_path / "out")
    [row, _] = result.report["tasks"]["scores"]
    assert row["task"] == "piqa" and row["items"] == 6 and row["paired"]["p"] is not None
    assert result.report["generation"]["prompts"] == 1
    assert result.report["perplexity"][0]["divergence"]["mean"] > 0.01
    text = (tmp_path / "out" / "report.md").read_text()
    assert "piqa acc (6 items)" in text and "KL from the base" in text and "repeated 4-grams" in text
