"""Statistics of some inputs of a block at a time: the same codes for any number of them, and few in memory."""

import copy
import weakref

import pytest
import torch
from batches import batch_of

import compress
from compress.models.experts import open_experts
from compress.models.kinds.batch import Examples
from compress.passes.contract.journal import Journal
from compress.passes.contract.observers import Gram
from compress.pipeline.engine import Memory, engine
from compress.pipeline.resolve import resolve, run_of
from compress.pipeline.sources import in_memory

G = {"group_size": 16}
CHAINS = {
    "rtn": [compress.RTN(**G)],
    "gptq": [compress.GPTQ(**G)],
    "gptq on the original block": [compress.GPTQ(true_sequential=False, **G)],
    "gptq asymmetric": [compress.GPTQ(true_sequential=False, error="asymmetric", **G)],
    "wanda": [compress.Wanda(repair=0)],
    "wanda, repaired, then gptq": [compress.Wanda(pattern="2:4", repair=1), compress.GPTQ(**G)],
    "awq": [compress.AWQ(**G), compress.RTN(**G)],
    "sparsegpt": [compress.SparseGPT(true_sequential=False)],
    "static inputs": [
        compress.RTN(
            weights="int8",
            group_size="channel",
            activations="int8",
            activation_scale="static",
            true_sequential=False,
        )
    ],
}


def swept(model, ids, passes, inputs_at_once=None):
    """(tensors, results of the layers in the journal) of a copy of a model after passes."""
    opened = in_memory(copy.deepcopy(model))
    open_experts(opened.model)
    resolved = resolve(compress.Recipe(model="tiny", passes=passes, save={"format": "native"}, eval=None), opened)
    examples = Examples.of_ids(ids)
    run = run_of(resolved, Journal(), calibration=examples, inputs_at_once=inputs_at_once)
    with torch.no_grad():
        engine(resolved, examples.batches(2), batch_of(ids[:1]), run, Memory())
    tensors = b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in opened.model.state_dict().values())
    return tensors, [(e.where, e.message) for e in run.journal.entries]


@pytest.mark.few(6)
@pytest.mark.parametrize("family", ["qwen3-moe", "mixtral"])
@pytest.mark.parametrize("chain", CHAINS)
def test_codes_do_not_depend_on_the_number_of_inputs_at_once(chain, family, tiny, ids):
    model = tiny(family, num_hidden_layers=2)
    together = swept(model, ids(4, 12), CHAINS[chain])
    for inputs_at_once in (1, 3, 16):
        assert swept(model, ids(4, 12), CHAINS[chain], inputs_at_once) == together


@pytest.mark.parametrize(
    ("true_sequential", "inputs_at_once", "most"), [(True, None, 1), (False, 3, 3), (False, 1, 1), (False, None, 10)]
)
def test_few_statistics_are_in_memory(true_sequential, inputs_at_once, most, tiny, ids, monkeypatch):
    """mixtral: one input of attention, one of its output, and two of each of 4 experts."""
    alive, counts, make = weakref.WeakSet(), [], Gram.__init__

    def counted(self, *arguments):
        make(self, *arguments)
        alive.add(self)
        counts.append(len(alive))

    monkeypatch.setattr(Gram, "__init__", counted)
    step = compress.GPTQ(true_sequential=true_sequential, **G)
    swept(tiny("mixtral", num_hidden_layers=1), ids(4, 12), [step], inputs_at_once)
    assert max(counts) == most and len(counts) == 10
