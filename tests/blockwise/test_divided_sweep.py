"""A sweep whose sequences and layers are divided over processes gives what one process gives, but for float sums."""

import copy
import itertools
import threading
import weakref
from dataclasses import replace
from typing import ClassVar

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
from compress.passes.contract.observers import Gram, InputNorm, Observer
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


def swept(model, ids, passes, processes=ALONE, work=None):
    """The model after the passes, in one of some processes. work: the folder of the run."""
    opened = in_memory(model)
    open_experts(opened.model)
    asked = compress.Recipe(model="pico", passes=passes, save={"format": "native"}, eval=None)
    resolved = resolve(asked, opened)
    run = run_of(resolved, Journal(), processes=processes, calibration=ids, work=work)
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


class Counted(Observer):
    """An observer with a number of its own, and the observers of each process that are in memory."""

    numbers = itertools.count()
    alive = weakref.WeakSet()
    made, most = {}, {}  # by process: all, and the most at once

    def __init__(self, width, device):
        super().__init__(width, device)
        self.number, self.process = next(Counted.numbers), threading.get_ident()
        Counted.alive.add(self)
        self.made[self.process] = self.made.get(self.process, 0) + 1
        self.most[self.process] = max(self.most.get(self.process, 0), len(self.of_process()))

    @staticmethod
    def of_process():
        return {observer.number for observer in list(Counted.alive) if observer.process == threading.get_ident()}


class CountedNorm(Counted, InputNorm):
    pass


class CountedGram(Counted, Gram):
    pass


solved = {}
"""For each process, of each layer that it solves: the number of its observer, and those of all that are in memory."""


class Watched(compress.Wanda):
    """Notes the statistics that are in memory when a layer is solved."""

    watched: ClassVar = CountedNorm

    @property
    def observer(self):
        return self.watched

    def solve(self, weight, statistics, layer):
        solved.setdefault(threading.get_ident(), []).append((statistics.number, Counted.of_process()))
        return super().solve(weight, statistics, layer)


class WatchedHessians(Watched):
    watched: ClassVar = CountedGram


@pytest.mark.parametrize("step", [Watched, WatchedHessians])
@pytest.mark.parametrize("processes", [1, 2, 3])
def test_a_process_holds_the_statistics_of_the_layers_that_it_solves(processes, step, tiny, ids):
    model, text = tiny("mixtral", num_hidden_layers=1), ids(6, 8)
    for records in (solved, Counted.made, Counted.most):
        records.clear()
    chain = [step(sparsity=0.5, repair=0, true_sequential=False)]
    in_threads(processes, lambda each: swept(copy.deepcopy(model), text, chain, each))
    assert len(solved) == processes
    for process, layers in solved.items():
        used = {number for number, _ in layers}
        assert processes == 1 or all(alive <= used for _, alive in layers)  # none of a layer of another process
        assert len(layers[-1][1]) == 1  # they are freed layer by layer
        # a Hessian is as large for some sequences as for all of them, so fewer are observed at once
        share = -(-Counted.made[process] // processes) if step is WatchedHessians else Counted.made[process]
        assert Counted.most[process] == share
        assert processes == 1 or len(used) < Counted.made[process]


@pytest.mark.parametrize("chain", ["wanda", "gptq on the original block"])
def test_weights_in_files_are_the_same(chain, tiny, ids, tmp_path, monkeypatch):
    model, text = tiny("mixtral", num_hidden_layers=2), ids(4, 8)
    held = in_threads(2, lambda each: swept(copy.deepcopy(model), text, CHAINS[chain], each))
    monkeypatch.setattr("compress.models.paged.LEAST_BYTES", 0)
    in_files = in_threads(2, lambda each: swept(copy.deepcopy(model), text, CHAINS[chain], each, tmp_path / "work"))
    assert (tmp_path / "work").exists() and not list((tmp_path / "work").iterdir())
    assert state(held[0][0]) == state(in_files[0][0]) == state(in_files[1][0])


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
