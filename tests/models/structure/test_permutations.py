"""Channels that may trade places are found with their heads, and every permutation is exact, proved, or refused."""

import copy

import pytest
import torch
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.models.structure.links import FOLD_TOLERANCE
from compress.models.structure.permutations import Permutation, find_permutations, permute
from compress.numerics.metrics import relative_error

GATED = (("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
VALUES = (("self_attn.v_proj",), ("self_attn.o_proj",))
OPT = {(("self_attn.v_proj",), ("self_attn.out_proj",)): 4, (("fc1",), ("fc2",)): 1}
NEOX = {(("mlp.dense_h_to_4h",), ("mlp.dense_4h_to_h",)): 1}
PARTS = {  # (sources, readers) -> how many parts: heads of values, or one for all hidden channels
    "llama": {VALUES: 2, GATED: 1},
    "qwen3": {VALUES: 2, GATED: 1},
    "gemma2": {VALUES: 2, GATED: 1},
    "gpt2": {(("mlp.c_fc",), ("mlp.c_proj",)): 1},
    "opt": OPT,
    "opt-post-norm": OPT,
    "gpt-neox": NEOX,
    "bloom": NEOX,
    "falcon": NEOX,
    "phi3": {},  # what is fused is not permuted
    "bert": {
        (("attention.self.value",), ("attention.output.dense",)): 4,
        (("intermediate.dense",), ("output.dense",)): 1,
    },
}


def random_order(link, seed=1):
    """An order within the parts."""
    order = torch.arange(len(link.parts))
    for part in link.parts.unique():
        inside = (link.parts == part).nonzero()[:, 0]
        order[inside] = inside[torch.randperm(len(inside), generator=torch.Generator().manual_seed(seed))]
    return order


@pytest.mark.parametrize("family", PARTS)
def test_permutations_are_found_and_exact(family, second_block):
    block, forward = second_block(family)
    before, state = forward(block), copy.deepcopy(block.state_dict())
    links = find_permutations(block, forward)
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    found = {(link.sources, link.readers): len(link.parts.unique()) for link in links}
    assert found == {tuple(key): parts for key, parts in PARTS[family].items()}
    for link in links:
        order = random_order(link)
        assert not torch.equal(order, torch.arange(len(order)))
        done = permute(block, link, order, forward)
        assert done.is_kept and done.form == "permutation" and done.error < FOLD_TOLERANCE
    assert relative_error(forward(block), before) < FOLD_TOLERANCE


def test_rows_biases_and_columns_move_together(second_block):
    block, forward = second_block("opt")
    old = copy.deepcopy(block)
    link = next(link for link in find_permutations(block, forward) if link.sources == ("fc1",))
    order = random_order(link)
    assert link.channels.tolist() == [list(range(48))] and link.slots.tolist() == list(range(48))
    assert permute(block, link, order, forward).is_kept
    assert torch.equal(block.fc1.weight, old.fc1.weight[order]) and torch.equal(block.fc1.bias, old.fc1.bias[order])
    assert torch.equal(block.fc2.weight, old.fc2.weight[:, order])


def test_grouped_heads_move_all_columns_of_a_channel(second_block):
    block, forward = second_block("llama")
    old = copy.deepcopy(block)
    link = next(link for link in find_permutations(block, forward) if link.readers == ("self_attn.o_proj",))
    assert link.parts.tolist() == [0] * 8 + [1] * 8
    order = torch.arange(16)
    order[[0, 3]] = order[[3, 0]]  # two channels of the first head of values, which two query heads read
    assert permute(block, link, order, forward).is_kept
    columns = torch.arange(32)
    columns[[0, 3, 8, 11]] = columns[[3, 0, 11, 8]]
    assert torch.equal(block.self_attn.o_proj.weight, old.self_attn.o_proj.weight[:, columns])
    assert torch.equal(link.columns(order), columns)


def test_orders_across_heads_or_with_a_slot_twice_are_our_own_mistake(second_block):
    block, forward = second_block("llama")
    link = next(link for link in find_permutations(block, forward) if link.readers == ("self_attn.o_proj",))
    with pytest.raises(AssertionError, match="must stay in their part"):
        permute(block, link, torch.arange(16).flip(0), forward)
    with pytest.raises(AssertionError, match="every slot once"):
        permute(block, link, torch.zeros(16, dtype=torch.long), forward)


class Weighted(nn.Module):
    """fc1 -> ReLU -> fc2 with a factor of its own for every hidden channel in between, which stays where it is."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.factors = nn.Parameter(torch.rand(12) + 0.5)

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)) * self.factors)


def test_what_is_not_the_same_for_all_channels_is_no_link_and_a_permutation_is_undone():
    torch.manual_seed(0)
    block, x = Weighted().requires_grad_(False), torch.randn(2, 5, 8)
    assert find_permutations(block, lambda b: b(x)) == []
    old = copy.deepcopy(block.state_dict())
    link = Permutation(("fc1",), ("fc2",), torch.arange(12)[None], torch.arange(12), torch.zeros(12, dtype=torch.long))
    done = permute(block, link, torch.arange(12).flip(0), lambda b: b(x))
    assert not done.is_kept and done.error > 100 * FOLD_TOLERANCE
    assert all(torch.equal(tensor, old[name]) for name, tensor in block.state_dict().items())


def test_masks_of_compressed_linears_move_along():
    torch.manual_seed(0)
    block, x = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)).requires_grad_(False), torch.randn(1, 9, 4)
    layer = CompressedLinear.of(block[2])
    mask = torch.rand(4, 6) > 0.5
    layer.put(layer.weight * mask, mask)
    block[2] = layer
    (link,) = find_permutations(block, lambda b: b(x))
    order = torch.arange(6).flip(0)
    before = block(x)
    assert permute(block, link, order, lambda b: b(x)).is_kept
    assert torch.equal(layer.mask, mask.flip(1)) and torch.equal(layer.weight != 0, mask.flip(1))
    torch.testing.assert_close(block(x), before)
