"""Calibration and evaluation of a run never read the same documents silently: texts of both are divided, copies named."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from speech import write_model, write_recordings

import compress
from compress import Calibration, Evaluate, Recipe
from compress.checkpoint.opening import open_model
from compress.data.installed_texts import embedded_text
from compress.data.overlap import CalibrationRuns
from compress.data.records import CalibrationSketch
from compress.data.text_source import TextSource
from compress.errors import RecipeError
from compress.passes.contract.journal import Journal
from compress.pipeline.evaluation import evaluate
from compress.pipeline.texts import with_divided_texts

TEXT = "\n\n".join(embedded_text("calibration"))[:80_000]
GPTQ = compress.GPTQ(group_size=32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    (folder / "text.txt").write_text(TEXT, encoding="utf-8")
    shutil.copy(folder / "text.txt", folder / "copy.txt")
    (folder / "excerpt.txt").write_text(TEXT[30_001:33_000], encoding="utf-8")
    (folder / "other.txt").write_text("\n\n".join(embedded_text("test"))[:20_000], encoding="utf-8")
    return folder


def recipe_on(model, source, test, *passes, **calibration):
    calibration = {"sequences": 64, "length": 64, **calibration}
    return Recipe(
        model=model,
        passes=passes or (GPTQ,),
        calibration=Calibration(source=str(source), **calibration),
        eval=Evaluate(perplexity=(str(test),), windows=8, length=64, top_k=None),
    )


def plain(result):
    """The content of report.json."""
    return json.loads((result.folder / "report.json").read_text())


def warnings_of(report):
    return [entry["message"] for entry in report["journal"]["entries"] if entry["kind"] == "warning"]


def test_a_training_recipe_on_one_file(pico, files, tmp_path):
    """Half the training tokens were those of the evaluation: the loss of the trained model there was its memory."""
    lora = compress.Finetune(lora_rank=4, steps=2)
    source = str(files / "text.txt")
    report = plain(compress.run(recipe_on(pico, source, source, lora), tmp_path / "out"))
    calibrated, tested = report["reproduce"]["texts"]
    assert calibrated["sha256"] == tested["sha256"]
    assert (tested["share"]["start"], tested["share"]["stop"]) == (0, 20_000)
    assert (calibrated["share"]["start"], calibrated["share"]["stop"]) == (20_000, 80_000)
    assert report["perplexity"][0]["overlap"] == 0 and warnings_of(report) == []
    page = (tmp_path / "out" / "report.md").read_text()
    assert "characters 1 to 20000 of 80000" in page and "characters 20001 to 80000 of 80000" in page
    again = Recipe.from_yaml(tmp_path / "out" / "recipe.yaml")
    assert again.calibration.divided and again.eval.perplexity[0].divided


@pytest.mark.parametrize(("test", "expected"), [("copy.txt", 0.5), ("excerpt.txt", 0.3), ("other.txt", None)])
def test_other_files_with_the_same_text_are_named(pico, files, tmp_path, test, expected):
    out = tmp_path / "out"
    heard = []
    journal = Journal(listeners=[heard.append])
    drawn = recipe_on(pico, files / "text.txt", files / test, sequences=300)
    report = plain(compress.run(drawn, out, journal=journal, progress=False))
    overlap = report["perplexity"][0]["overlap"]
    texts = [(out / name).read_text() for name in ("report.md", "report.html", "README.md")]
    if expected is None:
        assert overlap == 0 and warnings_of(report) == []
        assert not any("calibration has read" in text for text in texts)
        return
    assert overlap > expected
    named = f"calibration has read {overlap:.1%} of the evaluation tokens of "
    assert [text.startswith(f"{named}{test}, so its figures flatter") for text in warnings_of(report)] == [True]
    message = f"{named}{files / test}, so its figures flatter"  # in the terminal, with its folder
    assert [entry.kind for entry in heard if entry.message.startswith(message)] == ["warning"]
    assert all("alibration has read" in text and f"{overlap:.1%}" in text for text in texts)
    # the checkpoint remembers it
    measured = evaluate([str(out)], drawn.eval, work=None)
    assert measured.models[0].texts[0].overlap == pytest.approx(overlap, abs=0.1)
    assert any(note.startswith(f"warning: {out}: calibration has read") for note in measured.notes)
    other = drawn.eval.model_copy(update={"perplexity": (str(files / "other.txt"),)})
    assert evaluate([str(out)], other, work=None).models[0].texts[0].overlap == 0


def test_what_the_recipe_states_stays(pico, files):
    opened, source = open_model(pico), str(files / "text.txt")

    def divided(calibration, test):
        asked = recipe_on(pico, source, source).model_copy(
            update={
                "calibration": Calibration(source=source, divided=calibration),
                "eval": Evaluate(perplexity=({"source": source, "divided": test},)),
            }
        )
        resolved = with_divided_texts(asked, opened.model)
        return resolved.calibration.divided, resolved.eval.perplexity[0].divided

    assert divided(None, None) == divided(True, None) == divided(None, True) == (True, True)
    assert divided(False, None) == (False, None) and divided(None, False) == (None, False)
    apart = recipe_on(pico, source, "embedded")
    assert with_divided_texts(apart, opened.model) == apart


def test_links_mixtures_and_data_sets_are_the_same_text(pico, files, tmp_path):
    link = tmp_path / "link.txt"
    link.symlink_to(files / "text.txt")
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"text": "a"}\n', encoding="utf-8")
    parquet = {"dataset": str(tmp_path / "rows.parquet")}
    (tmp_path / "rows.parquet").touch()
    calibration = Calibration(mixture=["embedded", str(link), {**parquet, "max_documents": 7}], sequences=6, length=64)
    tested = ("embedded", str(files / "text.txt"), {**parquet, "max_documents": 7}, str(rows))
    asked = Recipe(model=pico, passes=[GPTQ], calibration=calibration, eval=Evaluate(perplexity=tested))
    resolved = with_divided_texts(asked, open_model(pico).model)
    assert [text.divided for text in resolved.calibration.mixture] == [None, True, True]
    assert [text.divided for text in resolved.eval.perplexity] == [None, True, True, None]
    tested = ({**parquet, "max_documents": 8},)
    unlike = asked.model_copy(update={"eval": Evaluate(perplexity=tested)})
    with pytest.raises(
        RecipeError, match=r"rows.parquet with different max_documents \(7, 8\), so it cannot be divided"
    ):
        with_divided_texts(unlike, open_model(pico).model)
    splits = [{"dataset": "some/set", "split": split} for split in ("train", "test")]
    apart = asked.model_copy(
        update={"calibration": Calibration(**splits[0]), "eval": Evaluate(perplexity=(splits[1],))}
    )
    assert with_divided_texts(apart, open_model(pico).model) == apart
    named = asked.model_copy(
        update={"calibration": Calibration(dataset="some/set"), "eval": Evaluate(perplexity=(splits[0],))}
    )
    assert with_divided_texts(named, open_model(pico).model).calibration.divided


def test_a_recipe_that_reads_no_calibration_evaluates_the_whole_text(pico, files, tmp_path):
    source = str(files / "text.txt")
    report = compress.run(recipe_on(pico, source, source, compress.RTN(group_size=32)), tmp_path / "out").report
    assert [use["share"] for use in report["reproduce"]["texts"]] == [None, None]
    assert report["perplexity"][0]["overlap"] is None and report["reproduce"]["calibration_runs"] is None


def test_rows_of_stored_ids_are_divided(tiny_folder, recipe, tmp_path):
    path = tmp_path / "ids.npy"
    np.save(path, torch.randint(60, (8, 24), generator=torch.Generator().manual_seed(0)).numpy())
    stored = Calibration(source=str(path), sequences=None, length=None)
    measured = Evaluate(perplexity=(str(path),), windows=16, length=None)
    asked = recipe(compress.GPTQ(group_size=8), model=tiny_folder("llama"), calibration=stored, eval=measured)
    calibrated, tested = compress.run(asked, tmp_path / "out").report["reproduce"]["texts"]
    assert (tested["sequences"], calibrated["sequences"]) == (2, 6)
    assert tested["share"] == {"unit": "rows", "start": 0, "stop": 2, "of": 8}


def test_lists_of_recordings_are_divided(tmp_path):
    model, listed = write_model(tmp_path / "model"), write_recordings(tmp_path / "recordings")
    asked = Recipe(
        model=str(model),
        passes=[compress.GPTQ(group_size=8)],
        calibration=Calibration(source=str(listed), sequences=4),
        eval=Evaluate(perplexity=(str(listed),), windows=4, top_k=None),
    )
    calibrated, tested = compress.run(asked, tmp_path / "out").report["reproduce"]["texts"]
    assert (tested["sequences"], calibrated["sequences"]) == (1, 4)
    assert calibrated["share"] == {"unit": "rows", "start": 1, "stop": 6, "of": 6}


def test_a_killed_run_keeps_its_shares(pico, files, tmp_path, stop):
    source = str(files / "text.txt")
    asked = recipe_on(pico, source, source, sequences=8)
    stop(asked, tmp_path / "killed")
    report = compress.run(asked, tmp_path / "killed").report
    straight = compress.run(asked, tmp_path / "straight").report
    assert report["checkpoint_sha256"] == straight["checkpoint_sha256"]
    assert report["reproduce"]["texts"] == straight["reproduce"]["texts"]
    sketch = CalibrationSketch.model_validate(report["reproduce"]["calibration_runs"])
    assert len(CalibrationRuns.of_sketch(sketch).hashes) == 8 * (64 - 32 + 1)
    recorded = Recipe.from_yaml(Path(tmp_path / "killed" / "recipe.yaml"))
    assert compress.run(recorded, tmp_path / "again").report["checkpoint_sha256"] == report["checkpoint_sha256"]


def test_another_evaluation_of_a_complete_run_is_no_other_run(pico, files, tmp_path):
    """The calibration keeps what it read; a text that it read whole is evaluated with a warning."""
    text, other = str(files / "text.txt"), str(files / "other.txt")
    first = compress.run(recipe_on(pico, text, other), tmp_path / "apart", progress=False).report
    then = plain(compress.run(recipe_on(pico, text, text), tmp_path / "apart", progress=False))
    assert then["checkpoint_sha256"] == first["checkpoint_sha256"]
    assert then["perplexity"][0]["overlap"] > 0 and len(warnings_of(then)) == 1
    first = compress.run(recipe_on(pico, text, text), tmp_path / "divided", progress=False).report
    then = plain(compress.run(recipe_on(pico, text, other), tmp_path / "divided", progress=False))
    assert then["checkpoint_sha256"] == first["checkpoint_sha256"] and warnings_of(then) == []
    assert then["reproduce"]["texts"][0] == first["reproduce"]["texts"][0]


def test_eval_reads_the_share_that_the_calibration_left(pico, files, tmp_path):
    text, other = str(files / "text.txt"), str(files / "other.txt")
    report = compress.run(recipe_on(pico, text, text), tmp_path / "divided", progress=False).report
    shutil.copy(files / "text.txt", tmp_path / "renamed.txt")
    settings = Evaluate(perplexity=(str(tmp_path / "renamed.txt"),), windows=None, length=64, top_k=None)
    measured = evaluate([pico, str(tmp_path / "divided")], settings, work=None)
    assert measured.models[1].texts[0].overlap == 0 and not any(note.startswith("warning") for note in measured.notes)
    assert [note for note in measured.notes if "characters 1 to 20000 of 80000 are read" in note]
    share = Evaluate(perplexity=(text,), windows=8, length=64, top_k=None)
    [again] = evaluate([str(tmp_path / "divided")], share, work=None).models
    assert again.texts[0].sha256 == report["perplexity"][0]["sha256"]
    whole = settings.model_copy(update={"perplexity": (TextSource(source=text, divided=False),)})
    [read] = evaluate([str(tmp_path / "divided")], whole, work=None).models
    assert read.texts[0].overlap > 0
    compress.run(recipe_on(pico, text, other), tmp_path / "apart", progress=False)
    apart = evaluate([str(tmp_path / "apart")], settings, work=None)
    assert apart.models[0].texts[0].overlap > 0 and any(note.startswith("warning: ") for note in apart.notes)
