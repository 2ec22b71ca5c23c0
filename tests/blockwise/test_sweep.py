"""The sweep against a slow and obvious version: one block after the other, plain hooks, everything kept in memory."""

import copy

import pytest
import torch
from batches import batch_of

import compress
from compress.blockwise.capture import ModelShell
from compress.blockwise.context import capture_inputs
from compress.blockwise.storage import round_to_storage
from compress.blockwise.sweep import Sweep
from compress.errors import NumericError
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear, linears, replace_linear
from compress.models.structure.links import find_groups, find_links
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Layer

FAMILIES = ["llama", "gpt2", "opt", "gpt-neox-parallel"]


def wanda(**options):
    return compress.Wanda(**{"sparsity": 0.5, "true_sequential": True, **options})


def gptq(**options):
    return compress.GPTQ(group_size=16, signed_scales=False, **options)


def steps_of(opened, *passes):
    return [(f"passes[{i}]", step, opened.linear_names()) for i, step in enumerate(passes)]


def typed(batches):
    return [batch_of(ids) for ids in batches]


def sweep(opened, batches, *passes, done=lambda *_: None, restore=lambda _: False, **options):
    """Work on the model in place; the last block's output for the probe."""
    return Sweep(opened, steps_of(opened, *passes), typed(batches), batch_of(batches[0][:1]), Run(), **options)(
        done, restore
    )


def weights_of(opened):
    return {name: opened.model.get_submodule(name).weight for name in opened.linear_names()}


def assert_same_weights(found, wanted):
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert torch.equal(found[name], wanted[name]), name


def obvious(opened, batches, step):
    """One layer pass as its paper tells it; replaces weights by dense ones, and returns the outputs of each block.

    Each layer (all of them together without true_sequential) is observed by a forward pass of its own.
    """
    captured = [ModelShell(opened).capture(batch_of(ids)) for ids in batches]
    hidden = [each.hidden for each in captured]
    for block in opened.blocks:
        calls = [each.calls[block.index] for each in captured]
        forward = lambda: [call.run(block.module, x) for call, x in zip(calls, hidden, strict=True)]  # noqa: B023, E731
        groups = find_groups(block.module, lambda module: calls[0].run(module, hidden[0]))  # noqa: B023
        stages = [group.linears for group in groups]
        stages = stages if step.true_sequential else [tuple(name for stage in stages for name in stage)]
        for stage in stages:
            seen = {}
            for name in stage:
                layer = block.module.get_submodule(name)
                seen[name] = step.observer(CompressedLinear.of(layer).shape[1], torch.device("cpu"))
                hook = lambda module, args, s=seen[name]: s.update(args[0].reshape(-1, args[0].shape[-1]))  # noqa: E731
                seen[name].handle = layer.register_forward_pre_hook(hook)
            forward()
            for name in stage:
                seen[name].handle.remove()
                layer = replace_linear(block.module, name)
                facts = Layer(name, None, torch.float32, lambda *_, **__: None)
                solution = step.solve(layer.weight.float(), seen[name], facts)
                weight = solution.weight
                layer.put(weight if isinstance(weight, torch.Tensor) else weight.dense())
        hidden = forward()
    return hidden


@pytest.fixture
def batches(ids):
    return list(ids(6, 12).split(2))


@pytest.mark.few(10)
@pytest.mark.parametrize("true_sequential", [True, False])
@pytest.mark.parametrize("make", [wanda, gptq])
@pytest.mark.parametrize("family", FAMILIES)
def test_it_does_what_the_obvious_version_does(family, make, true_sequential, tiny, in_memory, batches):
    step = make(true_sequential=true_sequential)
    swept, plain = in_memory(tiny(family)), in_memory(tiny(family))
    with torch.no_grad(), plain_torch():
        sweep(swept, batches, step)
        obvious(plain, batches, step)
    assert_same_weights(weights_of(swept), weights_of(plain))


def test_true_sequential_is_another_calibration(tiny, in_memory, batches):
    one, two = in_memory(tiny("llama")), in_memory(tiny("llama"))
    sweep(one, batches, wanda())
    sweep(two, batches, wanda(true_sequential=False))
    one, two = weights_of(one), weights_of(two)
    first, last = "model.layers.0.self_attn.q_proj", "model.layers.0.mlp.down_proj"
    assert torch.equal(one[first], two[first])  # nothing was compressed before it
    assert not torch.equal(one[last], two[last])


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "passes", [[wanda()], [wanda(true_sequential=False)], [wanda(), gptq()], [compress.SmoothQuant()]]
)
@pytest.mark.parametrize("store_bytes", [0, 1 << 30])
def test_what_goes_on_are_the_outputs_of_the_compressed_blocks(
    passes, store_bytes, tiny, in_memory, batches, monkeypatch
):
    opened, after, states = in_memory(tiny("llama")), [], []
    watched = lambda *given: states.append(capture_inputs(*given)) or states[-1]  # noqa: E731
    monkeypatch.setattr("compress.blockwise.sweep.capture_inputs", watched)
    run = Sweep(
        opened, steps_of(opened, *passes), typed(batches), batch_of(batches[0][:1]), Run(), store_bytes=store_bytes
    )
    probe = run(lambda block, _: after.append([x.clone() for x in states[0].hidden]), lambda _: False)
    assert states[0].hidden.in_files == (3 if store_bytes == 0 else 0)
    with torch.no_grad():
        for i, ids in enumerate(batches):
            wanted = opened.model(input_ids=ids, output_hidden_states=True, use_cache=False)
            torch.testing.assert_close(after[0][i], wanted.hidden_states[1], rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(after[1][i], wanted.hidden_states[2], rtol=1e-5, atol=1e-5)
            found = run.shell.logits(batch_of(ids), after[2][i])
            torch.testing.assert_close(found, wanted.logits, rtol=1e-5, atol=1e-5)
        wanted = opened.model(input_ids=batches[0][:1], use_cache=False).logits
        torch.testing.assert_close(run.shell.logits(batch_of(batches[0][:1]), probe), wanted, rtol=1e-5, atol=1e-5)


def test_files_and_memory_give_the_same_weights(tiny, in_memory, batches):
    one, two = in_memory(tiny("llama")), in_memory(tiny("llama"))
    sweep(one, batches, wanda(), gptq(), store_bytes=0)
    sweep(two, batches, wanda(), gptq())
    assert_same_weights(weights_of(one), weights_of(two))


def test_passes_of_one_block_in_one_sweep_are_separate_sweeps(tiny, in_memory, batches):
    """With one block, what a pass sees does not depend on which passes its neighbours had already."""
    together, apart = in_memory(tiny("llama", num_hidden_layers=1)), in_memory(tiny("llama", num_hidden_layers=1))
    passes = [wanda(), compress.SmoothQuant(), gptq()]
    sweep(together, batches, *passes)
    for step in passes:
        sweep(apart, batches, step)
    assert_same_weights(weights_of(together), weights_of(apart))


def test_passes_without_data_in_one_sweep_are_separate_sweeps(tiny, in_memory, batches):
    together, apart = in_memory(tiny("llama")), in_memory(tiny("llama"))
    passes = [compress.RTN(targets="*.mlp.*", group_size=16), compress.RTN(targets="*.self_attn.*", group_size=8)]
    steps = [
        (f"passes[{i}]", s, [n for n in together.linear_names() if s.targets[0].strip("*") in n])
        for i, s in enumerate(passes)
    ]
    Sweep(together, steps, typed(batches), batch_of(batches[0][:1]), Run())(lambda *_: None, lambda _: False)
    for step in steps:
        Sweep(apart, [step], typed(batches), batch_of(batches[0][:1]), Run())(lambda *_: None, lambda _: False)
    assert_same_weights(weights_of(together), weights_of(apart))


def test_a_pass_of_few_blocks_leaves_the_others_alone(tiny, in_memory, batches):
    opened, before = in_memory(tiny("llama")), in_memory(tiny("llama"))
    names = [name for name in opened.linear_names() if ".1." in name]
    steps = [("passes[0]", wanda(), names), ("passes[1]", gptq(), [n for n in names if "mlp" in n])]
    Sweep(opened, steps, typed(batches), batch_of(batches[0][:1]), Run())(lambda *_: None, lambda _: False)
    found, plain = weights_of(opened), weights_of(before)
    for name in plain:
        changed = name in names
        assert torch.equal(found[name], plain[name]) != changed, name


def test_results_tell_error_and_sparsity_of_every_layer(tiny, in_memory, batches):
    opened, results = in_memory(tiny("llama")), []
    before = copy.deepcopy(weights_of(opened))
    sweep(opened, batches, wanda(), done=lambda _, found: results.extend(found))
    assert {r.layer for r in results} == set(opened.linear_names()) and {r.by for r in results} == {"passes[0]"}
    for result in results:
        weight = weights_of(opened)[result.layer]
        assert result.sparsity == pytest.approx(float((weight == 0).float().mean()))
        assert 0 < result.error < 1
    first = next(r for r in results if r.layer == "model.layers.0.self_attn.q_proj")
    seen = []
    block = in_memory(tiny("llama"))
    block.model.get_submodule(first.layer).register_forward_pre_hook(lambda m, args: seen.append(args[0].flatten(0, 1)))
    with torch.no_grad():
        for ids in batches:
            block.model(input_ids=ids)
    rows, new, old = torch.cat(seen), weights_of(opened)[first.layer], before[first.layer]
    assert first.error == pytest.approx(float((rows @ (new - old).T).norm() / (rows @ old.T).norm()), rel=1e-4)


def test_a_restored_block_is_not_worked_on_and_its_outputs_go_on(tiny, in_memory, batches):
    whole = in_memory(tiny("llama"))
    sweep(whole, batches, wanda(), gptq())
    resumed, worked = in_memory(tiny("llama")), []

    def restore(block):
        if block.index > 1:
            return False
        for name in linears(block.module):
            done = whole.blocks[block.index].module.get_submodule(name)
            replace_linear(block.module, name).put(done.codes, done.mask)
        return True

    sweep(resumed, batches, wanda(), gptq(), done=lambda block, _: worked.append(block.index), restore=restore)
    assert worked == [2]
    assert_same_weights(weights_of(resumed), weights_of(whole))


def test_an_output_that_is_not_finite_names_its_block(tiny, in_memory, batches):
    opened = in_memory(tiny("llama"))
    for name in ("up_proj", "down_proj"):
        opened.blocks[1].module.mlp.get_submodule(name).weight.mul_(1e38)
    with pytest.raises(NumericError, match=r"model\.layers\.1: the block's output holds NaN or infinity"):
        sweep(opened, batches, compress.RTN(targets="*", group_size=16))


def test_rounding_to_storage_keeps_the_dtype_that_is_computed_in():
    module, run = torch.nn.Linear(5, 3), Run(storage=torch.bfloat16)
    before = module.weight.detach().clone()
    round_to_storage(module, run)
    assert module.weight.dtype == torch.float32
    assert torch.equal(module.weight, before.bfloat16().float()) and not torch.equal(module.weight, before)
    half = torch.nn.Linear(5, 3).bfloat16()
    before = half.weight.detach().clone()
    round_to_storage(half, Run(storage=torch.float32))
    assert torch.equal(half.weight, before)


def test_which_passes_need_data():
    assert [step.requires.data for step in (compress.RTN(), wanda(), gptq(), compress.SmoothQuant())] == [
        False,
        True,
        True,
        True,
    ]


def test_links_of_one_block_are_handed_to_the_next(tiny, in_memory, batches, monkeypatch):
    opened, given = in_memory(tiny("llama")), []

    def spy(block, forward, similar=()):
        given.append([link.source for link in similar])
        return find_links(block, forward, similar)

    monkeypatch.setattr("compress.blockwise.block_inputs.find_links", spy)
    sweep(opened, batches, compress.SmoothQuant())
    sources = ["input_layernorm", "post_attention_layernorm", "self_attn.v_proj", "mlp.up_proj"]
    assert given == [[], *[sources] * (len(opened.blocks) - 1)]
