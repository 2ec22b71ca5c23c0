"""CompressedEmbedding: rows of every part, the model's own embedding around them, copies and casts."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from compress.layers.embedding import CompressedEmbedding, layer_of
from compress.layers.linear import CompressedLinear, linears
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.sparse import SparsePart
from compress.layers.scheme import LayerScheme
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.sparse.positions import PackedMask


def coded(weight, grid="int4", group_size=8, symmetric=True):
    return CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric))


@settings(max_examples=40)
@given(
    grid=st.sampled_from(
        ["int2", "int3", "int4", "int5", "int8", "fp8_e4m3", "nf4", "nf4_dq", "mxfp4", "nvfp4", "ternary"]
    ),
    group_size=st.sampled_from([8, 24, "channel", "tensor"]),
    symmetric=st.booleans(),
    width=st.sampled_from([32, 40, 70]),
    picked=st.lists(st.integers(0, 10), min_size=0, max_size=12),
    seed=st.integers(0, 99),
)
def test_rows_are_those_of_the_dense_weight(grid, group_size, symmetric, width, picked, seed):
    if GRIDS[grid].group_size is not None:
        group_size = GRIDS[grid].group_size
    symmetric = symmetric or GRIDS[grid].symmetric_only
    weight = torch.randn(11, width, generator=torch.Generator().manual_seed(seed))
    part = CodesPart.of(quantize(weight, GRIDS[grid], group_size, symmetric))
    ids = torch.tensor(picked, dtype=torch.long)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(part.rows_at(ids, dtype), part.dense(dtype)[ids])


def test_rows_of_kept_weights_alone():
    weight = torch.randn(6, 16)
    mask = torch.rand(6, 16) > 0.5
    part = SparsePart.of(layer_of(nn.Embedding.from_pretrained(weight * mask)).all_parts[0], PackedMask.of(mask))
    assert torch.equal(part.rows_at(torch.tensor([5, 0]), torch.float32), (weight * mask)[[5, 0]])


class Scaled(nn.Embedding):
    """An embedding that multiplies its rows, as some models do."""

    def forward(self, ids):
        return super().forward(ids) * 3


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_the_models_own_embedding_computes_with_the_rows(kind):
    own = kind(10, 16, padding_idx=9)
    table = CompressedLinear(coded(own.weight.detach()), None)
    found, ids = CompressedEmbedding(own, table, tied=False), torch.tensor([[3, 3, 9], [0, 9, 1]])
    dense = kind(10, 16, padding_idx=9)
    dense.weight.data = table.weight
    assert torch.equal(found(ids), dense(ids))
    assert torch.equal(found.weight, table.weight) and own.weight is not None
    assert linears(nn.ModuleDict({"e": found})) == {}  # a table is no linear
    assert layer_of(found).scheme.role == "embedding"


def test_casts_change_the_computation_and_not_the_codes():
    own = nn.Embedding(10, 16)
    found = CompressedEmbedding(own, CompressedLinear(coded(own.weight.detach()), None), tied=False)
    ids, digest = torch.arange(10), found.table.sha256()
    half = copy.deepcopy(found).half()
    assert half(ids).dtype == torch.float16 and half.table.sha256() == digest and found(ids).dtype == torch.float32
    assert torch.equal(half(ids), found.table.weight_as(torch.float16))


def test_the_table_of_a_tied_embedding_is_the_head():
    own = nn.Embedding(10, 16)
    head = CompressedLinear(coded(own.weight.detach()), None)
    pair = nn.ModuleDict({"embedding": CompressedEmbedding(own, head, tied=True), "head": head})
    again = copy.deepcopy(pair)
    assert again["embedding"].table is again["head"] and again["head"] is not head
    assert not any(name.startswith("embedding") for name in pair.state_dict())  # the tensors are stored once
    assert head.scheme.role == "tied" and list(linears(pair)) == ["head"]


def test_the_role_belongs_to_the_description_of_a_layer():
    for role in ("linear", "embedding", "tied"):
        scheme = LayerScheme((4, 8), role=role)
        assert LayerScheme.from_json(scheme.to_json()) == scheme
    assert "role" not in LayerScheme((4, 8)).to_json()
    with pytest.raises(ValueError, match="role 'table' is none of linear, embedding, tied"):
        LayerScheme.from_json({**LayerScheme((4, 8)).to_json(), "role": "table"})
