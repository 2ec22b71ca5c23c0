"""The contract of evaluators, applied to each of them."""

import json
from dataclasses import replace

import pytest
import torch
from batches import batch_of
from pydantic import TypeAdapter, ValidationError
from transformers import AutoTokenizer

from compress import RTN, Evaluate, KVCache, Wanda, apply
from compress.evaluation import EVALUATORS, combine_all, measure_all, speed
from compress.evaluation.base import EvaluationContext
from compress.models.kinds.batch import Examples
from compress.passes.contract.context import Run
from compress.results.measurements import MEASUREMENTS
from compress.results.result import RunResult

every_evaluator = pytest.mark.parametrize("key", EVALUATORS)


def test_they_are_found_by_their_files():
    assert {"kv_cache", "perplexity", "sparsity"} <= EVALUATORS.keys() and "base" not in EVALUATORS
    assert all(kind.__module__ == f"compress.evaluation.{key}" for key, kind in EVALUATORS.items())


def test_each_has_a_measurement_of_its_name():
    assert MEASUREMENTS.keys() == EVALUATORS.keys()


def test_their_keys_are_free_in_the_report():
    assert EVALUATORS.keys() & RunResult.model_fields.keys() == set()


@every_evaluator
def test_an_evaluator_is_a_frozen_value_with_defaults(key):
    evaluator = EVALUATORS[key]()
    assert evaluator == EVALUATORS[key]() and evaluator.__doc__
    with pytest.raises(ValidationError):
        EVALUATORS[key](magic=1)


@pytest.fixture
def measured(pico_model, pico_ids, pico, monkeypatch):
    """The results on a model that is pruned, quantized and rounds its KV cache, and on the base model."""
    steps = [Wanda(sparsity=0.5), KVCache(), RTN(group_size=32)]
    targets = [name for name, m in pico_model.named_modules() if isinstance(m, torch.nn.Linear) and name != "lm_head"]
    layers = [{"layer": n, "by": "passes[0] wanda", "asked": 0.5, "due": 0.5} for n in targets]
    located = [("passes[0] wanda", steps[0], targets)]
    for name, value in {"TOKENS": 4, "PREFILL": 8, "ROUNDS": 1, "READ_BYTES": 1 << 16}.items():
        monkeypatch.setattr(speed, name, value)
    given = (
        {"a": Examples.of_ids(pico_ids[:2])},
        AutoTokenizer.from_pretrained(pico),
        batch_of(pico_ids[:1]),
        located,
        layers,
    )
    context = EvaluationContext(Run(), "base", *given, settings=Evaluate(generation=True, speed=True))
    base = measure_all(pico_model, context)
    model = apply(pico_model, steps, pico_ids)
    compressed = measure_all(model, replace(context, role="compressed"))
    return base, compressed


def test_only_what_needs_the_base_model_measures_it(measured):
    base, compressed = measured
    assert base.keys() == {key for key, kind in EVALUATORS.items() if kind.needs_base}
    assert compressed.keys() == EVALUATORS.keys()
    first = [EVALUATORS[key].needs_base for key in compressed]
    assert first == sorted(first)  # what rejects a wrong checkpoint comes first


def test_results_are_plain_json_of_the_type_that_is_declared(measured):
    base, compressed = measured
    combined = combine_all(compressed, base)
    for key, result in combined.items():
        if key in ("tasks", "agreement"):  # not asked for, see tests/evaluation/harness; of models without a head
            continue
        assert result and json.loads(json.dumps(result)) == result
        measurement = MEASUREMENTS[key]
        typed = TypeAdapter(measurement.value_type).validate_python(result)
        assert all(len(row) == 4 for row in measurement.summary(typed))
    (text,) = combined["perplexity"]
    assert (text["text"], text["windows"]) == ("a", 2)
    assert text["base"] == base["perplexity"]["a"]["score"] != text["compressed"]


def test_what_does_not_apply_is_none(pico_model, pico_ids):
    found = measure_all(pico_model, EvaluationContext(Run(), probe=batch_of(pico_ids[:1])))
    nothing = dict.fromkeys(("agreement", "generation", "kv_cache", "sparsity", "speed", "tasks"))
    assert found == {**nothing, "perplexity": {}}
