"""The uncompressed model runs with the compressed one: a run that was stopped ends with the same bytes."""

import pytest
import torch
from torch import nn

from compress import GPTQ, Wanda, run
from compress.errors import TargetError
from compress.stream.reference import Reference, twin


def test_a_twin_keeps_what_is_replaced_and_shares_the_rest():
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    copy, inputs = twin(block), torch.ones(1, 3)
    before = block(inputs)
    assert copy[1].weight is block[1].weight
    block[0] = nn.Linear(3, 3)
    assert torch.equal(copy(inputs), before)


def test_a_layer_that_sees_some_of_the_tokens_cannot_be_compared():
    block = nn.Sequential(nn.Linear(3, 3))
    reference = Reference(block, [["0"]], [lambda: block(torch.ones(4, 3))], [4])
    with pytest.raises(TargetError, match="expert.0: sees 2 of 4 tokens"):
        reference.paired(0, lambda: reference.rows(0, "expert.0", torch.ones(2, 3)))()


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), pytest.param((Wanda(sparsity=0.3),), marks=pytest.mark.slow)])
def test_a_stopped_run_ends_with_the_same_bytes(recipe, tmp_path, stop, before):
    wanted = recipe(*before, GPTQ(weights="int3", group_size=32, error="asymmetric"))
    whole = run(wanted, tmp_path / "whole").report
    stop(wanted, tmp_path / "stopped")
    assert run(wanted, tmp_path / "stopped").report["checkpoint_sha256"] == whole["checkpoint_sha256"]
    symmetric = run(recipe(*before, GPTQ(weights="int3", group_size=32)), tmp_path / "symmetric").report
    assert symmetric["checkpoint_sha256"] != whole["checkpoint_sha256"]
