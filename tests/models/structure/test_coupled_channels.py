"""Bundles: the rows and columns of heads, found without being told, and what is no bundle."""

import pytest
import torch
from batches import batch_of

from compress.blockwise.capture import ModelShell
from compress.models.structure.coupled_channels import (
    CoupledChannels,
    coupled_ffn_channels,
    coupled_heads,
    holds,
    still_hold,
)
from compress.models.structure.probes import Probe

PARTS = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]


@pytest.fixture
def first(in_memory, ids):
    """first(model) -> (its first block, a forward pass of it on fixed inputs)."""

    def find(model):
        captured = ModelShell(in_memory(model)).capture(batch_of(ids(2, 12)))
        return model.model.layers[0], lambda block: captured.calls[0].run(block, captured.hidden)

    return find


def test_heads_in_groups(tiny, first):
    """Four query heads of 8 channels in two groups: their 16 rows, and 8 of keys and of values."""
    block, forward = first(tiny("qwen3"))
    (found,) = coupled_heads(block, forward, ["self_attn.o_proj"], PARTS)
    assert found.reader == "self_attn.o_proj" and found.sources == tuple(PARTS)
    assert [rows.tolist() for rows in found.rows] == [torch.arange(n).reshape(2, -1).tolist() for n in (32, 16, 16)]
    assert found.columns.tolist() == torch.arange(32).reshape(2, -1).tolist()
    assert still_hold(block, forward, [found])


def test_channels_between_matrices(tiny, first):
    block, forward = first(tiny("llama"))
    (found,) = coupled_ffn_channels(block, forward, ["mlp.down_proj"])
    assert set(found.sources) == {"mlp.gate_proj", "mlp.up_proj"} and len(found) == 48
    assert all(torch.equal(rows, found.columns) for rows in found.rows)


def test_wrong_bundles_do_not_hold(tiny, first):
    block, forward = first(tiny("llama"))
    (found,) = coupled_heads(block, forward, ["self_attn.o_proj"], PARTS)
    rows = (found.rows[0].flatten().reshape(-1, 2).T, *found.rows[1:])
    assert not holds(Probe(block, forward), CoupledChannels(found.sources, rows, found.reader, found.columns))
    without_keys = CoupledChannels(found.sources[::2], found.rows[::2], found.reader, found.columns)
    assert not still_hold(block, forward, [without_keys])


def test_fused_projections_are_no_bundles(tiny, first):
    block, forward = first(tiny("phi3"))
    assert coupled_heads(block, forward, ["self_attn.o_proj"], ["self_attn.qkv_proj"]) == []
    assert coupled_ffn_channels(block, forward, ["mlp.down_proj"]) == []
