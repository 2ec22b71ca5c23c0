"""Statistics of some inputs of a block at a time: the same codes for any number of them, and few in memory."""

import copy
import weakref

import pytest
import torch
from batches import batch_of

import compress
from compress.blockwise.capture import Call
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


def swept(model, ids, passes, inputs_at_once=None, **options):
    """(tensors, results of the layers in the journal) of a copy of a model after passes."""
    opened = in_memory(copy.deepcopy(model))
    open_experts(opened.model)
    resolved = resolve(compress.Recipe(model="tiny", passes=passes, save={"format": "native"}, eval=None), opened)
    examples = Examples.of_ids(ids)
    run = run_of(resolved, Journal(), calibration=examples, inputs_at_once=inputs_at_once, **options)
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


RECOMPUTED = {
    "rtn": [compress.RTN(**G)],
    "gptq": [compress.GPTQ(**G)],
    "sparsegpt, then gptq": [compress.SparseGPT(pattern="2:4"), compress.GPTQ(**G)],
    "wanda": [compress.Wanda(repair=0, true_sequential=True)],
}


@pytest.mark.few(6)
@pytest.mark.parametrize("store_bytes", [1 << 20, 0])
@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "mixtral"])
@pytest.mark.parametrize("chain", RECOMPUTED)
def test_codes_do_not_depend_on_what_is_recomputed(chain, family, store_bytes, tiny, ids, tmp_path):
    model = tiny(family, num_hidden_layers=2)
    held, _ = swept(model, ids(5, 12), RECOMPUTED[chain])
    again, _ = swept(model, ids(5, 12), RECOMPUTED[chain], recomputes=True, store_bytes=store_bytes, work=tmp_path)
    assert again == held


def test_recomputing_holds_the_activations_of_one_batch(tiny, ids, monkeypatch):
    """The largest number of batches that are inside of the block at a time."""
    inside, most, call = set(), {}, Call.run

    def counted(self, block, hidden):
        inside.add(id(self))
        most[mode] = max(most.get(mode, 0), len(inside))
        try:
            return call(self, block, hidden)
        finally:
            inside.discard(id(self))

    monkeypatch.setattr(Call, "run", counted)
    for mode in (False, True):
        swept(tiny("mixtral", num_hidden_layers=1), ids(8, 12), [compress.GPTQ(**G)], recomputes=mode)
    assert most == {False: 4, True: 1}


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
