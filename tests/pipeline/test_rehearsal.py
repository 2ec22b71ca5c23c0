"""A plan refuses what the run refuses: passes that change the shape are rehearsed on random weights."""

import pytest
import torch
from model_families import tiny_model

import compress
from compress import DropBlocks, Narrow, Rotate, SliceGPT
from compress.errors import ModelError
from compress.pipeline import rehearsal


@pytest.mark.parametrize(
    ("family", "step", "message"),
    [
        ("opt", Rotate(), "would mix heads; use residual: false"),
        ("gemma2", SliceGPT(sparsity=0.25, multiple=8), "a norm after attention or feed-forward layer"),
        ("qwen3-moe", Rotate(), "its norm is also read by a router"),
        ("qwen3-next", DropBlocks(count=1, by="spacing"), "cannot run the model without the blocks"),
        ("phi3", Narrow(ffn=0.5, multiple=2), "its input channels cannot be permuted"),
    ],
)
def test_the_plan_refuses_what_the_run_refuses(family, step, message, tiny_folder, recipe, tmp_path):
    asked = recipe(step, model=tiny_folder(family), save={"format": "native"})
    for work in (lambda: compress.plan(asked), lambda: compress.run(asked, tmp_path)):
        with pytest.raises(ModelError, match=rf"^passes\[0\] {step.key()}: .*{message}"):
            work()


def test_a_plan_that_is_green_reads_no_weights_and_leaves_the_random_state(tiny_folder, recipe):
    asked = recipe(Rotate(), model=tiny_folder("llama"), save={"format": "native"})
    torch.manual_seed(5)
    before = torch.get_rng_state()
    assert not any("rehearse" in note for note in compress.plan(asked).notes)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_large_model_is_rehearsed_with_one_block_or_noted(tiny_folder, recipe, monkeypatch):
    asked = recipe(SliceGPT(sparsity=0.25, multiple=8), model=tiny_folder("gemma2"), save={"format": "native"})
    size = sum(p.numel() for p in tiny_model("gemma2").parameters())
    monkeypatch.setattr(rehearsal, "LARGEST", size - 1)
    with pytest.raises(ModelError, match="a norm after attention or feed-forward layer"):
        compress.plan(asked)
    monkeypatch.setattr(rehearsal, "LARGEST", 10)
    note = "passes[0] slicegpt: the model is too large to rehearse the pass; the run may refuse its structure"
    assert note in compress.plan(asked).notes


def test_what_the_data_decide_is_not_rehearsed(tiny_folder, recipe, monkeypatch):
    monkeypatch.setattr(DropBlocks, "apply", lambda *_: pytest.fail("the plan ran drop_blocks"))
    compress.plan(recipe(DropBlocks(count=1), model=tiny_folder("llama"), save={"format": "dense"}))
