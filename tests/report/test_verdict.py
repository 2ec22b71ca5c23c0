"""The verdict in words, the JSON schema, and `compress report`."""

import json
import webbrowser

import pytest
from click.testing import CliRunner

import compress
from compress.blockwise.install import WORST
from compress.cli import main
from compress.report.page.blocks import KeyFigures
from compress.report.sections.verdict import VerdictSection
from compress.report.verdict import headline, of_result
from compress.results.result import RunResult, json_schema


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdict") / "out"
    compress.run(recipe(compress.RTN(weights="int2", group_size=32)), folder, progress=False)
    return folder


def values(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_verdict_stands_on_top(finished):
    report = RunResult.from_json(values(finished))
    size, agreement = of_result(report)
    assert size.startswith(f"{report.size.dense_bytes / report.size.checkpoint_bytes:.2f}x smaller; loss +")
    assert "KL divergence" in agreement
    text = (finished / "report.md").read_text()
    assert text.index("## Verdict") < text.index("## Size and quality") and size in text


def test_tasks_in_words(finished):
    row = {"task": "piqa", "metric": "acc", "items": 9, "of": 9, "fewshot": 0, "higher_is_better": True, "base": 1.0}
    row |= {"base_stderr": None, "compressed": 0.0, "compressed_stderr": None}
    paired = {"difference": -1.0, "stderr": 0.0, "low": -1.0, "high": -0.5, "gained": 0, "lost": 9, "p": 0.004}
    other = {**row, "metric": "acc_norm", "paired": {**paired, "difference": 0.0, "p": 1.0}}
    tasks = {"scores": [{**row, "paired": paired}, other], "failed": {}, "chat_template": False, "limit": None}
    changed = values(finished) | {"tasks": {**tasks, "seed": 1, "lm_eval": "0"}}
    last = of_result(RunResult.from_json(changed))[-1]
    assert last == "1 of 2 task metrics differ (McNemar's test with Holm's correction, p < 0.05): piqa acc (-1.000)"
    unmeasured = RunResult.from_json(values(finished) | {"perplexity": None})
    assert "was not measured" in of_result(unmeasured)[0]


def test_the_verdict_on_a_model_without_a_head_speaks_of_agreement(finished):
    same, kl = {"value": 0.984, "stderr": 0.003}, {"value": 0.0012, "stderr": None}
    text = {"text": "a", "windows": 8, "length": 16, "sha256": "", "compared": "classes"}
    texts = [{**text, "measures": {"same": same, "kl": kl}}, {**text, "text": "b", "measures": {"kl": kl}}]
    report = RunResult.from_json(values(finished) | {"perplexity": [], "agreement": texts, "tasks": None})
    first, second = of_result(report)
    words = "the predicted class is that of the base model in 98.4% ± 0.3% of the cases"
    assert first.endswith(f"x smaller; {words}, KL divergence 0.0012 nats on a")
    assert second == "KL divergence 0.0012 nats on b"
    assert headline(report).endswith(f"{words}.")
    figures = next(block for block in VerdictSection().blocks(report) if isinstance(block, KeyFigures)).figures
    assert [(figure.value, figure.note) for figure in figures[1:]] == [("98.4%", "± 0.3%, a"), ("0.0012", "a")]


def test_the_schema_names_every_key_of_a_report(finished):
    schema = json_schema()
    assert values(finished).keys() <= schema["properties"].keys()
    assert {"perplexity", "agreement", "tasks", "generation"} <= schema["properties"].keys()
    assert {"Divergence", "TextAgreement", "TasksResult", "GenerationResult", "Sizes"} <= schema["$defs"].keys()
    assert json.loads(CliRunner().invoke(main, ["report", "--schema"]).stdout) == schema


def test_the_report_is_written_again(finished):
    names = "report.md", "report.html"
    before = [(finished / name).read_text() for name in names]
    for name in names:
        (finished / name).unlink()
    done = CliRunner().invoke(main, ["report", str(finished)])
    assert done.exit_code == 0 and [(finished / name).read_text() for name in names] == before


@pytest.mark.parametrize("found", [True, False])
def test_the_page_is_opened_only_if_asked_for_or_on_a_terminal(finished, monkeypatch, found):
    opened = []
    monkeypatch.setattr(webbrowser, "open", lambda url: opened.append(url) or found)
    for options in ([], ["--no-open"]):
        assert CliRunner().invoke(main, ["report", str(finished), *options]).exit_code == 0 and opened == []
    done = CliRunner().invoke(main, ["report", str(finished), "--open"])
    page = (finished / "report.html").resolve()
    assert opened == [page.as_uri()] and done.exit_code == 0
    assert (f"no browser was found; open {page}" in done.stdout) == (not found)


def test_the_worst_layers_of_a_block_have_histograms(finished):
    rows = values(finished)["layers"]
    shown = [row for row in rows if row["histograms"] is not None]
    blocks = {".".join(row["layer"].split(".")[:3]) for row in rows}
    assert len(shown) == WORST * len(blocks)
    for block in blocks:
        errors = sorted((row["error"] for row in rows if row["layer"].startswith(block + ".")), reverse=True)
        assert sorted((r["error"] for r in shown if r["layer"].startswith(block + ".")), reverse=True) == errors[:WORST]
    found = shown[0]["histograms"]
    assert found["weights"]["before"] != found["weights"]["after"]
    assert found["inputs"]["before"] == found["inputs"]["after"]  # the pass rounds no inputs
    assert "Weights and inputs of the worst layers" in (finished / "report.html").read_text()


def test_folders_without_a_report(tmp_path):
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "no readable report" in done.stderr and "compress run" in done.stderr
    assert "write the FOLDER of a run" in CliRunner().invoke(main, ["report"]).stderr
