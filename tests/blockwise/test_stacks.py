"""Models with two stacks of blocks: the sweep against the whole model with hooks, and how its inputs are captured."""

import copy

import pytest
import torch
from batches import batch_of
from model_families import PAIRS

import compress
from compress.blockwise import context
from compress.blockwise.capture import ModelShell
from compress.blockwise.sweep import Sweep
from compress.errors import ModelError, TargetError
from compress.kernels.dispatch import plain_torch
from compress.layers.linear import CompressedLinear, replace_linear
from compress.models.forward import logits_of
from compress.models.structure.blocks import find_blocks, stack_of
from compress.passes.contract.context import Run
from compress.passes.contract.layers import Layer

QUICK = ["t5", "bart"]


def halves(ids):
    """Source and target: the rows have an odd length, so that the two differ."""
    half = ids.shape[1] // 2 + 1
    return {"input_ids": ids[:, :half].contiguous(), "labels": ids[:, half:].contiguous()}


@pytest.fixture
def batches(ids):
    return list(ids(6, 13).split(2))


def sweep(opened, batches, step, done=lambda *_: None, restore=lambda _: False, **options):
    steps = [("passes[0]", step, opened.linear_names())]
    typed = [batch_of(ids, opened.model) for ids in batches]
    return Sweep(opened, steps, typed, batch_of(batches[0][:1], opened.model), Run(), **options)(done, restore)


def weights_of(opened):
    return {name: opened.model.get_submodule(name).weight for name in opened.linear_names()}


def inputs_of_linears(model, names, batches):
    """The inputs of linears in forward passes of the whole model, in the order of execution: [(name, tensor)] each."""
    seen = []
    handles = [
        model.get_submodule(name).register_forward_pre_hook(lambda _, args, name=name: seen[-1].append((name, args[0])))
        for name in names
    ]
    for ids in batches:
        seen.append([])
        model(**halves(ids))
    for handle in handles:
        handle.remove()
    return seen


def obvious(model, names, batches, step):
    """GPTQ of linears that read the same tensor at once, each after a forward pass of the whole model with hooks."""
    original, done = copy.deepcopy(model), set()
    while len(done) < len(names):
        now, before = (inputs_of_linears(each, names, batches) for each in (model, original))
        first = next(tensor for name, tensor in now[0] if name not in done)
        stage = [name for name, tensor in now[0] if tensor is first]
        for name in stage:
            seen = step.observer(first.shape[-1], torch.device("cpu"))
            for one, other in zip(now, before, strict=True):
                rows, wanted = (dict(found)[name].flatten(0, 1) for found in (one, other))
                seen.compare(rows, wanted) if step.requires.reference else seen.update(rows)
            layer = replace_linear(model, name)
            facts = Layer(name, None, torch.float32, lambda *_, **__: None)
            layer.put(step.solve(layer.weight.float(), seen, facts).weight.dense())
        done |= set(stage)


@pytest.mark.few(4)
@pytest.mark.parametrize("error", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("family", [*QUICK, *sorted(PAIRS - set(QUICK))])
def test_it_does_what_the_whole_model_with_hooks_does(family, error, tiny, in_memory, batches):
    """Also cross attention: its keys and values read what the compressed encoder gives."""
    swept, plain = in_memory(tiny(family)), tiny(family)
    step = compress.GPTQ(group_size=8, signed_scales=False, error=error)
    with torch.no_grad(), plain_torch():
        sweep(swept, batches, step)
        obvious(plain, swept.linear_names(), batches, step)
    for name, weight in weights_of(swept).items():
        assert torch.equal(weight, plain.get_submodule(name).weight), name


@pytest.mark.parametrize("family", ["t5", "t5-gated", "bart", "pegasus"])
def test_both_stacks_are_found_and_their_inputs_are_those_of_the_model(family, tiny, in_memory, ids):
    """Position biases of T5, which its first blocks make, have the length of the text."""
    opened, text = in_memory(tiny(family)), ids(2, 13)
    assert [block.index for block in opened.blocks] == [0, 1, 2, 3, 4]
    assert [len(stack_of(opened.blocks, i)) for i in range(2)] == [2, 3]
    shell, hidden = ModelShell(opened), None
    assert shell.stacks == 2
    wanted = opened.model(**halves(text), output_hidden_states=True)
    states = [*wanted.encoder_hidden_states, *wanted.decoder_hidden_states]
    for stack in range(2):
        captured = shell.capture(batch_of(text, opened.model), stack, hidden)
        hidden = captured.hidden
        for block in stack_of(opened.blocks, stack):
            assert torch.equal(hidden, states[block.index + stack])
            hidden = captured.calls[block.index].run(block.module, hidden)
    torch.testing.assert_close(shell.logits(batch_of(text, opened.model), hidden), wanted.logits, rtol=1e-5, atol=1e-5)


def test_batches_share_what_does_not_differ(tiny, in_memory, ids):
    opened = in_memory(tiny("t5"))
    shell, texts = ModelShell(opened), [ids(2, length, seed=length + i) for i, length in enumerate((12, 12, 14))]
    one, two, other = (shell.capture(batch_of(text, opened.model)).calls[1] for text in texts)
    assert one.args[1] is two.args[1] and one.args[1].shape != other.args[1].shape  # the position bias


@pytest.mark.parametrize("last", [0, 1, 2, 3])
def test_restored_blocks_of_either_stack_give_the_inputs_of_the_next(last, tiny, in_memory, batches):
    whole, resumed, worked = in_memory(tiny("t5")), in_memory(tiny("t5")), []
    step = compress.GPTQ(group_size=8, error="asymmetric")
    sweep(whole, batches, step)

    def restore(block):
        if block.index > last:
            return False
        for name, module in list(block.module.named_modules()):
            if isinstance(module, (torch.nn.Linear, CompressedLinear)):
                codes = whole.blocks[block.index].module.get_submodule(name).codes
                replace_linear(block.module, name).put(codes)
        return True

    sweep(resumed, batches, step, done=lambda block, _: worked.append(block.index), restore=restore)
    assert worked == list(range(last + 1, 5))
    for name, weight in weights_of(whole).items():
        assert torch.equal(weight, weights_of(resumed)[name]), name


@pytest.mark.parametrize("step", [compress.Wanda(sparsity=0.5, allocate="owl"), compress.SmoothQuant()])
def test_files_and_memory_give_the_same_weights(step, tiny, in_memory, batches, monkeypatch):
    """Also with a survey, which walks over both stacks before. What the encoder gives is stored as other activations."""
    one, two, held = in_memory(tiny("bart")), in_memory(tiny("bart")), []
    with monkeypatch.context() as patch:
        real = context.hold
        patch.setattr(context, "hold", lambda calls, store: held.append(store) or real(calls, store))
        sweep(one, batches, step, store_bytes=0)
    assert held and {(len(store), store.in_files) for store in held} == {(3, 3)}
    sweep(two, batches, step)
    for name, weight in weights_of(one).items():
        assert torch.equal(weight, weights_of(two)[name]), name


def test_what_is_swept_is_what_runs(tiny, in_memory, batches):
    opened = in_memory(tiny("bart"))
    steps = [("passes[0]", compress.GPTQ(group_size=8), opened.linear_names())]
    typed = [batch_of(ids, opened.model) for ids in batches]
    probe = batch_of(batches[0][:1], opened.model)
    run = Sweep(opened, steps, typed, probe, Run())
    hidden = run(lambda *_: None, lambda _: False)
    found, wanted = run.shell.logits(probe, hidden), logits_of(opened.model, probe)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_an_encoder_decoder_must_tell_its_parts_apart(tiny, monkeypatch):
    model = tiny("bart")
    monkeypatch.setattr(type(model), "get_encoder", lambda self: self)
    with pytest.raises(ModelError, match="has no separate modules of an encoder and a decoder"):
        find_blocks(model)


@pytest.mark.parametrize(
    "step",
    [
        compress.DropBlocks(count=1),
        compress.Narrow(ffn=0.5),
        compress.Rotate(),
        compress.SliceGPT(sparsity=0.25),
        compress.KVCache(keys="int8", values="int8"),
    ],
    ids=lambda step: step.key(),
)
def test_passes_for_one_stack_say_so(step, tiny, ids):
    with pytest.raises(TargetError, match=rf"passes\[0\] {step.key()}: it .* with one stack of blocks, but T5For"):
        compress.apply(tiny("t5"), [step], ids())
