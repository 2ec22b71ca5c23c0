"""Second derivatives of a model by its linears: by hand, against the whole Hessian, and what cannot be."""

import pytest
import torch
from batches import batch_of
from headless import KINDS, headless
from torch import nn

import compress
from compress.errors import NumericError, TargetError
from compress.layers.linear import linears
from compress.models.kinds.contract import run_on
from compress.train.curvature import hessian_traces, label_generator, sampled_nll, weight_curvature


def untold(done):
    return


def draw(seed=0):
    return torch.Generator().manual_seed(seed)


def blocks_of(model):
    return [name for name in linears(model) if "layers" in name]


def test_answers_are_drawn_from_the_models_own_predictions(tiny, ids):
    model, row = tiny("llama"), batch_of(ids(1, 200))
    with torch.no_grad():
        found = [sampled_nll(model, row, draw(seed)) for seed in range(20)]
        logits = run_on(model, row).logits[0].log_softmax(-1)
    entropy = float(-(logits.exp() * logits).sum())
    assert {places for _, places in found} == {200}
    assert sum(float(loss) for loss, _ in found) / 20 == pytest.approx(entropy, rel=0.01)
    assert len({float(loss) for loss, _ in found}) == 20


def test_it_is_the_curvature_of_the_divergence(tiny, ids):
    """KL(p || p') of a small change d of one weight is 1/2 d^2 F, but for the products of different tokens."""
    model = tiny("llama").double()
    name, row = blocks_of(model)[-1], batch_of(ids(1, 1))  # one token has no products with others
    module, squares = model.get_submodule(name), torch.zeros(model.get_submodule(name).weight.shape)
    for seed in range(600):
        found, places = weight_curvature(model, [name], [row], seed, untold)
        squares += found[name] / 600
    assert places == 1
    with torch.no_grad():
        before = run_on(model, row).logits[0].log_softmax(-1)
        for place in (divmod(int(i), squares.shape[1]) for i in squares.flatten().topk(3).indices):
            module.weight[place] += 1e-3
            after = run_on(model, row).logits[0].log_softmax(-1)
            module.weight[place] -= 1e-3
            changed = float((before.exp() * (before - after)).sum())
            assert changed == pytest.approx(0.5 * 1e-6 * float(squares[place]), rel=0.15)


def test_it_adds_up_tokens_and_sequences(tiny, ids):
    model, name = tiny("llama"), "model.layers.1.mlp.down_proj"
    rows = [batch_of(ids(1, 9)), batch_of(ids(1, 5, seed=1))]
    found, places = weight_curvature(model, [name], rows, 3, untold)
    assert places == 14
    by_hand = torch.zeros(model.get_submodule(name).weight.shape)
    for row in rows:
        kept = {}

        def keep(module, given, output, kept=kept):
            kept["x"], kept["y"] = given[0].detach()[0], output.requires_grad_()
            output.retain_grad()

        handle = model.get_submodule(name).register_forward_hook(keep)
        with torch.enable_grad():
            sampled_nll(model, row, label_generator(row, 3))[0].backward()
        handle.remove()
        for x, g in zip(kept["x"], kept["y"].grad[0], strict=True):
            by_hand += torch.outer(g.square(), x.square())
    torch.testing.assert_close(found[name], by_hand, rtol=1e-4, atol=1e-12)


def test_parameters_are_as_before(tiny, ids):
    model = tiny("llama")
    weight_curvature(model, blocks_of(model), [batch_of(ids(1, 8))], 0, untold)
    hessian_traces(model, blocks_of(model), [batch_of(ids(1, 8))], 1, 0, untold)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_the_trace_is_that_of_the_whole_hessian(tiny, ids):
    model, row = tiny("llama").double(), batch_of(ids(1, 6))
    name = next(n for n in blocks_of(model) if n.endswith("k_proj"))
    weight = model.get_submodule(name).weight
    found, places = hessian_traces(model, [name], [row], 300, 0, untold)
    assert places == 6

    def loss(flat):
        changed = {f"{name}.weight": flat.view_as(weight)}
        answer = torch.func.functional_call(model, changed, (), {**row.inputs, "use_cache": False}).logits[0]
        drawn = torch.multinomial(answer.detach().float().softmax(-1), 1, generator=label_generator(row, 0))[:, 0]
        return nn.functional.cross_entropy(answer, drawn, reduction="sum")

    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        whole = torch.autograd.functional.hessian(loss, weight.detach().flatten())
    spread = float((2 * (whole.square().sum() - whole.diagonal().square().sum()) / 300).sqrt())  # Hutchinson's
    assert found[name] == pytest.approx(float(whole.trace()), abs=4 * spread + 1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_models_has_a_curvature(kind, ids):
    model = headless(kind)
    names = [name for name in linears(model) if "layer" in name][:4]
    found, places = weight_curvature(model, names, [batch_of(ids(1, 10))], 0, untold)
    traces, _ = hessian_traces(model, names, [batch_of(ids(1, 10))], 1, 0, untold)
    assert places >= 1 and all(float(found[name].sum()) > 0 for name in names) and any(traces.values())


def test_a_layer_that_no_token_reaches_has_none(tiny, ids):
    model = tiny("llama")
    model.add_module("unused", nn.Linear(4, 3))
    found, _ = weight_curvature(model, ["unused"], [batch_of(ids(1, 4))], 0, untold)
    assert torch.equal(found["unused"], torch.zeros(3, 4))


def test_predictions_that_are_not_finite_are_an_error(tiny, ids):
    model = tiny("llama")
    name = blocks_of(model)[-1]
    with torch.no_grad():
        model.get_submodule(name).weight[:] = torch.nan
    with pytest.raises(NumericError, match="the model's predictions hold NaN or infinity on the calibration text"):
        weight_curvature(model, [name], [batch_of(ids(1, 4))], 0, untold)


def test_a_compressed_layer_has_no_trace(tiny, ids):
    model = compress.apply(tiny("llama"), compress.RTN(group_size=16))
    with pytest.raises(TargetError, match="is compressed already, so it has no weight with a Hessian; write by: kl"):
        hessian_traces(model, blocks_of(model)[:1], [batch_of(ids(1, 4))], 1, 0, untold)
