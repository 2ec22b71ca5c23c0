"""Experts kept as 3-D weights are opened without copying, proved, calibrated, saved, and read back by everyone."""

import copy
import re

import pytest
import torch
from tolerances import LOGITS
from torch import nn
from transformers import AutoModelForCausalLM, GptOssConfig

import compress
from compress.checkpoint.opening import open_model
from compress.layers.linear import linears
from compress.models.experts import Experts, exercised, open_experts
from compress.models.structure.links import find_groups, find_links, fold
from compress.numerics.metrics import relative_error
from compress.passes.contract.journal import Journal
from compress.passes.prepare.smoothquant import SmoothQuant
from compress.passes.prune.wanda import Wanda
from compress.passes.quantize.gptq import GPTQ
from compress.passes.quantize.rtn import RTN

FAMILIES = {"mixtral": ("w1", "w3", "w2"), "qwen3-moe": ("gate_proj", "up_proj", "down_proj")}


def logits(model, ids):
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_opened_experts_compute_the_same_and_share_the_memory(family, tiny, ids):
    model = tiny(family)
    before, cubes = logits(model, ids()), dict(model.model.layers[0].mlp.experts.named_parameters())
    assert open_experts(model) == []
    torch.testing.assert_close(logits(model, ids()), before, rtol=1e-5, atol=1e-5)
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts, Experts) and experts.named
    assert [name for name in linears(experts) if name.startswith("2.")] == [f"2.{name}" for name in FAMILIES[family]]
    gate, up, down = (experts.get_submodule(f"2.{name}").weight for name in FAMILIES[family])
    assert torch.equal(torch.cat([gate, up]), cubes["gate_up_proj"][2]) and torch.equal(down, cubes["down_proj"][2])
    assert up.untyped_storage().data_ptr() == cubes["gate_up_proj"].untyped_storage().data_ptr()
    assert down.untyped_storage().data_ptr() == cubes["down_proj"].untyped_storage().data_ptr()


def test_transposed_experts_with_biases_and_another_gate(ids):
    torch.manual_seed(0)
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1, "head_dim": 8}
    config = GptOssConfig(**shape, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter += 0.1 * torch.randn_like(parameter)
    before = logits(model, ids())
    assert open_experts(model) == []
    torch.testing.assert_close(logits(model, ids()), before, rtol=1e-5, atol=1e-5)
    experts = model.model.layers[0].mlp.experts
    assert experts.get_submodule("1.gate_up_proj").weight.shape == (48, 32)
    assert not experts.named  # transformers stores them whole


class Odd(nn.Module):
    """3-D weights with routing that the opened form does not know: the order of the experts is turned around."""

    def __init__(self, call=True):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(3, 6, 4)), nn.Parameter(torch.randn(3, 4, 6))
        self.act_fn, self.call = nn.ReLU(), call

    def forward(self, x, chosen, weights):
        if not self.call:
            raise ValueError("not like this")
        output = torch.zeros_like(x)
        for e in range(3):
            token, place = torch.where(chosen == 2 - e)
            hidden = self.act_fn(x[token] @ self.up[e].T)
            output.index_add_(0, token, hidden @ self.down[e].T * weights[token, place, None])
        return output


@pytest.mark.parametrize(
    ("call", "why"),
    [
        (True, r"the opened form computes other values \(relative error \S+\)"),
        (False, r"does not accept tokens.*not like this"),
    ],
)
def test_what_cannot_be_proved_stays_as_it_was_and_is_told(call, why):
    model = nn.Module()
    model.moe = odd = Odd(call)
    (log,) = open_experts(model)
    assert log.startswith("moe: its 3-D weights are not compressed: ")
    assert re.search(why, log)
    assert model.moe is odd


def test_three_dimensional_weights_that_are_no_experts_are_left_alone():
    model = nn.Module()
    model.conv = nn.Conv1d(4, 4, 3)
    assert open_experts(model) == [] and isinstance(model.conv, nn.Conv1d)


@pytest.fixture
def opened_block(second_block, monkeypatch):
    """opened_block(family) -> (a block with opened experts, its forward pass)."""

    def make(family):
        block, forward = second_block(family)
        names = {"gate_up_proj": FAMILIES[family][:2], "down_proj": FAMILIES[family][2:]}
        monkeypatch.setattr("compress.models.experts.stored_names", lambda model: names)
        assert open_experts(block) == []
        return block, forward

    return make


@pytest.mark.parametrize("family", FAMILIES)
def test_links_of_a_block_with_experts(family, opened_block):
    block, forward = opened_block(family)
    gate, up, down = FAMILIES[family]
    links = {link.source: link for link in find_links(block, forward)}
    norms = {link.source: set(link.readers) for link in links.values() if link.kind == "norm"}
    # The router reads the norm's output and is scaled along, and so is every expert, whether it saw a token or not.
    readers = {"mlp.gate"} | {f"mlp.experts.{e}.{name}" for e in range(4) for name in (gate, up)}
    attention = {f"self_attn.{name}_proj" for name in "qkv"}
    assert norms == {"input_layernorm": attention, "post_attention_layernorm": readers}
    assert {s: link.readers for s, link in links.items() if link.kind == "linear"} == {
        "self_attn.v_proj": ("self_attn.o_proj",),
        **{f"mlp.experts.{e}.{up}": (f"mlp.experts.{e}.{down}",) for e in range(4)},
    }
    with exercised(block):
        before = forward(block)
    for link in links.values():
        scale = link.equalize(torch.rand(len(link.channels), generator=torch.Generator().manual_seed(1)) * 4 + 0.25)
        assert fold(block, link, scale, forward).is_kept
    with exercised(block):
        assert relative_error(forward(block), before) < 1e-5
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def test_a_fold_that_forgets_the_router_is_refused(opened_block):
    block, forward = opened_block("mixtral")
    link = next(link for link in find_links(block, forward) if link.source == "post_attention_layernorm")
    without = copy.copy(link)
    object.__setattr__(without, "readers", tuple(name for name in link.readers if name != "mlp.gate"))
    assert not fold(block, without, torch.rand(32) + 0.5, forward).is_kept


def test_groups_of_experts_come_in_the_order_of_execution(opened_block):
    block, forward = opened_block("qwen3-moe")
    names = [group.linears for group in find_groups(block, forward)][2:]
    experts = [f"mlp.experts.{e}" for e in range(4)]
    assert names == [n for e in experts for n in ((f"{e}.gate_proj", f"{e}.up_proj"), (f"{e}.down_proj",))]


class Never(nn.Module):
    """A router that never chooses the last expert."""

    def __init__(self, router):
        super().__init__()
        self.router = router

    def forward(self, x):
        scores, weights, chosen = self.router(x)
        return scores, weights, torch.where(chosen == 3, 0, chosen)


@pytest.mark.parametrize(
    "step", [GPTQ(weights="int4", group_size=8, scale="absmax", refine=0), Wanda(sparsity=0.5)], ids=["gptq", "wanda"]
)
def test_an_expert_that_saw_no_token_is_solved_without_data_and_counted(step, tiny, ids):
    model, journal = tiny("mixtral"), Journal()
    for layer in model.model.layers:
        layer.mlp.gate = Never(layer.mlp.gate)
    dense = copy.deepcopy(model)
    open_experts(dense)
    compress.apply(model, [step], ids(8, 16), journal=journal)
    warnings = [e for e in journal.entries if e.kind == "fallback"]
    starved, few = (
        {e.where: e.figures for e in warnings if text in e.message} for text in ("without calibration", "saw few")
    )
    places = [f"passes[0] {step.key()} model.layers.{block}" for block in range(3)]
    assert list(starved) == list(few) == places and len(warnings) == 6
    figures = {"linears": 3, "first": "mlp.experts.3.w1", "tokens": 0, "wanted": 128}
    assert all(found == figures for found in starved.values())
    for found in few.values():
        assert found["linears"] in (6, 9) and found["first"].startswith("mlp.experts.") and found["wanted"] == 128
        low, high = map(int, str(found["tokens"]).split(" to "))
        assert 0 < low < high < 128
    name = "model.layers.1.mlp.experts.3.w3"
    weight, found = dense.get_submodule(name).weight, model.get_submodule(name).weight
    if isinstance(step, Wanda):
        kept = weight.abs() >= weight.abs().sort(dim=1).values[:, 16:17]
        assert torch.equal(found != 0, kept)
    else:
        nearest = compress.apply(dense, [RTN(weights="int4", group_size=8)]).get_submodule(name).weight
        assert torch.equal(found, nearest)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_is_streamed_with_its_experts(family, tiny_folder, tiny, ids):
    opened = open_model(tiny_folder(family))
    assert opened.weights.checkpoint is not None and opened.notes == []
    assert f"model.layers.0.mlp.experts.3.{FAMILIES[family][1]}" in opened.linear_names()
    with opened.streaming() as model:
        torch.testing.assert_close(logits(model, ids()), logits(tiny(family), ids()), rtol=1e-4, atol=1e-4)


@pytest.mark.few(4)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("passes", "save", "skipped"),
    [
        ([SmoothQuant(), GPTQ(weights="int4", group_size=16)], {}, None),
        ([Wanda(sparsity=0.5)], {"format": "dense"}, None),
        ([RTN(weights="int4", group_size=16, symmetric=False)], {"verify": "own"}, "verify: own"),
        ([RTN(weights="nf4", group_size=16)], {"format": "native"}, "compress.load only"),
    ],
    ids=["chain", "dense", "zero points", "native"],
)
def test_saved_experts_are_read_back(family, passes, save, skipped, tiny_folder, recipe, tmp_path):
    result = compress.run(recipe(*passes, model=tiny_folder(family), save=save), tmp_path)
    verified = result.report["verified"]
    assert verified["own"] <= LOGITS
    assert (verified["skipped"] is None) if skipped is None else (skipped in verified["skipped"])
    assert verified["layers"] == (0 if save.get("format") == "dense" else 3 * (4 + 12))
    model, _ = compress.load(tmp_path)
    assert isinstance(model.model.layers[0].mlp.experts, Experts)
