"""The copies that kernels make of packed weights, and the limit of their memory."""

import pytest
import torch
from tolerances import same_logits

import compress
from compress import RTN
from compress.checkpoint.inference import copies_within, packed_bytes
from compress.evaluation import EVALUATORS, measure_one
from compress.evaluation.base import EvaluationContext
from compress.kernels.dispatch import KERNELS
from compress.layers.linear import CompressedLinear, linears
from compress.native.library import available
from compress.passes.contract.context import Run

pytestmark = pytest.mark.skipif(not available(), reason="the kernels are not built")


@pytest.fixture
def packed(pico_model, tmp_path):
    compress.apply(pico_model, RTN(group_size=32))
    compress.save(pico_model, tmp_path, format="native")
    return compress.load(tmp_path)[0]


def packed_layers(model):
    """The linears of the blocks."""
    return [layer for layer in linears(model).values() if isinstance(layer, CompressedLinear)]


def copied(model):
    """How many layers have a copy."""
    parts = [part for layer in packed_layers(model) for part in layer.all_parts]
    return sum(part.is_prepared(kernel) for part in parts for kernel in KERNELS)


def test_beyond_the_limit_no_copy_outlives_the_forward_pass_of_its_layer(packed, pico_ids):
    seen = []
    with torch.no_grad():
        wanted = packed(pico_ids[:1]).logits
        assert copied(packed) == 21
        with copies_within(packed, packed_bytes(packed) - 1):
            assert copied(packed) == 0
            hook = lambda *_: seen.append(copied(packed))  # noqa: E731
            handles = [layer.register_forward_hook(hook) for layer in packed_layers(packed)]
            assert same_logits(packed(pico_ids[:1]).logits, wanted)
            for handle in handles:
                handle.remove()
        # queries, keys and values are computed together, and gates with ups
        assert max(seen) <= 2 and len(seen) == 21 and copied(packed) == 0
        packed(pico_ids[:1])
        with copies_within(packed, packed_bytes(packed)):
            assert copied(packed) == 21


def test_what_measures_seconds_measures_the_model_as_it_is_used(packed, pico_ids, monkeypatch):
    kept = {}
    for key in ("perplexity", "speed"):
        kind = EVALUATORS[key]

        def run(self, model, context, key=key):
            model(pico_ids[:1])
            kept[key] = copied(model)

        monkeypatch.setattr(kind, "measure", run)
        measure_one(kind(), packed, EvaluationContext(Run(), copies_bytes=0))
    assert kept == {"perplexity": 0, "speed": 21}
