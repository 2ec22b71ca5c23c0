"""Blocks are found in every family without a table, and what is no chain of blocks is refused."""

import pytest
import torch
from batches import batch_of
from tolerances import near
from torch import nn

from compress.blockwise.capture import ModelShell
from compress.errors import ModelError
from compress.models.structure.blocks import find_blocks

PLACES = {
    "llama": "model.layers",
    "qwen2": "model.layers",
    "qwen3": "model.layers",
    "gpt2": "transformer.h",
    "opt": "model.decoder.layers",
    "gpt-neox": "gpt_neox.layers",
    "gpt-neox-parallel": "gpt_neox.layers",
    "gemma2": "model.layers",
}


@pytest.mark.parametrize("family", PLACES)
def test_blocks_are_found_in_order_and_are_chained(family, tiny, in_memory, ids):
    model = tiny(family)
    opened = in_memory(model)
    assert [(b.index, b.name) for b in opened.blocks] == [(i, f"{PLACES[family]}.{i}") for i in range(3)]
    assert all(block.module is model.get_submodule(block.name) for block in opened.blocks)
    assert len(ModelShell(opened).capture(batch_of(ids())).calls) == 3


@pytest.mark.parametrize("stated", [True, False], ids=["tied names", "one parameter"])
def test_blocks_that_share_weights_are_refused(stated, tiny):
    model = tiny("llama")
    first, last = (f"model.layers.{i}.mlp.up_proj.weight" for i in (0, 2))
    if stated:
        model.all_tied_weights_keys = {last: first}
    else:
        model.model.layers[2].mlp.up_proj = model.model.layers[0].mlp.up_proj
    with pytest.raises(ModelError, match=rf"shares weights between its blocks \({first} and {last}\).*another model"):
        find_blocks(model)


def test_the_list_with_the_most_parameters_is_taken_and_lists_inside_it_are_not():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    model = nn.Module()
    model.adapters = nn.ModuleList(nn.Linear(2, 2) for _ in range(9))
    model.layers = nn.ModuleList(Mixture() for _ in range(2))
    assert [block.name for block in find_blocks(model)] == ["layers.0", "layers.1"]


def test_a_model_without_a_list_of_blocks_is_refused():
    with pytest.raises(ModelError, match=r"Sequential has no list of blocks \(no torch\.nn\.ModuleList with entries\)"):
        find_blocks(nn.Sequential(nn.Linear(2, 2)))


class Model(nn.Module):
    """Two blocks and a way to call them."""

    def __init__(self, between=lambda x: x, used: int = 2, **call):
        super().__init__()
        self.embed = nn.Embedding(64, 8)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.between, self.used, self.call = between, used, call
        self.config = type("Config", (), {})()

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for layer in self.layers[: self.used]:
            x = self.between(layer(**{self.call["keyword"]: x}) if self.call else layer(x))
        return {"logits": x}


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states):
        return hidden_states + self.linear(hidden_states)


class Named(Layer):
    def forward(self, states):
        return super().forward(states)


def test_blocks_that_do_not_pass_hidden_states_straight_on_are_refused(in_memory, ids):
    opened = in_memory(Model(between=lambda x: 2 * x))
    with pytest.raises(ModelError, match=r"layers\.1 does not receive the unchanged output of the block before it"):
        ModelShell(opened).capture(batch_of(ids()))


def test_blocks_that_do_not_all_run_are_refused(in_memory, ids):
    with pytest.raises(ModelError, match="1 of 2 blocks ran in a forward pass"):
        ModelShell(in_memory(Model(used=1))).capture(batch_of(ids()))


def test_hidden_states_may_be_passed_by_keyword(in_memory, ids):
    model = Model(keyword="hidden_states")
    captured = ModelShell(in_memory(model)).capture(batch_of(ids()))
    with torch.no_grad():
        assert torch.equal(captured.hidden, model.embed(ids()))
        output = captured.calls[0].run(model.layers[0], captured.hidden)
        assert near(output, model.layers[0](model.embed(ids())))


def test_blocks_called_without_hidden_states_are_refused(in_memory, ids):
    model = Model(keyword="states")
    model.layers = nn.ModuleList(Named() for _ in range(2))
    with pytest.raises(ModelError, match=r"layers\.0 is called without hidden states as its first argument"):
        ModelShell(in_memory(model)).capture(batch_of(ids()))
