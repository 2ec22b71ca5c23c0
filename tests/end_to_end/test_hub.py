"""Models and data sets of a hub, which is a server on this machine."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import datasets
import pytest
from hub_server import COMMIT, Hub, served

FILES, ROWS = 20, 30
RECIPE = """
model: {model}
calibration: {{source: null, dataset: {dataset}, streaming: true, sequences: 4, length: 64}}
passes:
  - gptq: {{weights: int4, group_size: 32}}
eval: null
"""


@pytest.fixture(scope="module")
def hub(pico, tmp_path_factory):
    """A hub with the pico model, which has its weights a second time as hubs do, and a data set of many files."""
    folder = tmp_path_factory.mktemp("hub")
    shutil.copytree(pico, folder / "models" / "org" / "pico")
    (folder / "models" / "org" / "pico" / "original").mkdir()
    for copy in ("consolidated.safetensors", "original/model.safetensors"):
        shutil.copy(Path(pico) / "model.safetensors", folder / "models" / "org" / "pico" / copy)
    texts = folder / "datasets" / "org" / "texts"
    texts.mkdir(parents=True)
    for file in range(FILES):
        rows = [{"text": f"row {row} of file {file}: " + "some words of this row " * 20} for row in range(ROWS)]
        datasets.Dataset.from_list(rows).to_parquet(texts / f"train-{file:05}-of-{FILES:05}.parquet")
    with served(folder) as hub:
        yield hub


def compress(hub: Hub, home: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own: the libraries read their settings when they are imported."""
    command = [sys.executable, "-m", "compress", *map(str, arguments)]
    environment = {**os.environ, **hub.environment(home)}
    return subprocess.run(command, capture_output=True, text=True, env=environment, check=False, cwd=home)


def written(folder: Path, model: str, dataset: str) -> Path:
    (folder / "recipe.yaml").write_text(RECIPE.format(model=model, dataset=dataset))
    return folder / "recipe.yaml"


def test_a_run_reads_no_more_of_a_hub_than_it_needs(hub, tmp_path):
    recipe = written(tmp_path, "org/pico", "org/texts")
    hub.fetched.clear()
    planned = compress(hub, tmp_path, "plan", recipe)
    assert planned.returncode == 0, planned.stderr
    assert not [name for name in hub.fetched if name.endswith((".safetensors", ".parquet"))]
    done = compress(hub, tmp_path, "run", recipe, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    weights = [name for name in hub.fetched if name.endswith(".safetensors")]
    assert weights == ["org/pico/model.safetensors"]
    texts = {name for name in hub.fetched if name.endswith(".parquet")}
    assert 0 < len(texts) <= FILES / 2
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert (report["model"]["source"], report["model"]["commit"]) == ("org/pico", COMMIT)


def test_training_reads_no_more_of_a_hub_than_its_steps_need(hub, tmp_path):
    recipe = written(tmp_path, "org/pico", "org/texts")
    steps = "finetune: {steps: 6, batch: 2, accumulate: 2}"
    recipe.write_text(recipe.read_text().replace("gptq: {weights: int4, group_size: 32}", steps))
    hub.fetched.clear()
    done = compress(hub, tmp_path, "run", recipe, "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert 0 < len({name for name in hub.fetched if name.endswith(".parquet")}) <= FILES / 2
    (record,) = json.loads((tmp_path / "out" / "report.json").read_text())["training"].values()
    (use,) = record["streams"]
    assert use["sequences"] == 24 and use["documents"] < FILES * ROWS / 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "dataset", "reason"),
    [
        ("org/none", "org/texts", "org/none"),
        ("gated/pico", "org/texts", "gated/pico"),
        ("org/pico", "org/none", "org/none"),
        ("org/pico", "gated/texts", "gated/texts"),
    ],
)
def test_what_a_hub_does_not_give_is_named(hub, tmp_path, model, dataset, reason):
    recipe = written(tmp_path, model, dataset)
    failed = compress(hub, tmp_path, "run", recipe, "--out", tmp_path / "out")
    assert failed.returncode == 2
    last = failed.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and reason in last and "report it as a bug" not in last
    assert not (tmp_path / "out" / "report.json").exists()


def test_a_hub_that_does_not_answer_is_named(tmp_path):
    recipe = written(tmp_path, "org/pico", "org/texts")
    failed = compress(Hub("http://127.0.0.1:9"), tmp_path, "run", recipe, "--out", tmp_path / "out")
    assert failed.returncode == 2
    assert "error: model: org/pico" in failed.stderr and "report it as a bug" not in failed.stderr
