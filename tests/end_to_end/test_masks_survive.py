"""A mask that pruning made stands bit for bit after every pass that follows, in the shard and in the reloaded model.

Random chains of passes on tiny models: after each pass every weight outside of the mask is zero and the mask is that of
the pruning pass; the written checkpoint holds the same zeros, and where it holds masks the same masks.
"""

import tempfile
from pathlib import Path

import pytest
import torch
from followers import AWQAlone, ChannelPermutationAlone, SmoothQuantAlone
from hypothesis import given, note, reject, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

import compress
from compress import GPTQ, HQQ, RTN, SignRound, Wanda
from compress.checkpoint.formats import FORMATS
from compress.layers.linear import CompressedLinear, linears
from compress.numerics.quant.grids import GRIDS, IntGrid
from compress.passes.contract.journal import Journal
from compress.pipeline.finish import finish
from compress.pipeline.prepare import prepare
from compress.pipeline.run import compress as work

FAMILIES = ["llama", "gpt2", "opt"]


@st.composite
def pruning(draw):
    """Wanda with any pattern, on all layers or on some."""
    m = draw(st.integers(2, 12))
    pattern = draw(st.sampled_from(["row", "layer", f"{draw(st.integers(1, m - 1))}:{m}", "2:4"]))
    options = {} if ":" in pattern else {"sparsity": draw(st.sampled_from([0.05, 0.3, 0.5, 0.75, 0.95]))}
    return Wanda(pattern=pattern, targets=draw(st.sampled_from(["*", "re:.*(mlp|fc|attn).*"])), **options)


@st.composite
def preparing(draw):
    """Passes that rescale dense weights, each at most once and in any order."""
    found = [SmoothQuantAlone(alpha=draw(st.sampled_from([0.3, 0.5, 0.8]))), AWQAlone(weights="int4", group_size=16)]
    return draw(st.permutations(draw(st.lists(st.sampled_from(found), unique_by=type, max_size=2))))


@st.composite
def quantizing(draw, integers):
    """Any rounding to any grid, groups of any kind."""
    kind = draw(st.sampled_from([RTN, GPTQ, HQQ, SignRound]))
    whole = [name for name, grid in GRIDS.items() if grid.block == 1]  # no layer here is as wide as a super-block
    known = [name for name in whole if not integers or (isinstance(GRIDS[name], IntGrid) and GRIDS[name].plain)]
    if kind is HQQ:  # it finds scales among plain floats
        known = [name for name in known if GRIDS[name].free_scales]
    grid = GRIDS[draw(st.sampled_from(known))]
    group = grid.group_size or draw(st.sampled_from(["channel", 16] if integers else ["channel", 5, 16]))
    symmetric = not grid.offset and (grid.symmetric_only or draw(st.booleans()))
    options = {"iterations": 2} if kind is SignRound else {}
    return kind(weights=grid.name, group_size=group, symmetric=symmetric, **options)


@st.composite
def chains(draw):
    """(passes, format, its options): pruning once or twice, then what prepares, then perhaps a rounding."""
    name = draw(st.sampled_from(["native", "native", "dense", "compressed-tensors"]))
    save = {"format": name, "dtype": draw(st.sampled_from(["auto", "bfloat16"])), "verify": "own"}
    if name == "native":
        save["sparse"] = draw(st.sampled_from(["auto", "always", "off"]))
    steps = draw(st.lists(pruning(), min_size=1, max_size=2)) + draw(preparing())
    if draw(st.booleans()):
        steps.insert(0, SmoothQuantAlone())
    if draw(st.booleans()):  # an order that is kept with inputs is taken back where masks are not stored
        unlinked = "keep" if save.get("sparse") == "always" else "skip"
        steps.insert(0, ChannelPermutationAlone(score="magnitude", escapes=0, unlinked=unlinked))
    if draw(st.integers(0, 3)):
        steps.append(draw(quantizing(integers=name == "compressed-tensors")))
    return steps, save


class Watch:
    """The masks of a run after each of its passes, compared as they are made, and what is written.

    It listens to the run's journal, which tells of every block and pass before the pass begins.
    """

    def __init__(self, model):
        self.model, self.masks, self.weights, self.working = model, {}, {}, {}

    def __call__(self, entry):
        name = entry.message
        if entry.kind == "progress" and "step" in entry.figures:
            if name in self.working:
                self.pass_done(name, self.working[name])  # the one before has done its work
            self.working[name] = entry.figures["step"]
        elif entry.kind == "block":
            self.pass_done(name, self.working[name])
            self.written(name)

    def pass_done(self, block, label):
        for name, layer in linears(self.model.get_submodule(block)).items():
            full = f"{block}.{name}"
            mask = layer.mask if isinstance(layer, CompressedLinear) else None
            assert mask is not None or full not in self.masks, f"{label} lost the mask of {full}"
            if mask is None:
                continue
            before = self.masks.get(full)
            if "wanda" in label:  # it may prune more
                assert before is None or not bool((mask & ~before).any()), f"{label} brought weights of {full} back"
            else:
                assert torch.equal(mask, before), f"{label} changed the mask of {full}"
            assert not bool(layer.weight[~mask].any()), f"{label} filled zeros of {full}"
            self.masks[full] = mask.clone()

    def written(self, block):
        for name, layer in linears(self.model.get_submodule(block)).items():
            if f"{block}.{name}" in self.masks:
                self.weights[f"{block}.{name}"] = layer.weight.float().clone()


@pytest.fixture(scope="module")
def watched():
    """watched(recipe, folder) -> Watch of a run."""

    def run(recipe, folder):
        journal = Journal()
        job = prepare(recipe, Path(folder), False, journal)
        watch = Watch(job.opened.model)
        journal.listeners.append(watch)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("compress.pipeline.finish.gc.collect", lambda: 0)  # most of the time that a tiny run takes
            work(job)
            finish(job)
        return watch

    return run


def zeros_on_disk(folder, model, full):
    """The stored weight [out, in] of a linear as numbers, read without `compress.load`."""
    tensors = {}
    for path in Path(folder).glob("*.safetensors"):
        tensors |= {k: v for k, v in load_file(path).items() if k.startswith(full + ".")}
    layer = model.get_submodule(full)
    inside = {name.removeprefix(full + "."): t for name, t in tensors.items()}
    if "weight" in inside and not isinstance(layer, CompressedLinear):
        weight = inside["weight"]
        return weight.T if type(layer).__name__ == "Conv1D" else weight
    name = "compressed-tensors" if "weight_shape" in inside or inside.get("weight") is not None else "native"
    (part,), _ = FORMATS[name].decode(inside, layer.scheme)
    return part.dense(part.dtype)


@pytest.mark.slow
@settings(max_examples=8)
@given(chains(), st.sampled_from(FAMILIES))
def test_chains_of_passes_keep_the_mask(watched, recipe, one_block, chain, family):
    steps, save = chain
    asked = recipe(*steps, model=one_block(family), save=save)
    note(f"{family} {steps} {save}")
    with tempfile.TemporaryDirectory() as folder:
        try:
            compress.plan(asked)
        except compress.errors.TargetError:
            reject()  # the format refuses this grid or these groups
        watch = watched(asked, folder)
        model, _ = compress.load(folder)
        assert watch.masks
        for full, mask in watch.masks.items():
            layer = model.get_submodule(full)
            sparse = isinstance(layer, CompressedLinear) and layer.mask is not None
            stored = zeros_on_disk(folder, model, full)
            assert not bool(stored[~mask].any())
            loaded = layer.weight if isinstance(layer, CompressedLinear) else stored
            assert not bool(loaded[~mask].any()) and torch.equal(loaded.float(), watch.weights[full])
            assert sparse or save.get("sparse") != "always"
            if sparse:
                assert save["format"] == "native" and save["sparse"] != "off"
                assert torch.equal(layer.mask, mask)
