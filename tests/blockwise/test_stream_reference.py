"""The uncompressed model runs with the compressed one: a run that was stopped ends with the same bytes."""

import copy

import pytest
import torch
from torch import nn

import compress
from compress import GPTQ, Wanda, run
from compress.blockwise.reference import ReferenceBlock, twin
from compress.errors import TargetError
from compress.models.experts import Experts, in_experts, open_experts, roles


def test_a_twin_keeps_what_is_replaced_and_shares_the_rest():
    block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    copy, inputs = twin(block), torch.ones(1, 3)
    before = block(inputs)
    assert copy[1].weight is block[1].weight
    block[0] = nn.Linear(3, 3)
    assert torch.equal(copy(inputs), before)


def test_a_layer_that_sees_some_of_the_tokens_cannot_be_compared():
    block = nn.Sequential(nn.Linear(3, 3))
    reference = ReferenceBlock(block, [["0"]], [lambda: block(torch.ones(4, 3))], [{4}])
    with pytest.raises(TargetError, match="expert.0: sees 2 of 4 tokens"):
        reference.paired(0, lambda: reference.rows(0, "expert.0", torch.ones(2, 3)))()


@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe"])
def test_experts_are_compared_on_the_tokens_that_they_get_now(family, tiny, ids, monkeypatch):
    """Also those that the uncompressed model routes to others; by hand from the inputs of all experts."""
    model, text, seen = tiny(family, num_hidden_layers=1), ids(6, 16), {}
    original, codes = copy.deepcopy(model), GPTQ.codes
    open_experts(original)

    def kept(self, weight, observer, layer):
        seen[layer.name] = (observer.tokens, observer.cross.clone())
        return codes(self, weight, observer, layer)

    monkeypatch.setattr(GPTQ, "codes", kept)
    compress.apply(model, [GPTQ(weights="int2", group_size=16, error="asymmetric", normalize_tokens=False)], text)
    (before, chosen_before), (now, chosen) = (entering(each, text) for each in (original, model))
    assert not torch.equal(chosen_before.sort().values, chosen.sort().values), "some tokens changed their experts"
    checked = 0
    for name, old in in_experts(original).items():
        number, new = int(name.rpartition(".")[2]), model.get_submodule(name)
        tokens = torch.where(chosen == number)[0]
        into, out = f"{name}.{old.into[0]}", f"{name}.{old.out}"
        if not len(tokens):
            continue
        pairs = {into: (before[tokens], now[tokens])}
        pairs[out] = tuple(inner(each, x[tokens]) for each, x in ((old, before), (new, now)))
        for layer, (wanted, found) in pairs.items():
            count, cross = seen[layer]
            assert count == len(tokens)
            expected = 2 / count * (wanted - found).T @ found
            torch.testing.assert_close(cross, expected, rtol=1e-3, atol=1e-4 * float(expected.abs().max()))
            checked += float(expected.abs().max()) > 0
    assert checked > 4


def entering(model, text):
    """(tokens, chosen expert numbers) that enter the experts of the only block."""
    (experts,) = [module for module in model.modules() if isinstance(module, Experts)]
    found = []
    handle = experts.register_forward_pre_hook(
        lambda m, args, kw: found.append((*args, *kw.values())), with_kwargs=True
    )
    with torch.no_grad():
        model(input_ids=text)
    handle.remove()
    x, chosen, _ = roles(found[0])
    return x, chosen


def inner(expert, x):
    """What an expert's last linear reads."""
    found = []
    handle = expert.get_submodule(expert.out).register_forward_pre_hook(lambda m, args: found.append(args[0]))
    with torch.no_grad():
        expert(x)
    handle.remove()
    return found[0]


@pytest.mark.slow
@pytest.mark.parametrize("before", [(), pytest.param((Wanda(sparsity=0.3),), marks=pytest.mark.slow)])
def test_a_stopped_run_ends_with_the_same_bytes(recipe, tmp_path, stop, before):
    wanted = recipe(*before, GPTQ(weights="int3", group_size=32, error="asymmetric"))
    whole = run(wanted, tmp_path / "whole").report
    stop(wanted, tmp_path / "stopped")
    assert run(wanted, tmp_path / "stopped").report["checkpoint_sha256"] == whole["checkpoint_sha256"]
    symmetric = run(recipe(*before, GPTQ(weights="int3", group_size=32)), tmp_path / "symmetric").report
    assert symmetric["checkpoint_sha256"] != whole["checkpoint_sha256"]
