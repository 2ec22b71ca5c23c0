"""A run of several segments that is killed anywhere goes on after the last one, and ends with the same bytes."""

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import compress
from compress import (
    GPTQ,
    LKD,
    QAT,
    RTN,
    ChannelPermutation,
    Distill,
    DropBlocks,
    Finetune,
    KVCache,
    LLMInt8,
    Rotate,
    SliceGPT,
    SmoothQuant,
    Wanda,
)
from compress.checkpoint.exact import ExactCodec, restore_exact, restore_state, state_of
from compress.checkpoint.writer import CheckpointWriter
from compress.layers.linear import CompressedLinear
from compress.layers.transforms.rounding import InputRounding
from compress.models.caches.attentions import cache_sha256, policy_of, set_policy
from compress.models.structure.blocks import Block
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import SparseLayout
from compress.passes.contract.journal import Journal
from compress.pipeline.engine import segments

FEW = {"steps": 2, "batch": 2}
ATTENTION = "*.self_attn.*"
CHAINS = {
    "pruned, trained, quantized": (lambda: (Wanda(pattern="2:4"), Finetune(**FEW), GPTQ(group_size=32)), 3),
    "dropped, quantized": (lambda: (DropBlocks(count=1), GPTQ(group_size=32)), 2),
    "sliced, scaled, quantized": (lambda: (SliceGPT(sparsity=0.25), SmoothQuant(), RTN(group_size=16)), 2),
    "rotated, scaled, quantized": (lambda: (Rotate(online="down_proj"), SmoothQuant(), RTN(group_size=32)), 2),
    "quantized, distilled": (lambda: (GPTQ(group_size=32, symmetric=False), Distill(**FEW)), 2),
    "cached, trained, quantized": (
        lambda: (KVCache(keys="int8", values="int8", scale="static"), Finetune(**FEW), RTN(group_size=32)),
        3,
    ),
    "ordered, pruned, trained, learned": (
        lambda: (
            ChannelPermutation(escapes=0),
            Wanda(pattern="2:4"),
            Finetune(**FEW),
            LLMInt8(targets=ATTENTION),
            RTN(targets="*.mlp.*", group_size=32),
            LKD(epochs=1, targets="*.mlp.*"),
            Distill(**FEW, train=("scales",)),
        ),
        4,
    ),
    "compared with the reference": (
        lambda: (Wanda(sparsity=0.6), Finetune(**FEW), GPTQ(error="asymmetric", group_size=32)),
        3,
    ),
    "trained twice": (lambda: (Finetune(**FEW), QAT(**FEW, group_size=32)), 2),
}
SAVE = {"format": "native", "verify": "own"}


def spoken(manifest):
    """What a finished manifest says of the work."""
    found = {}
    for name, entry in manifest["shards"].items():
        notes = [note for note in entry["journal"] if note["message"] != "training resumes"]  # one that was killed
        found[name] = entry["results"], notes
    return found, sorted(manifest["training"])


@pytest.fixture
def never_stopped(recipe, tmp_path, manifest_of):
    """never_stopped(name) -> (recipe, checkpoint's sha256, what its manifest says)."""

    def finished(name, **save):
        asked = recipe(*CHAINS[name][0](), save={**SAVE, **save}, eval=compress.Evaluate(perplexity=()))
        report = compress.run(asked, tmp_path / "whole").report
        return asked, report["checkpoint_sha256"], spoken(manifest_of(tmp_path / "whole"))

    return finished


def places(name):
    """(what is killed, where) of a chain: after each segment but the last, and at the second block of each."""
    count = CHAINS[name][1]
    yield from (("segment", i) for i in range(count - 1))
    yield from (("block", i) for i in range(count))


CASES = [(name, kind, at) for name in CHAINS for kind, at in places(name)]


@pytest.mark.few(2, slow=12)
@pytest.mark.parametrize(("name", "kind", "at"), CASES)
def test_a_killed_run_goes_on_after_the_last_segment(name, kind, at, never_stopped, stop, tmp_path, manifest_of):
    asked, wanted, said = never_stopped(name)
    out, worked = tmp_path / "killed", []

    def here(entry):
        here = entry.kind == kind and entry.figures["segment"] == at
        return here and (kind == "segment" or entry.figures["block"] == 1)

    stop(asked, out, here)
    kept = {int(path.name) for path in (out / ".compress" / "segments").glob("*")}
    last = kind == "block" and at == CHAINS[name][1] - 1  # whose blocks are shards of the checkpoint
    assert kept == ({at} if kind == "segment" else {at - 1, at} - {-1} - ({at} if last else set()))
    journal = Journal(listeners=[lambda entry: worked.append(entry) if entry.kind in ("block", "segment") else None])
    report = compress.run(asked, out, journal=journal).report
    assert report["checkpoint_sha256"] == wanted
    again = {(entry.figures["segment"], entry.message) for entry in worked if entry.kind == "block"}
    assert not [pair for pair in again if pair[0] < at + (kind == "segment")], "done twice"
    assert spoken(manifest_of(out)) == said
    assert not (out / ".compress" / "segments").exists()


@pytest.mark.parametrize("name", ["pruned, trained, quantized", "quantized, distilled"])
def test_a_finished_run_of_several_segments_computes_a_lost_shard_again(name, never_stopped, tmp_path, manifest_of):
    asked, wanted, said = never_stopped(name)
    (tmp_path / "whole" / "model-00002-of-00004.safetensors").unlink()
    assert compress.run(asked, tmp_path / "whole").report["checkpoint_sha256"] == wanted
    assert spoken(manifest_of(tmp_path / "whole")) == said


@pytest.mark.slow
def test_it_may_be_killed_again_and_again(never_stopped, stop, tmp_path):
    asked, wanted, _ = never_stopped("ordered, pruned, trained, learned")
    heard = []

    def here(entry):
        new = entry.kind in ("block", "segment") and (entry.kind, entry.message, entry.figures["segment"]) not in heard
        if new:
            heard.append((entry.kind, entry.message, entry.figures["segment"]))
        return new

    for _ in range(3 * 4 + 3):
        stop(asked, tmp_path / "killed", here)
    assert compress.run(asked, tmp_path / "killed").report["checkpoint_sha256"] == wanted


@pytest.mark.parametrize("damage", ["a block", "outside", "gone"])
def test_a_snapshot_that_is_damaged_is_not_used(damage, recipe, stop, tmp_path):
    asked = recipe(RTN(group_size=32), Distill(**FEW), save=SAVE, eval=compress.Evaluate(perplexity=()))
    wanted = compress.run(asked, tmp_path / "whole").report["checkpoint_sha256"]
    stop(asked, tmp_path / "killed", lambda entry: entry.kind == "segment")
    names = {"a block": "00003", "outside": "00001", "gone": "00002"}
    path = tmp_path / "killed" / ".compress" / "segments" / "0" / f"model-{names[damage]}-of-00004.safetensors"
    if damage == "gone":
        path.unlink()
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    heard = []
    again = compress.run(asked, tmp_path / "killed", journal=Journal(listeners=[heard.append]))
    assert again.report["checkpoint_sha256"] == wanted
    assert [e.figures["segment"] for e in heard if e.kind == "block"] == [0, 0, 0, 1, 1, 1]


def test_the_parts_that_a_recipe_is_worked_in():
    steps = [("a", Wanda(), []), ("b", RTN(), []), ("c", Finetune(), []), ("d", Distill(), []), ("e", RTN(), [])]
    found = segments(steps)
    assert [[label for label, _, _ in part.steps] for part in found] == [["a", "b"], ["c"], ["d"], ["e"]]
    assert [(part.index, part.first_step, part.swept, part.last) for part in found] == [
        (0, 0, True, False),
        (1, 2, False, False),
        (2, 3, False, False),
        (3, 4, True, True),
    ]


# A block as it is in memory


def layer_like(kind: str, linear: nn.Linear) -> CompressedLinear:
    """A linear as some pass may leave it for a later one."""
    layer = CompressedLinear.of(linear)
    keep = torch.rand(layer.shape, generator=torch.Generator().manual_seed(0)) > 0.5
    if kind == "masked":
        layer.put(layer.weight * keep, keep)
    elif kind == "ordered":
        layer.put(layer.weight * keep, keep)
        layer.permute_input(torch.randperm(layer.shape[1], generator=torch.Generator().manual_seed(1)))
        layer.rescale_input(torch.linspace(0.5, 2, layer.shape[1]))
    elif kind == "rounded inputs":
        layer.round_inputs(InputRounding.of(GRIDS["int8"], torch.tensor([0.5]), 6.0, torch.arange(layer.shape[1]) == 3))
    elif kind == "kept alone":
        layer.put(layer.weight * keep, keep)
        layer.store_kept(SparseLayout(int(keep.sum())))
    elif kind == "half":
        layer.put(layer.weight.bfloat16())
    elif kind == "turned":
        layer.put(layer.weight.T.contiguous().T)
    return layer


@pytest.mark.parametrize("kind", ["dense", "masked", "ordered", "rounded inputs", "kept alone", "half", "turned"])
def test_a_layer_comes_back_as_it_was(kind, tmp_path):
    torch.manual_seed(0)
    block, other = nn.ModuleDict({"up": nn.Linear(12, 7)}), nn.ModuleDict({"up": nn.Linear(12, 7)})
    layer = block["up"] = layer_like(kind, block["up"])
    if kind != "dense":
        other["up"] = layer_like("ordered", other["up"])  # nothing of what was there before is left
    written = Block(0, "block", block)
    entry = CheckpointWriter(SimpleNamespace(blocks=[written]), ExactCodec(), tmp_path, tmp_path).add(written)
    entry.state = json.loads(json.dumps(asdict(entry)["state"]))
    assert restore_exact(tmp_path, entry, other, torch.device("cpu"))
    found = other["up"]
    assert found.state_dict().keys() == layer.state_dict().keys()
    for name, tensor in layer.state_dict().items():
        again = found.state_dict()[name]
        assert torch.equal(again, tensor) and again.dtype == tensor.dtype and again.stride() == tensor.stride(), name
    assert found.scheme == layer.scheme
    assert found.extra_repr() == layer.extra_repr()
    x = torch.randn(3, 12)
    if kind != "half":
        assert torch.equal(found(x), layer(x))


def test_cache_policies_come_back(pico_model, tmp_path):
    block = pico_model.model.layers[0]
    policy = KVCache(keys="int8", values="int8", scale="static").cache
    set_policy(block.self_attn, policy, {"k_scale": torch.tensor([0.5]), "v_scale": torch.tensor([0.25])})
    tensors, record = state_of(block)
    other = pico_model.model.layers[1]
    for _ in range(2):  # also where the policy is installed already
        restore_state(other, tensors, json.loads(json.dumps(record)))
        assert policy_of(other.self_attn) == policy
        assert cache_sha256(other.self_attn) == cache_sha256(block.self_attn)
        assert len(other.self_attn._forward_pre_hooks) == len(block.self_attn._forward_pre_hooks)
