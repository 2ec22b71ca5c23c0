"""Kept results: killed lines, several processes, and what each of them computes."""

import json
import os
import shutil
import threading
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import compress
from compress import Evaluate
from compress.checkpoint.opening import open_model
from compress.checkpoint.sources import files
from compress.evaluation.store import Results, Store, delete_unused, digest_of
from compress.passes.contract.processes import Processes
from compress.pipeline import finish


class Together(Processes):
    """Processes that are threads of one test and exchange values through a list."""

    def gather(self, value):
        MET[self.rank] = value
        MEETING.wait()
        return list(MET)


MET: list = [None, None]
MEETING = threading.Barrier(2)


def test_each_process_computes_a_share_and_all_know_everything(tmp_path):
    computed, found = [[], []], [[], []]

    def work(rank):
        results = Results(tmp_path, Together(rank, 2))

        def compute(items):
            computed[rank] += items
            results.put((str(item), item * item) for item in items)

        found[rank] = results.fill([1, 2, 3, 4, 5, 3], str, compute)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert computed == [[1, 3, 5], [2, 4]] and found[0] == found[1] == [1, 4, 9, 16, 25, 9]
    assert {path.name for path in tmp_path.iterdir()} == {"0.jsonl", "1.jsonl"}
    again = Results(tmp_path)  # one process later knows the results of both
    assert again.fill([5, 2], str, lambda items: 1 / 0) == [25, 4]


def test_a_line_that_was_cut_off_is_computed_again(tmp_path):
    Results(tmp_path).put([("a", 1), ("b", [2, None])])
    path = tmp_path / "0.jsonl"
    path.write_text(path.read_text()[:-4])
    results = Results(tmp_path)
    assert "a" in results and "b" not in results
    results.put([("b", [2, None])])
    assert Results(tmp_path)["b"] == [2, None]
    assert [json.loads(line) for line in path.read_text().splitlines()[2:]] == [["b", [2, None]]]


def test_results_of_other_models_and_settings_are_apart(tmp_path):
    one, other = Store(tmp_path, "m" * 20, "b" * 20), Store(tmp_path, "n" * 20, "b" * 20)
    one.results("requests").put([("key", 1)])
    assert "key" not in other.results("requests") and "key" not in one.results("windows")
    assert one.base_folder("text") == other.base_folder("text") == tmp_path / ("b" * 16) / "text"
    assert Store().base_folder("text") is None and "key" not in Store().results("requests")
    assert digest_of("a", (1, 2)) == digest_of("a", [1, 2]) != digest_of("a", [2, 1])


def test_runs_share_the_results_of_their_base_model(recipe, texts, tmp_path, monkeypatch):
    measured = []
    measure = compress.evaluation.windows.measure_window
    monkeypatch.setattr(
        compress.evaluation.windows,
        "measure_window",
        lambda model, window, index, task: measured.append(task.role) or measure(model, window, index, task),
    )
    settings = Evaluate(perplexity=(texts["test"],), windows=2, length=32)

    def run(out, bits, dtype="float32", **changes):
        measured.clear()
        asked = recipe(compress.RTN(weights=bits), eval=settings.model_copy(update=changes), dtype=dtype)
        return compress.run(asked, tmp_path / out, progress=False).report

    first = run("first", "int4")
    assert measured == ["base", "base", "compressed", "compressed"]
    second = run("second", "int3")
    assert measured == ["compressed", "compressed"]
    bases = [report["perplexity"][0]["base"] for report in (first, second)]
    assert bases[0] == bases[1]
    assert second["perplexity"][0]["divergence"]["mean"] > first["perplexity"][0]["divergence"]["mean"] > 0
    notes = [str(report["journal"]) for report in (first, second)]
    assert ["that an earlier run stored" in note for note in notes] == [False, True]
    for out, changes in (("third", {"length": 48}), ("fourth", {"dtype": "bfloat16"})):
        run(out, "int4", **changes)  # of another protocol nothing is reused
        assert measured == ["base", "base", "compressed", "compressed"]
    monkeypatch.setattr(finish, "package_sha256", lambda ignored: "another version")
    run("first", "int4")
    assert measured == ["base", "base", "compressed", "compressed"]


@pytest.fixture
def base_calls(monkeypatch):
    """Appended to for every forward pass of a base model."""
    calls, open_source = [], finish.open_source

    @contextmanager
    def counted(*arguments):
        with open_source(*arguments) as model:
            model.register_forward_pre_hook(lambda *_: calls.append(1))
            yield model

    monkeypatch.setattr(finish, "open_source", counted)
    return calls


def test_results_of_every_kind_are_shared_until_the_model_answers_otherwise(
    recipe, texts, pico, tmp_path, base_calls, monkeypatch
):
    monkeypatch.setattr("compress.evaluation.generation.PROMPTS", ("The with statement",))
    folder = Path(shutil.copytree(pico, tmp_path / "model"))
    evaluate = Evaluate(perplexity=(texts["test"],), windows=1, length=32, generation=True)

    def run(out, bits):
        base_calls.clear()
        asked = recipe(compress.RTN(weights=bits, group_size=32), model=str(folder), eval=evaluate)
        found = compress.run(asked, tmp_path / out, progress=False).report["generation"]
        return [found[side][0]["text"] for side in ("base", "compressed")]

    first = run("first", "int4")
    assert base_calls
    second = run("second", "int8")
    assert second[0] == first[0] and base_calls == []
    (folder / "chat_template.jinja").write_text("The answer to {{ messages[0].content }} is")
    again = run("second", "int8")  # its checkpoint is complete
    assert again[0] != second[0] and again[1] != second[1] and base_calls
    assert run("third", "int8") == again and base_calls == []


CHANGES = {
    "weights between the samples of a fingerprint": "model.safetensors",
    "a chat template": "chat_template.jinja",
    "one of several chat templates": "additional_chat_templates/tools.jinja",
    "the tokenizer": "tokenizer.json",
    "special tokens": "tokenizer_config.json",
    "the defaults of generation": "generation_config.json",
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_answers_otherwise_has_another_digest(change, pico, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "SAMPLE_BYTES", 16)  # of a large file, few bytes are read
    folder = Path(shutil.copytree(pico, tmp_path / "model"))
    path = folder / CHANGES[change]
    before = open_model(str(folder))
    assert open_model(str(folder)).answers_digest == before.answers_digest
    path.parent.mkdir(exist_ok=True)
    if path.suffix == ".safetensors":
        tensors = load_file(path)
        tensors["model.norm.weight"][77] += 1
        save_file(tensors, path, metadata={"format": "pt"})
    else:
        path.write_text((path.read_text() if path.exists() else "{}") + " ")
    after = open_model(str(folder))
    assert (after.fingerprint, after.answers_digest != before.answers_digest) == (before.fingerprint, True)


def test_a_cache_that_cannot_be_written_is_not_used(recipe, texts, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("compress.evaluation.store.BASE_MODELS", str(tmp_path / "file" / "folder"))
    asked = recipe(compress.RTN(), eval=Evaluate(perplexity=(texts["test"],), windows=1, length=32))
    report = compress.run(asked, tmp_path / "out", progress=False).report
    assert report["perplexity"][0]["base"]["loss"] > 0


@pytest.mark.parametrize("largest, left", [(30, {"a", "b", "c"}), (29, {"b", "c"}), (10, {"c"}), (0, {"c"})])
def test_results_that_are_unused_for_longest_are_deleted(tmp_path, largest, left):
    for name, age in (("a", 300_000), ("b", 200_000), ("c", 0)):
        (tmp_path / name / "text").mkdir(parents=True)
        (tmp_path / name / "text" / "0.jsonl").write_text("x" * 10)
        stamp = (tmp_path / name).stat().st_mtime - age
        os.utime(tmp_path / name, (stamp, stamp))
    delete_unused(tmp_path, largest)
    assert {path.name for path in tmp_path.iterdir()} == left
