"""A sweep whose sequences and layers are divided over processes gives what one process gives, but for float sums."""

import copy
from dataclasses import replace

import pytest
import torch
from batches import batch_of
from launching import in_threads

import compress
from compress.errors import NumericError, VerificationError
from compress.layers.linear import CompressedLinear, linears
from compress.models.experts import open_experts
from compress.models.kinds.batch import Examples
from compress.numerics.metrics import relative_error
from compress.passes.contract.journal import Journal
from compress.passes.contract.processes import ALONE
from compress.pipeline.divide import own_batches
from compress.pipeline.engine import Memory, engine
from compress.pipeline.resolve import resolve, run_of
from compress.pipeline.sources import in_memory

G = {"group_size": 16}
W8A8 = {"weights": "int8", "group_size": "channel", "activations": "int8"}
CHAINS = {
    "gptq": [compress.GPTQ(weights="int4", **G)],
    "gptq asymmetric": [compress.GPTQ(weights="int4", error="asymmetric", **G)],
    "gptq on the original block": [compress.GPTQ(weights="int4", true_sequential=False, **G)],
    "wanda": [compress.Wanda(sparsity=0.5)],
    "wanda, allocated": [compress.Wanda(sparsity=0.5, allocate={"owl": {"M": 5, "lambda": 0.08}})],
    "sparsegpt": [compress.SparseGPT(pattern="2:4")],
    "awq, gptq": [compress.AWQ(weights="int4", **G), compress.GPTQ(weights="int4", **G)],
    "fptq": [compress.FPTQ(equalize_above=2), compress.RTN(weights="int8", group_size="channel")],
    "outlier_suppression": [compress.OutlierSuppression(steps=4), compress.RTN(**W8A8)],
    "smoothquant, static": [compress.SmoothQuant(), compress.RTN(**W8A8, activation_scale="static")],
    "smoothquant, searched": [compress.SmoothQuant(alpha="search"), compress.RTN(**W8A8)],
    "permutation": [compress.ChannelPermutation(), compress.SparseGPT(pattern="2:4")],
    "llm_int8": [compress.LLMInt8(outliers="calibrated")],
    "gptq, lorc": [compress.GPTQ(weights="int3", **G), compress.LoRC(rank=2)],
    "signround": [compress.SignRound(weights="int4", iterations=4, **G)],
    "omniquant": [compress.OmniQuant(weights="int3", epochs=2, transform=True, hold_out=0.5, **G)],
    "cache": [compress.KVCache(scale="static"), compress.GPTQ(weights="int4", **G)],
}

SEARCHED = {"awq, gptq", "smoothquant, searched", "gptq, lorc", "signround", "omniquant"}
"""Chains in which the last bit of a statistic, or other sampled rows, may move a whole layer."""


def swept(model, ids, passes, processes=ALONE):
    """The model after the passes, in one of some processes."""
    opened = in_memory(model)
    open_experts(opened.model)
    asked = compress.Recipe(model="pico", passes=passes, save={"format": "native"}, eval=None)
    resolved = resolve(asked, opened)
    run = run_of(resolved, Journal(), processes=processes, calibration=ids)
    with torch.no_grad():
        engine(resolved, own_batches(Examples.of_ids(ids), 4, processes), batch_of(ids[:1]), run, Memory())
    return opened.model, [(e.where, e.message) for e in run.journal.entries]


def agreement(one, two) -> float:
    """The share of weights that two models agree on."""
    wanted, got = (
        {n: CompressedLinear.of(layer).weight.float() for n, layer in linears(m).items()} for m in (one, two)
    )
    same = sum(int(torch.isclose(wanted[n], got[n], rtol=1e-3, atol=1e-5).sum()) for n in wanted)
    return same / sum(weight.numel() for weight in wanted.values())


def state(model) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in model.state_dict().values())


@pytest.mark.few(4)
@pytest.mark.parametrize("chain", CHAINS)
def test_two_processes_compute_what_one_computes(chain, tiny, ids):
    model, text = tiny("llama", num_hidden_layers=2), ids(8, 24)
    alone, notes = swept(copy.deepcopy(model), text, CHAINS[chain])
    found = in_threads(2, lambda processes: swept(copy.deepcopy(model), text, CHAINS[chain], processes))
    again = in_threads(2, lambda processes: swept(copy.deepcopy(model), text, CHAINS[chain], processes))
    assert state(found[0][0]) == state(found[1][0]) == state(again[0][0])  # the same bits everywhere and each time
    assert found[0][1] == notes  # who solved a layer does not show in the journal
    assert chain in SEARCHED or agreement(alone, found[0][0]) > 0.99
    logits = [one(input_ids=text).logits for one in (model, alone, found[0][0])]
    one, other = (relative_error(each, logits[0]) for each in logits[1:])
    assert other == pytest.approx(one, rel=0.15)  # as far from the uncompressed model


@pytest.mark.parametrize("chain", ["gptq", "wanda", "gptq on the original block"])
def test_experts_that_get_tokens_in_some_processes_only(chain, tiny, ids):
    model, text = tiny("mixtral"), ids(3, 3)  # three tokens in each process
    alone, _ = swept(copy.deepcopy(model), text, CHAINS[chain])
    found = in_threads(3, lambda processes: swept(copy.deepcopy(model), text, CHAINS[chain], processes))
    assert state(found[0][0]) == state(found[1][0]) == state(found[2][0])
    assert agreement(alone, found[0][0]) > 0.98


def test_every_batch_is_divided_by_the_numbers_of_its_sequences():
    ids = Examples.of_ids(torch.arange(10)[:, None])
    parts = [
        [part.inputs["input_ids"].flatten().tolist() for part in own]
        for own in in_threads(3, lambda p: own_batches(ids, 4, p))
    ]
    assert parts == [[[0, 3], [6], [9]], [[1], [4, 7]], [[2], [5], [8]]]
    assert [part.inputs["input_ids"].flatten().tolist() for part in own_batches(ids, 4, ALONE)] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]


def test_a_pass_that_does_not_combine_what_processes_compute_is_found_out(tiny, ids):
    class Own(compress.SmoothQuant):
        """Changes a weight by what this process alone sees."""

        def effects(self, layer):
            return replace(super().effects(layer), prepares=None)

        def solve_block(self, block, inputs, log):
            top = max(float(inputs.forward(block, i).abs().max()) for i in range(inputs.batches))
            next(block.parameters()).data += top

    with pytest.raises(
        VerificationError, match=r"layers\.0: processes computed different weights; .*inputs\.processes"
    ):
        in_threads(2, lambda processes: swept(tiny("llama"), ids(8, 24), [Own()], processes))


def test_an_error_in_one_process_names_its_layer(tiny, ids):
    class Fails(compress.RTN):
        def codes(self, weight, seen, layer):
            raise NumericError("no")

    with pytest.raises(NumericError, match=r"passes\[0\].* model\.layers\.0\..*: no"):
        in_threads(2, lambda processes: swept(tiny("llama"), ids(8, 24), [Fails(group_size=16)], processes))
