"""Capture: blocks get the arguments that the model itself would pass, and replaying them gives the model's own logits."""

import pytest
import torch
from batches import batch_of
from tolerances import near
from torch import nn
from transformers import RwkvConfig, RwkvForCausalLM

from compress.blockwise.capture import ModelShell, check_hidden
from compress.errors import ModelError, NumericError
from compress.models.structure.blocks import hidden_of

FAMILIES = ["llama", "qwen3", "gpt2", "opt", "opt-post-norm", "gpt-neox", "gpt-neox-parallel", "gemma2"]


def plain_calls(model, blocks, ids):
    """(args, kwargs) of every block in an ordinary forward pass, by plain hooks, and the logits."""
    seen, handles = [], []
    for block in blocks:
        hook = lambda module, args, kwargs: seen.append((args, dict(kwargs)))  # noqa: E731
        handles.append(block.module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad():
        logits = model(input_ids=ids, use_cache=False).logits
    for handle in handles:
        handle.remove()
    return seen, logits


def same(found, wanted) -> bool:
    """Equal values, tensors bit for bit."""
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and torch.equal(found, wanted)
    if isinstance(wanted, (tuple, list)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, dict):
        return found.keys() == wanted.keys() and all(same(found[key], wanted[key]) for key in wanted)
    return found is wanted or found == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_the_arguments_are_those_of_a_plain_forward_pass(family, tiny, in_memory, ids):
    opened = in_memory(tiny(family))
    wanted, _ = plain_calls(opened.model, opened.blocks, ids())
    captured = ModelShell(opened).capture(batch_of(ids()))
    assert len(captured.calls) == len(wanted) == 3
    args, kwargs = wanted[0]
    assert torch.equal(captured.hidden, args[0] if args else kwargs["hidden_states"])
    for call, (args, kwargs) in zip(captured.calls.values(), wanted, strict=True):
        if call.keyword is None:
            args = args[1:]
        else:
            kwargs = {key: value for key, value in kwargs.items() if key != call.keyword}
        assert same(call.args, args) and same(call.kwargs, kwargs)


@pytest.mark.parametrize("family", FAMILIES)
def test_replaying_the_blocks_gives_the_models_own_logits(family, tiny, in_memory, ids):
    opened = in_memory(tiny(family))
    shell = ModelShell(opened)
    for seed in (0, 1):  # the second one meets a form that is learned already
        _, wanted = plain_calls(opened.model, opened.blocks, ids(seed=seed))
        captured = shell.capture(batch_of(ids(seed=seed)))
        hidden = captured.hidden
        with torch.no_grad():
            for block, call in zip(opened.blocks, captured.calls.values(), strict=True):
                hidden = call.run(block.module, hidden)
        assert near(shell.logits(batch_of(ids(seed=seed)), hidden), wanted)


def test_the_model_is_left_as_it_was(tiny, in_memory, ids):
    opened = in_memory(tiny("llama"))
    _, before = plain_calls(opened.model, opened.blocks, ids())
    shell = ModelShell(opened)
    shell.logits(batch_of(ids()), shell.capture(batch_of(ids())).hidden)
    assert not any("forward" in vars(block.module) for block in opened.blocks)
    assert torch.equal(plain_calls(opened.model, opened.blocks, ids())[1], before)


def test_the_head_does_not_run_while_capturing(tiny, in_memory, ids):
    opened = in_memory(tiny("llama"))

    def fail(*_):
        raise AssertionError("the head ran")

    opened.model.get_output_embeddings().register_forward_pre_hook(fail)
    assert ModelShell(opened).capture(batch_of(ids())).hidden.shape == (4, 16, 32)


def test_the_forward_passes_are_undone_after_an_error(tiny, in_memory):
    opened = in_memory(tiny("llama"))
    with pytest.raises(IndexError):
        ModelShell(opened).capture(batch_of(torch.tensor([[10_000]])))  # no such token
    assert not any("forward" in vars(block.module) for block in opened.blocks)


def test_blocks_that_do_not_follow_one_another(tiny, in_memory, ids):
    opened = in_memory(tiny("llama"))
    between = opened.blocks[1].module.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
    with pytest.raises(
        ModelError, match=r"model\.layers\.1 does not receive the unchanged output of the block before it"
    ):
        ModelShell(opened).capture(batch_of(ids()))
    between.remove()


def test_a_block_that_is_left_out(tiny, in_memory, ids):
    opened = in_memory(tiny("llama"))
    opened.blocks.append(opened.blocks[-1].__class__(3, "model.layers.3", nn.Identity()))
    with pytest.raises(ModelError, match="3 of 4 blocks ran in a forward pass"):
        ModelShell(opened).capture(batch_of(ids()))


def test_a_block_without_hidden_states(tiny, in_memory, ids):
    opened = in_memory(tiny("llama"))
    shell = ModelShell(opened)
    shell.capture(batch_of(ids()))  # how outputs hold hidden states is known
    opened.blocks[0].module.register_forward_pre_hook(
        lambda module, args, kwargs: ((), {"x": args[0]}), with_kwargs=True
    )
    with pytest.raises(ModelError, match=r"model\.layers\.0 is called without hidden states as its first argument"):
        shell.capture(batch_of(ids()))


def test_a_model_that_writes_weights_of_its_blocks_is_refused(in_memory):
    config = RwkvConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, context_length=64, rescale_every=6)
    with pytest.raises(ModelError, match=r"RwkvForCausalLM changes rwkv\.blocks\.0\.attention\.output\.weight in"):
        ModelShell(in_memory(RwkvForCausalLM(config).eval())).check()
    config.rescale_every = 0  # then its forward pass writes none
    ModelShell(in_memory(RwkvForCausalLM(config).eval())).check()


def test_hidden_states_may_be_alone_or_the_first_of_several():
    x = torch.ones(2)
    assert hidden_of(x) is x and hidden_of((x, None)) is x and hidden_of([x]) is x


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_name_their_block(bad, tiny, in_memory):
    block = in_memory(tiny("llama")).blocks[1]
    check_hidden(torch.ones(2, 3), block)
    with pytest.raises(NumericError, match=r"model\.layers\.1: the block's output holds NaN or infinity"):
        check_hidden(torch.tensor([1.0, bad]), block)
