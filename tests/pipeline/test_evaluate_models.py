"""`compress eval` on several models: the same windows, the base once, and models that cannot be compared."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

import compress
from compress import Evaluate
from compress.cli import main
from compress.errors import ModelError
from compress.passes.contract.journal import Journal
from compress.pipeline.evaluation import evaluate


@pytest.fixture(scope="module")
def variant(recipe, tmp_path_factory):
    """A compressed checkpoint of pico."""
    out = tmp_path_factory.mktemp("variant") / "small"
    compress.run(recipe(compress.RTN(weights="int3", group_size=32)), out, progress=False)
    return str(out)


@pytest.fixture
def settings(texts):
    return Evaluate(perplexity=(texts["test"],), windows=2, length=None)


def test_models_are_compared_on_the_same_windows(variant, pico, settings, tmp_path):
    found = evaluate([variant, pico], settings, base=pico, work=tmp_path)
    base, small = found.models
    assert (found.base, base.source, small.source) == (pico, pico, variant)
    [before], [after] = base.texts, small.texts
    assert before.base is before.difference is before.divergence is None and before.sha256 == after.sha256
    assert after.base == before.compressed
    pairs = zip(before.compressed.by_window, after.compressed.by_window, strict=True)
    changes = [b - a for a, b in pairs]
    assert after.difference.loss == pytest.approx(sum(changes) / 2)
    assert after.difference.stderr == pytest.approx(abs(changes[0] - changes[1]) / 2)
    assert after.divergence.mean > 0 and 0 < after.divergence.agreement < 1
    report = json.loads(Path(variant, "report.json").read_text())
    assert after.compressed.loss == pytest.approx(report["perplexity"][0]["compressed"]["loss"], rel=1e-5)
    assert after.divergence.mean == pytest.approx(report["perplexity"][0]["divergence"]["mean"], rel=1e-3)


def test_the_base_is_measured_once(variant, pico, settings, tmp_path, monkeypatch):
    first = evaluate([pico, variant], settings, work=tmp_path)
    ran = []
    monkeypatch.setattr("compress.evaluation.windows.measure_window", lambda *_: ran.append(1))
    again = evaluate([pico, variant], settings, work=tmp_path)
    assert ran == [] and again == first


def test_progress_names_the_model(variant, pico, settings, tmp_path):
    journal, told = Journal(), []
    journal.listeners.append(lambda entry: told.append(entry.message))
    evaluate([pico, variant], settings, work=tmp_path, journal=journal)
    assert [message for message in told if message.startswith("opening ")] == [f"opening {pico}", f"opening {variant}"]
    counted = [message for message in told if not message.startswith("opening ")]
    assert {message.removeprefix("perplexity of ").partition(" on ")[0] for message in counted} == {pico, variant}


def test_one_model_has_no_base(pico, settings, tmp_path):
    found = evaluate([pico], settings, work=tmp_path)
    assert found.base is None and found.models[0].evaluations["generation"] is None
    assert found.models[0].texts[0].compressed.perplexity > 1


def test_different_tokenizers_cannot_be_compared(pico, settings, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(pico, other)
    told = []
    text = (other / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    tokens = vocabulary["model"]["vocab"]
    a, b = list(tokens)[300:302]
    tokens[a], tokens[b] = tokens[b], tokens[a]
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ModelError, match=r"have different tokenizers \(token \d+ is .*evaluate them in two calls"):
        evaluate([pico, str(other)], settings, work=tmp_path / "w", on_failure=told.append)
    [found] = told  # what was measured before
    assert [model.source for model in found.models] == [pico] and found.models[0].texts[0].compressed.perplexity > 1


def test_a_folder_that_is_no_model_is_an_error_before_anything_runs(pico, tmp_path):
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(main, ["eval", pico, str(tmp_path / "empty"), "--work", str(tmp_path / "w")])
    assert done.exit_code == 2 and "model" in done.stderr and "config.json" in done.stderr
    done = CliRunner().invoke(main, ["eval", pico, str(tmp_path / "none"), "--work", str(tmp_path / "w")])
    assert done.exit_code == 2 and "no folder" in done.stderr and not (tmp_path / "w").exists()


@pytest.mark.parametrize(
    "options",
    [["--limit", "3"], ["--fewshot", "0"], ["--chat-template"], ["--data", "x"], ["--limit", "3", "--data", "x"]],
)
def test_options_of_tasks_need_tasks(options, pico, tmp_path):
    common = ["--work", str(tmp_path / "w")]
    done = CliRunner().invoke(main, ["eval", pico, *options, *common])
    flags = ", ".join(reversed([option for option in options if option.startswith("--")]))
    assert done.exit_code == 2 and f"{flags}: of no effect without tasks; add --tasks, or leave" in done.stderr
    done = CliRunner().invoke(main, ["eval", pico, *options, "--suite", "quick", "--tasks", "none", *common])
    assert done.exit_code == 2 and "of no effect without tasks" in done.stderr


def test_a_loss_that_is_not_a_number_says_what_to_do(pico, texts, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(pico, broken)
    tensors = load_file(broken / "model.safetensors")
    name = next(name for name in tensors if "norm" in name)
    tensors[name][0] = math.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    args = ["--text", texts["test"], "--windows", "1", "--length", "32", "--work", str(tmp_path / "w")]
    done = CliRunner().invoke(main, ["eval", str(broken), *args])
    assert done.exit_code != 0 and "NaN" in done.stderr and "Traceback" not in done.stderr


def test_tables_and_json(variant, pico, texts, tmp_path):
    args = ["eval", pico, variant, "--text", texts["test"], "--windows", "2", "--length", "64"]
    args += ["--work", str(tmp_path / "w"), "-o", str(tmp_path / "found.json")]
    done = CliRunner().invoke(main, args)
    assert done.exit_code == 0, done.output
    assert "loss - base" in " ".join(done.stdout.split()) or "loss -" in done.stdout
    printed = CliRunner().invoke(main, [*args, "--json"])
    assert json.loads(printed.stdout) == json.loads((tmp_path / "found.json").read_text())
    assert torch.tensor(json.loads(printed.stdout)["models"][1]["perplexity"][0]["divergence"]["mean"]) > 0


def test_files_of_llama_cpp_are_told_apart_and_have_a_size(pico, settings, tmp_path):
    """Two checkpoints of one layout share their config.json; kept results must not be mixed up."""
    pytest.importorskip("gguf")
    folders = []
    for search in ("absmax", "mse"):
        model, tokenizer = compress.load(pico)
        compress.apply(model, compress.RTN(weights="int4_signed", group_size=32, scale=search))
        folders.append(str(compress.save(model, tmp_path / search, format="gguf", tokenizer=tokenizer)))
    one, other = evaluate(folders, settings, base=folders[0], work=tmp_path / "work").models
    assert one.digest != other.digest
    assert all(m.size_bytes == Path(m.source, "model.gguf").stat().st_size for m in (one, other))


@pytest.mark.parametrize("fails_on", ["the base", "the variant"])
def test_what_was_measured_before_a_failure_is_told(fails_on, variant, pico, texts, tmp_path, monkeypatch):
    """The tables and the file hold it, and the error ends the command as before."""

    def fail(self, model, context):
        if (context.role == "base") == (fails_on == "the base"):
            raise AttributeError("model.embed_tokens.weight is no parameter")
        return None

    monkeypatch.setattr("compress.evaluation.tasks.Tasks.measure", fail)
    monkeypatch.setenv("COLUMNS", "200")  # no cell of a table is wrapped
    args = ["eval", pico, variant, "--text", texts["test"], "--windows", "2", "--length", "64", "--work", str(tmp_path)]
    done = CliRunner().invoke(main, [*args, "-o", str(tmp_path / "found.json")])
    assert done.exit_code == 1 and "error: unexpected AttributeError: model.embed_tokens.weight" in done.stderr
    models = json.loads((tmp_path / "found.json").read_text())["models"]
    assert [model["source"] for model in models] == [pico, variant][: 1 if fails_on == "the base" else 2]
    for model in models:
        assert f"{model['perplexity'][0]['compressed']['perplexity']:.4f}" in done.stdout
    failed = models[-1]["failed"]["evaluation"]
    assert "AttributeError" in failed and failed in done.stdout
    assert fails_on == "the base" or models[0]["failed"] == {}
    compared = models[-1]["perplexity"]
    assert fails_on == "the base" or compared[0]["divergence"]["mean"] > 0
    again = CliRunner().invoke(main, ["compare", pico, variant, "--measure", *args[3:]])
    assert again.exit_code == 1 and f"{models[0]['perplexity'][0]['compressed']['perplexity']:.4f}" in again.stdout


def test_models_in_memory_are_measured_as_their_checkpoint(variant, pico, settings, tmp_path):
    """Also in training mode, which they are in afterwards."""
    pair = compress.load(variant)
    pair[0].train()
    stored, loaded = evaluate([variant, pair], settings, base=pico, work=tmp_path / "w").models[1:]
    assert loaded.source == f"{variant} in memory" and pair[0].training
    [of_file], [of_memory] = stored.texts, loaded.texts
    assert of_memory.compressed.by_window == of_file.compressed.by_window
    assert of_memory.divergence == of_file.divergence
    assert loaded.size_bytes == pytest.approx(stored.size_bytes, rel=0.02)  # headers of files
    assert loaded.digest != stored.digest


def test_a_model_that_changed_is_measured_anew(pico, settings, pico_ids, tmp_path):
    """In place, by each kind of change: weights, codes and the cache."""
    pair = compress.load(pico)
    digests, losses, sizes = [], [], []
    for step in (None, compress.Wanda(sparsity=0.5), compress.RTN(weights="int4"), compress.KVCache(keys="int4")):
        if step is not None:
            compress.apply(pair[0], step, pico_ids)
        for _ in range(2):
            model = evaluate([pico, pair], settings, work=tmp_path).models[1]
            digests.append(model.digest)
            losses.append(model.texts[0].compressed.loss)
        sizes.append(model.size_bytes)
    assert [first == again for first, again in zip(digests[::2], digests[1::2], strict=True)] == [True] * 4
    assert len(set(digests)) == 4 and len(set(losses)) == 4 and sizes[2] < sizes[0] / 2


def test_one_model_in_memory_and_several(pico, settings, tmp_path):
    one, other = compress.load(pico), compress.load(pico)
    compress.apply(other[0], compress.RTN(weights="int3"))
    [alone] = compress.evaluate(one, settings, work=None).models
    assert alone.source == f"{pico} in memory" and alone.texts[0].divergence is None
    found = compress.evaluate([other, one], settings, base=one, work=tmp_path)
    assert [model.source for model in found.models] == [f"{pico} in memory", f"{pico} in memory 2"]
    assert found.models[1].texts[0].difference.loss > 0
    [shown] = compress.compare([one, other], work=tmp_path).models
    assert shown.source == f"{pico} in memory 2" and shown.smaller > 2


@pytest.mark.parametrize("several", [False, True])
def test_a_model_in_memory_comes_with_its_tokenizer(pico, pico_model, settings, several, tmp_path):
    with pytest.raises(ModelError, match=r"is of class LlamaForCausalLM; write .* the pair \(model, tokenizer\)"):
        evaluate([pico, pico_model] if several else pico_model, settings, work=tmp_path)
