"""The typed report: a real report.json goes through it unchanged, and what does not belong there is an error."""

import copy
import json

import pytest
from pydantic import ValidationError

import compress
from compress import GPTQ, SRSTE, KVCache
from compress.results.result import RunResult


@pytest.fixture(scope="module")
def stored(recipe, tmp_path_factory):
    """The report of a run that prunes, trains, quantizes and rounds the KV cache: every part of it is filled."""
    folder = tmp_path_factory.mktemp("schema")
    steps = (SRSTE(steps=2, hold_out=0.25, targets="*.0.mlp.*"), KVCache(), GPTQ(group_size=32, targets="*.1.*"))
    compress.run(recipe(*steps, save={"format": "native"}), folder)
    return json.loads((folder / "report.json").read_text())


def same(first, second) -> bool:
    """Equal to the type of every number."""
    return json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)


def test_a_stored_report_is_the_same_after_a_round_trip(stored):
    before = copy.deepcopy(stored)
    report = RunResult.from_json(stored)
    assert same(stored, before) and same(report.to_json(), stored)
    assert all(stored[key] for key in ("sparsity", "kv_cache", "perplexity", "training", "layers"))


def test_its_values_have_types(stored):
    report = RunResult.from_json(stored)
    assert report.model.class_name == stored["model"]["class"]
    assert report.layers[0].by == stored["layers"][0]["by"]
    (record,) = report.training.values()
    assert record.best is not None and record.best.held_out > 0
    assert report.evaluations["sparsity"].achieved == stored["sparsity"]["achieved"]
    assert report.evaluations["perplexity"][0].base.perplexity == stored["perplexity"][0]["base"]["perplexity"]


def test_results_of_unknown_evaluators_stay_as_they_are(stored):
    report = RunResult.from_json(stored | {"magic": {"a": [1, 2.5]}})
    assert report.evaluations["magic"] == {"a": [1, 2.5]} == report.to_json()["magic"]


@pytest.mark.parametrize("place", ["size", "verified", "journal", "kv_cache"])
def test_an_unknown_field_is_an_error(stored, place):
    values = copy.deepcopy(stored)
    values[place]["magic"] = 1
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RunResult.from_json(values)


def test_a_missing_field_is_an_error(stored):
    values = {key: value for key, value in stored.items() if key != "costs"}
    with pytest.raises(ValidationError, match="costs\n  Field required"):
        RunResult.from_json(values)
