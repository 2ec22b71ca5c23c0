"""Groups and links are found in forward passes alone, and folds through links are exact, proved, or refused."""

import copy
import weakref

import pytest
import torch
from torch import nn

from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.models.structure.links import FOLD_TOLERANCE, Group, Link, block_signature, find_groups, find_links, fold
from compress.models.structure.probes import Probe, in_float32
from compress.numerics.metrics import relative_error

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
    "phi3": {
        ("self_attn.qkv_proj",): "input_layernorm",
        ("self_attn.o_proj",): None,
        ("mlp.gate_up_proj",): "post_attention_layernorm",
        ("mlp.down_proj",): None,
    },
    "bloom": {
        ("self_attention.query_key_value",): "input_layernorm",
        ("self_attention.dense",): None,
        ("mlp.dense_h_to_4h",): "post_attention_layernorm",
        ("mlp.dense_4h_to_h",): None,
    },
    "falcon": {
        ("self_attention.query_key_value", "mlp.dense_h_to_4h"): "input_layernorm",
        ("self_attention.dense",): None,
        ("mlp.dense_4h_to_h",): None,
    },
    "bert": {
        ("attention.self.query", "attention.self.key", "attention.self.value"): None,
        ("attention.output.dense",): None,
        ("intermediate.dense",): "attention.output.LayerNorm",
        ("output.dense",): None,
    },
}
HEADS, HEAD, WIDE = 4, 8, 32
ONE_TO_ONE = list(range(WIDE))
GROUPED = [8 * (head // 2) + i for head in range(HEADS) for i in range(HEAD)]  # two query heads read one of values
INTERLEAVED = [3 * HEAD * head + 2 * HEAD + i for head in range(HEADS) for i in range(HEAD)]  # q, k, v head by head
HIDDEN = list(range(48))
ATTENTION = ("self_attn.v_proj", ("self_attn.o_proj",))
MLP = ("mlp.up_proj", ("mlp.down_proj",))
LINEAR_LINKS = {
    "llama": {ATTENTION: GROUPED, MLP: HIDDEN},
    "qwen2": {ATTENTION: GROUPED, MLP: HIDDEN},
    "qwen3": {ATTENTION: GROUPED, MLP: HIDDEN},
    "gemma2": {ATTENTION: GROUPED, MLP: HIDDEN},
    # After a GELU nothing is linear.
    "gpt2": {("attn.c_attn", ("attn.c_proj",)): list(range(64, 96))},
    "opt": {("self_attn.v_proj", ("self_attn.out_proj",)): ONE_TO_ONE, ("fc1", ("fc2",)): HIDDEN},
    "opt-post-norm": {("self_attn.v_proj", ("self_attn.out_proj",)): ONE_TO_ONE, ("fc1", ("fc2",)): HIDDEN},
    "gpt-neox": {("attention.query_key_value", ("attention.dense",)): INTERLEAVED},
    "gpt-neox-parallel": {("attention.query_key_value", ("attention.dense",)): INTERLEAVED},
    "phi3": {
        ("self_attn.qkv_proj", ("self_attn.o_proj",)): [48 + c for c in GROUPED],
        ("mlp.gate_up_proj", ("mlp.down_proj",)): [48 + c for c in HIDDEN],
    },
    "bloom": {("self_attention.query_key_value", ("self_attention.dense",)): INTERLEAVED},
    # All heads read the one head of values at the end.
    "falcon": {("self_attention.query_key_value", ("self_attention.dense",)): list(range(40, 48)) * HEADS},
    "bert": {("attention.self.value", ("attention.output.dense",)): ONE_TO_ONE},
}


def norm_links(family):
    """The groups that a norm writes to, but for norms whose output is the residual stream, too."""
    refused = ("opt-post-norm", "bert")
    return {} if family in refused else {members: norm for members, norm in GROUPS[family].items() if norm}


def scale_for(link, seed=1):
    """A random positive scale that columns of one channel share."""
    return link.equalize(torch.rand(len(link.channels), generator=torch.Generator().manual_seed(seed)) * 4 + 0.25)


@pytest.mark.parametrize("family", GROUPS)
def test_groups_and_norms(family, second_block):
    block, forward = second_block(family)
    assert {frozenset(g.linears): g.norm for g in find_groups(block, forward)} == {
        frozenset(members): norm for members, norm in GROUPS[family].items()
    }


def test_groups_come_in_the_order_of_execution(second_block):
    block, forward = second_block("llama")
    assert find_groups(block, forward) == [Group(*item) for item in GATED.items()]


@pytest.mark.parametrize("family", GROUPS)
def test_links(family, second_block):
    block, forward = second_block(family)
    state = copy.deepcopy(block.state_dict())
    links = find_links(block, forward)
    norms = {frozenset(link.readers): link.source for link in links if link.kind == "norm"}
    assert norms == {frozenset(members): norm for members, norm in norm_links(family).items()}
    assert all(link.channels.tolist() == ONE_TO_ONE for link in links if link.kind == "norm")
    found = {(link.source, link.readers): link.channels.tolist() for link in links if link.kind == "linear"}
    assert found == LINEAR_LINKS[family]
    assert all(torch.equal(tensor, state[name]) for name, tensor in block.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_links_of_a_block_that_is_made_alike_are_checked_and_taken(family, second_block):
    block, forward = second_block(family)
    searched = Passes(forward)
    links = find_links(block, searched)
    taken = Passes(forward)
    again = find_links(block, taken, links)
    assert [(a.source, a.readers, a.channels.tolist()) for a in again] == [
        (a.source, a.readers, a.channels.tolist()) for a in links
    ]
    outside = [link for link in links if "experts." not in link.source]
    assert taken.count == 1 + len(outside) < searched.count


def test_links_that_do_not_hold_here_are_searched_again(second_block):
    block, forward = second_block("llama")
    links = find_links(block, forward)
    wrong = Link("mlp.gate_proj", ("mlp.down_proj",), links[-1].channels, "linear")
    assert [link.source for link in find_links(block, forward, [*links, wrong])] == [link.source for link in links]


def test_blocks_are_made_alike_when_their_tensors_are(second_block):
    block, _ = second_block("llama")
    other = copy.deepcopy(block)
    other.mlp.gate_proj.weight.data.zero_()
    assert block_signature(other) == block_signature(block)
    other.mlp.gate_proj.weight = torch.nn.Parameter(torch.zeros(3, 5))
    assert block_signature(other) != block_signature(block)


class Passes:
    """A forward pass that counts how often it was made."""

    def __init__(self, forward):
        self.forward, self.count = forward, 0

    def __call__(self, block):
        self.count += 1
        return self.forward(block)


@pytest.mark.parametrize("family", GROUPS)
def test_folds_keep_the_output_and_move_the_scale(family, second_block):
    block, forward = second_block(family)
    before = forward(block)
    for link in find_links(block, forward):
        old, scale = copy.deepcopy(block), scale_for(link)
        done = fold(block, link, scale, forward)
        expected = "linear" if link.kind == "linear" else "1 + weight" if family == "gemma2" else "weight"
        assert done.is_kept and done.form == expected and done.error < FOLD_TOLERANCE
        for name in link.readers:
            was, now = (CompressedLinear.of(b.get_submodule(name)).weight for b in (old, block))
            torch.testing.assert_close(now, was * scale)
            assert type(block.get_submodule(name)) is type(old.get_submodule(name))
        others = [n for n in old.state_dict() if not n.startswith((*link.readers, link.source))]
        assert all(torch.equal(old.state_dict()[n], block.state_dict()[n]) for n in others)
    assert relative_error(forward(block), before) < FOLD_TOLERANCE


def test_a_fold_divides_rows_and_bias_of_the_channels_that_are_read(second_block):
    block, forward = second_block("gpt2")
    (link,) = (link for link in find_links(block, forward) if link.kind == "linear")
    weight, bias = (t.clone() for t in (block.attn.c_attn.weight, block.attn.c_attn.bias))
    scale = scale_for(link)
    assert fold(block, link, scale, forward).is_kept
    divisor = torch.cat([torch.ones(64), scale])
    torch.testing.assert_close(block.attn.c_attn.weight, weight / divisor)  # transposed: [in, out]
    torch.testing.assert_close(block.attn.c_attn.bias, bias / divisor)


def test_columns_of_one_channel_share_the_largest_scale():
    link = Link("a", ("b",), torch.tensor([2, 0, 2, 5]), "linear")
    assert link.equalize(torch.tensor([1.0, 7.0, 3.0, 2.0])).tolist() == [3.0, 7.0, 3.0, 2.0]
    assert link.per_channel(torch.tensor([3.0, 7.0, 3.0, 2.0]), 6).tolist() == [7, 1, 3, 1, 1, 2]


@pytest.mark.parametrize("scale", [[1.0, 2.0], [-1.0, -1.0], [0.0, 0.0]])
def test_a_scale_that_columns_cannot_share_is_our_own_mistake(scale):
    link = Link("linear", ("linear",), torch.tensor([0, 0]), "linear")
    with pytest.raises(AssertionError, match="scale must be positive|must have one scale"):
        fold(Branched(), link, torch.tensor(scale), lambda b: b(torch.ones(1, 8)))


def test_a_norm_whose_output_is_also_the_residual_cannot_take_a_scale(second_block):
    block, forward = second_block("opt-post-norm")
    old = copy.deepcopy(block.state_dict())
    link = Link("self_attn_layer_norm", ("fc1",), torch.arange(32), "norm")
    done = fold(block, link, torch.full((32,), 2.0), forward)
    assert not done.is_kept and done.form == "none"
    assert done.error > 100 * FOLD_TOLERANCE
    assert all(torch.equal(tensor, old[name]) for name, tensor in block.state_dict().items())


class Branched(nn.Module):
    """A block in which something that is no module reads the normed input, too."""

    def __init__(self, unused: int = 0):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.gate = nn.Parameter(torch.randn(8, 8))
        self.linear = nn.Linear(8, 8)
        self.expert = nn.Linear(unused, 8) if unused else nn.Identity()

    def forward(self, x):
        normed = self.norm(x)
        return x + self.linear(normed) * torch.sigmoid(normed @ self.gate)


class Plain(Branched):
    """The same without the other reader."""

    def forward(self, x):
        return x + self.linear(self.norm(x))


def test_a_norm_with_another_reader_is_no_link_and_a_fold_is_undone():
    torch.manual_seed(0)
    block, x = Branched(), torch.randn(2, 5, 8)
    old = copy.deepcopy(block.state_dict())
    assert find_groups(block, lambda b: b(x)) == [Group(("linear",), "norm")]
    assert find_links(block, lambda b: b(x)) == []
    done = fold(block, Link("norm", ("linear",), torch.arange(8), "norm"), torch.rand(8) + 1.5, lambda b: b(x))
    assert not done.is_kept
    assert all(torch.equal(tensor, old[name]) for name, tensor in block.state_dict().items())


class Separate(nn.Module):
    """Linears that read copies of the input; alive: weak references to the copies."""

    def __init__(self, count):
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(count))
        self.alive = []

    def forward(self, x):
        output = torch.zeros_like(x)
        for linear in self.linears:
            copied = x.clone()
            self.alive.append(weakref.ref(copied))
            output += linear(copied)
            del copied
        assert not any(reference() is not None for reference in self.alive)
        return output


def test_inputs_of_a_block_are_freed_while_its_groups_are_found():
    block = Separate(16)
    with torch.no_grad():
        groups = find_groups(block, lambda b: b(torch.randn(1, 3, 8)))
    assert [group.linears for group in groups] == [(f"linears.{i}",) for i in range(16)] and len(block.alive) == 16


def test_readers_of_one_tensor_share_a_copy_of_it_in_a_probe(second_block):
    block, forward = second_block("llama")
    with in_float32(block) as proof:
        inputs = Probe(proof, forward).base
    queries, keys, output = (inputs[f"self_attn.{name}_proj"] for name in "qko")
    assert queries is keys and queries is not output
    assert inputs["mlp.gate_proj"] is inputs["mlp.up_proj"]


@pytest.mark.parametrize(("unused", "count"), [(0, 1), (8, 0), (6, 1)])
def test_no_link_where_a_linear_that_never_ran_might_read_the_same(unused, count):
    torch.manual_seed(0)
    block, x = Plain(unused), torch.randn(2, 5, 8)
    assert len(find_links(block, lambda b: b(x))) == count


def test_a_linear_that_did_not_run_is_a_group_of_its_own():
    block = Branched(unused=8)
    assert find_groups(block, lambda b: b(torch.randn(1, 3, 8))) == [
        Group(("linear",), "norm"),
        Group(("expert",), None),
    ]


class Gated(nn.Module):
    """act(gate) * up from one projection of both, in one of two layouts; the hidden channels may be turned around."""

    def __init__(self, act, layout, width=8, hidden=12):
        super().__init__()
        self.fused, self.down = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)
        self.act, self.layout = act, layout

    def forward(self, x):
        both = self.fused(x)
        gate, up = both.chunk(2, -1) if self.layout == "halves" else (both[..., ::2], both[..., 1::2])
        return x + self.down((self.act(gate) * up).flip(-1))


@pytest.mark.parametrize("act", [torch.sigmoid, nn.functional.gelu, torch.tanh, nn.functional.silu])
@pytest.mark.parametrize(("layout", "channels"), [("halves", range(23, 11, -1)), ("interleaved", range(23, 0, -2))])
def test_the_linear_half_of_a_fused_projection_wherever_it_is(act, layout, channels):
    torch.manual_seed(0)
    block, x = Gated(act, layout), torch.randn(1, 9, 8)
    (link,) = find_links(block, lambda b: b(x))
    assert (link.source, link.readers, link.channels.tolist()) == ("fused", ("down",), list(channels))
    assert fold(block.requires_grad_(False), link, scale_for(link), lambda b: b(x)).is_kept


class Silent(nn.Module):
    """fc1 -> ReLU -> fc2 with hidden channels that no token of a short text ever makes positive."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 70), nn.Linear(70, 8)
        self.fc1.bias.data[::2] = -1e3

    def forward(self, x):
        return x + self.fc2(torch.relu(self.fc1(x)))


def test_channels_that_are_silent_on_the_probe_are_found_all_the_same():
    torch.manual_seed(0)
    block, x = Silent(), torch.randn(1, 16, 8)
    assert bool((torch.relu(block.fc1(x))[..., ::2] == 0).all())
    (link,) = find_links(block, lambda b: b(x))
    assert link.source == "fc1" and link.channels.tolist() == list(range(70))


def test_hooks_are_gone_even_after_a_failed_forward_pass():
    def fail(module):
        module.linear(torch.randn(1, 8))
        raise ValueError("stop")

    for find in (find_groups, find_links):
        block = Branched()
        with pytest.raises(ValueError, match="stop"):
            find(block, fail)
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in block.modules())


def test_a_fold_reaches_linears_that_are_compressed_and_keeps_their_mask(second_block):
    block, forward = second_block("gpt2")
    masks = {}
    for name in linears(block):
        layer = replace_linear(block, name)
        masks[name] = torch.rand(layer.shape, generator=torch.Generator().manual_seed(0)) > 0.5
        layer.put(layer.weight * masks[name], masks[name])
    before, links = forward(block), find_links(block, forward)
    assert len(links) == 3
    for link in links:
        assert fold(block, link, scale_for(link), forward).is_kept
    assert relative_error(forward(block), before) < FOLD_TOLERANCE
    for name, layer in linears(block).items():
        assert torch.equal(layer.weight != 0, masks[name]) and torch.equal(layer.mask, masks[name])


def test_half_precision_is_searched_and_proved_in_float32(second_block):
    block, forward = second_block("llama")
    rounded = copy.deepcopy(block).to(torch.bfloat16)
    links = find_links(rounded, forward)
    assert [link.source for link in links] == [link.source for link in find_links(block, forward)]
    for link in links:
        # The proof runs on a float32 copy, where the fold is exact; in bfloat16 the two would differ by 1e-2.
        done = fold(rounded, link, scale_for(link), forward)
        assert done.is_kept and done.error < FOLD_TOLERANCE
    assert all(tensor.dtype == torch.bfloat16 for tensor in rounded.state_dict().values())


def test_one_copy_of_the_block_is_made_and_none_in_float32(second_block, monkeypatch):
    block, forward = second_block("llama")
    copied = []
    real = copy.deepcopy
    monkeypatch.setattr("compress.models.structure.probes.copy.deepcopy", lambda m: copied.append(m) or real(m))
    (link, *_) = find_links(block, forward)
    fold(block, link, scale_for(link), forward)
    assert copied == []
    half = real(block).to(torch.bfloat16)
    find_links(half, forward)
    assert copied == [half]


def test_relative_error():
    wanted = torch.tensor([3.0, 4.0])
    assert relative_error(wanted, wanted) == 0
    assert relative_error(wanted + torch.tensor([0.0, 0.5]), wanted) == pytest.approx(0.1)
    assert relative_error(torch.zeros(2), torch.zeros(2)) == 0
    assert relative_error(wanted, torch.zeros(2)) == pytest.approx(5)
