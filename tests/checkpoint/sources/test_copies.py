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
from compress.layers.linear import linears
from compress.models.structure.blocks import find_blocks
from compress.native.library import available
from compress.passes.contract.context import Run

pytestmark = pytest.mark.skipif(not available(), reason="the kernels are not built")


@pytest.fixture
def packed(pico_model, tmp_path):
    compress.apply(pico_model, RTN(group_size=32))
    compress.save(pico_model, tmp_path, format="native")
    return compress.load(tmp_path)[0]


def copied(model, *blocks):
    """How many layers of some blocks have a copy."""
    layers = [layer for i in blocks for layer in linears(find_blocks(model)[i].module).values()]
    return sum(part.is_prepared(kernel) for layer in layers for part in layer.all_parts for kernel in KERNELS)


def test_beyond_the_limit_no_copy_outlives_the_forward_pass_of_its_block(packed, pico_ids):
    seen = []
    last = find_blocks(packed)[2].module.mlp.down_proj
    with torch.no_grad():
        wanted = packed(pico_ids[:1]).logits
        assert copied(packed, 0, 1, 2) == 21
        with copies_within(packed, packed_bytes(packed) - 1):
            assert copied(packed, 0, 1, 2) == 0
            handle = last.register_forward_hook(lambda *_: seen.append((copied(packed, 0, 1), copied(packed, 2))))
            assert same_logits(packed(pico_ids[:1]).logits, wanted)
            handle.remove()
        assert seen == [(0, 7)] and copied(packed, 0, 1, 2) == 0
        packed(pico_ids[:1])
        with copies_within(packed, packed_bytes(packed)):
            assert copied(packed, 0, 1, 2) == 21


def test_what_measures_seconds_measures_the_model_as_it_is_used(packed, pico_ids, monkeypatch):
    kept = {}
    for key in ("perplexity", "speed"):
        kind = EVALUATORS[key]

        def run(self, model, context, key=key):
            model(pico_ids[:1])
            kept[key] = copied(model, 0, 1, 2)

        monkeypatch.setattr(kind, "measure", run)
        measure_one(kind(), packed, EvaluationContext(Run(), copies_bytes=0))
    assert kept == {"perplexity": 0, "speed": 21}
