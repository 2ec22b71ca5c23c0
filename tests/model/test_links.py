"""Groups are found in one forward pass, and folds into norms are exact, proved, or refused."""

import copy

import pytest
import torch
from torch import nn

from compress.model.links import FOLD_TOLERANCE, Group, find_groups, fold_into_norm, relative_error
from compress.model.packed import CompressedLinear, replace_linear
from compress.stream.capture import Surroundings

GATED = {
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "input_layernorm",
    ("self_attn.o_proj",): None,
    ("mlp.gate_proj", "mlp.up_proj"): "post_attention_layernorm",
    ("mlp.down_proj",): None,
}
NEOX = {
    ("attention.query_key_value",): "input_layernorm",
    ("attention.dense",): None,
    ("mlp.dense_h_to_4h",): "post_attention_layernorm",
    ("mlp.dense_4h_to_h",): None,
}
OPT = {
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"): "self_attn_layer_norm",
    ("self_attn.out_proj",): None,
    ("fc1",): "final_layer_norm",
    ("fc2",): None,
}
GROUPS = {
    "llama": GATED,
    "qwen2": GATED,
    "qwen3": GATED,
    "gemma2": GATED | {("mlp.gate_proj", "mlp.up_proj"): "pre_feedforward_layernorm"},
    "gpt2": {("attn.c_attn",): "ln_1", ("attn.c_proj",): None, ("mlp.c_fc",): "ln_2", ("mlp.c_proj",): None},
    "opt": OPT,
    # The norms come after: the first group reads the residual stream itself.
    "opt-post-norm": {key: {"fc1": "self_attn_layer_norm"}.get(key[0]) for key in OPT},
    "gpt-neox": NEOX,
    "gpt-neox-parallel": NEOX,
}
FOLDS = [(family, group) for family, groups in GROUPS.items() for group, norm in groups.items() if norm is not None]


@pytest.fixture
def second_block(tiny, in_memory, ids):
    """second_block(family) -> (its second block, a forward pass of it on captured inputs)."""

    def make(family):
        opened = in_memory(tiny(family))
        captured = Surroundings(opened).capture(ids())
        with torch.no_grad():
            hidden = captured.calls[0].run(opened.blocks[0].module, captured.hidden)

        def forward(block):
            with torch.no_grad():
                return captured.calls[1].run(block, hidden)

        return opened.blocks[1].module, forward

    return make


@pytest.mark.parametrize("family", GROUPS)
def test_groups_and_norms(family, second_block):
    block, forward = second_block(family)
    assert find_groups(block, forward) == [Group(*item) for item in GROUPS[family].items()]


@pytest.mark.parametrize(("family", "members"), [fold for fold in FOLDS if fold[0] != "opt-post-norm"])
def test_a_fold_keeps_the_output_and_moves_the_scale(family, members, second_block):
    block, forward = second_block(family)
    group = Group(members, GROUPS[family][members])
    before, old = forward(block), copy.deepcopy(block)
    scale = torch.rand(32, generator=torch.Generator().manual_seed(1)) * 4 + 0.25
    fold = fold_into_norm(block, group, scale, forward)
    assert fold.kept
    assert fold.form == ("1 + weight" if family == "gemma2" else "weight")
    assert relative_error(forward(block), before) < FOLD_TOLERANCE
    for name in members:
        was, now = (CompressedLinear.of(b.get_submodule(name)).weight for b in (old, block))
        torch.testing.assert_close(now, was * scale)
        assert type(block.get_submodule(name)) is type(old.get_submodule(name))
    was, now = old.get_submodule(group.norm).weight, block.get_submodule(group.norm).weight
    torch.testing.assert_close(now, (1 + was) / scale - 1 if family == "gemma2" else was / scale)
    others = [n for n in old.state_dict() if not n.startswith((*members, group.norm))]
    assert others
    assert all(torch.equal(old.state_dict()[n], block.state_dict()[n]) for n in others)


def test_a_norm_whose_output_is_also_the_residual_cannot_take_a_scale(second_block):
    block, forward = second_block("opt-post-norm")
    old = copy.deepcopy(block.state_dict())
    fold = fold_into_norm(block, Group(("fc1",), "self_attn_layer_norm"), torch.full((32,), 2.0), forward)
    assert not fold.kept and fold.form == "none"
    assert fold.error > 100 * FOLD_TOLERANCE
    assert all(torch.equal(tensor, old[name]) for name, tensor in block.state_dict().items())


class Branched(nn.Module):
    """A block with a router that reads the normed input, beside the linear."""

    def __init__(self, unused: bool = False):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)
        self.expert = nn.Linear(8, 8) if unused else nn.Identity()

    def forward(self, x):
        normed = self.norm(x)
        return x + self.linear(normed) * torch.sigmoid(normed @ self.gate)


def test_a_norm_with_another_reader_is_refused_and_left_as_it_was():
    torch.manual_seed(0)
    block, x = Branched(), torch.randn(2, 5, 8)
    old = copy.deepcopy(block.state_dict())
    (group,) = find_groups(block, lambda b: b(x))
    assert group == Group(("linear",), "norm")
    with torch.no_grad():
        fold = fold_into_norm(block, group, torch.rand(8) + 1.5, lambda b: b(x))
    assert not fold.kept
    assert all(torch.equal(tensor, old[name]) for name, tensor in block.state_dict().items())


def test_a_linear_that_did_not_run_is_a_group_of_its_own():
    block = Branched(unused=True)
    assert find_groups(block, lambda b: b(torch.randn(1, 3, 8))) == [
        Group(("linear",), "norm"),
        Group(("expert",), None),
    ]


def test_hooks_are_gone_even_after_a_failed_forward_pass():
    block = Branched()

    def fail(module):
        module.linear(torch.randn(1, 8))
        raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        find_groups(block, fail)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def test_a_fold_reaches_linears_that_are_compressed_and_keeps_their_mask(second_block):
    block, forward = second_block("gpt2")
    layer = replace_linear(block, "attn.c_attn")
    mask = torch.rand(layer.shape) > 0.5
    layer.put(layer.weight * mask, mask)
    before = forward(block)
    assert fold_into_norm(block, Group(("attn.c_attn",), "ln_1"), torch.full((32,), 3.0), forward).kept
    assert relative_error(forward(block), before) < FOLD_TOLERANCE
    assert torch.equal(layer.weight != 0, mask) and torch.equal(layer.mask, mask)


def test_a_fold_in_half_precision_is_proved_in_float32(second_block):
    block, forward = second_block("llama")
    rounded = copy.deepcopy(block).to(torch.bfloat16)
    group = Group(*next(iter(GATED.items())))
    # The proof runs on a float32 copy, where the fold is exact; in bfloat16 the two would differ by 1e-2.
    fold = fold_into_norm(rounded, group, torch.rand(32) + 0.5, forward)
    assert fold.kept and fold.error < FOLD_TOLERANCE
    assert rounded.input_layernorm.weight.dtype == torch.bfloat16


def test_relative_error():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted, wanted) == 0
    assert relative_error(wanted + torch.tensor([0.0, 0.5]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(wanted, torch.zeros(2)) == pytest.approx(5)
