"""The verdict in words, the JSON schema, and `compress report`."""

import json

import pytest
from click.testing import CliRunner

import compress
from compress.cli import main
from compress.report.schema import Report, json_schema
from compress.report.verdict import of_report


@pytest.fixture(scope="module")
def finished(recipe, tmp_path_factory):
    folder = tmp_path_factory.mktemp("verdict") / "out"
    compress.run(recipe(compress.RTN(weights="int2", group_size=32)), folder, progress=False)
    return folder


def values(folder):
    return json.loads((folder / "report.json").read_text())


def test_the_verdict_stands_on_top(finished):
    report = Report.from_json(values(finished))
    size, agreement = of_report(report)
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
    last = of_report(Report.from_json(changed))[-1]
    assert last == "1 of 2 task metrics differ by more than chance (p < 0.05): piqa acc (-1.000)"
    unmeasured = Report.from_json(values(finished) | {"perplexity": None})
    assert "was not measured" in of_report(unmeasured)[0]


def test_the_schema_names_every_key_of_a_report(finished):
    schema = json_schema()
    assert values(finished).keys() <= schema["properties"].keys()
    assert {"perplexity", "tasks", "generation"} <= schema["properties"].keys()
    assert {"Divergence", "TasksResult", "GenerationResult", "Sizes"} <= schema["$defs"].keys()
    assert json.loads(CliRunner().invoke(main, ["report", "--schema"]).stdout) == schema


def test_the_report_is_written_again(finished):
    before = (finished / "report.md").read_text()
    (finished / "report.md").unlink()
    done = CliRunner().invoke(main, ["report", str(finished)])
    assert done.exit_code == 0 and (finished / "report.md").read_text() == before


def test_folders_without_a_report(tmp_path):
    done = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert done.exit_code == 2 and "no readable report" in done.stderr and "compress run" in done.stderr
    assert "write the FOLDER of a run" in CliRunner().invoke(main, ["report"]).stderr
