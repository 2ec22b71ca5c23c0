"""A plan refuses what the run refuses: passes that may refuse a structure are rehearsed on random weights."""

import pytest
import torch
from model_families import tiny_model

import compress
from compress import RTN, ChannelPermutation, DropBlocks, Magnitude, Narrow, Rotate, SliceGPT, SmoothQuant
from compress.errors import ModelError, TargetError
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


FOLDED = {"score": "magnitude", "escapes": 0, "unlinked": "refuse"}
PRUNED = Magnitude(pattern="2:4")


def ordered(targets, **options):
    """An order of the inputs of some layers, and what it is for."""
    return ChannelPermutation(**FOLDED | options, targets=targets), PRUNED.model_copy(update={"targets": (targets,)})


REFUSED = {
    "a residual": ("llama", [ChannelPermutation(**FOLDED), PRUNED], "q_proj cannot be permuted by folding: its input"),
    "a residual of Conv1D": ("gpt2", [ChannelPermutation(**FOLDED), PRUNED], "c_attn cannot be permuted by folding"),
    "a layer by name": (
        "llama",
        ordered("model.layers.1.self_attn.k_proj", unlinked="skip"),
        "layers.1.self_attn.k_proj cannot be permuted by folding",
    ),
    "codes of the writer": (
        "llama",
        [RTN(group_size=16, targets="*.v_proj"), *ordered("*.o_proj")],
        "o_proj cannot be permuted by folding: self_attn.v_proj, which writes its input, is quantized already",
    ),
    "codes of the same input": (
        "llama",
        [RTN(group_size=16, targets="*.q_proj"), SmoothQuant(ignore="*.q_proj"), RTN(group_size=16, ignore="*.q_proj")],
        r"^passes\[1\] smoothquant: model.layers.0.self_attn.q_proj is quantized and reads the same input",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_plan_refuses_what_the_first_block_of_the_run_refuses(case, tiny_folder, recipe, tmp_path):
    family, steps, message = REFUSED[case]
    asked = recipe(*steps, model=tiny_folder(family), save={"format": "native"}, eval=None)
    with pytest.raises(TargetError, match=message) as planned:
        compress.plan(asked)
    model, _ = compress.load(tiny_folder(family))
    with pytest.raises(TargetError) as applied:
        compress.apply(model, steps, torch.zeros(2, 8, dtype=torch.long))
    assert str(applied.value) == str(planned.value)


@pytest.mark.parametrize(
    ("family", "steps"),
    [
        ("llama", ordered("*.down_proj")),
        ("opt", ordered("*.fc2")),
        ("qwen3-moe", ordered("*.down_proj")),
        ("llama", [RTN(group_size=16, targets="*.v_proj"), *ordered("*.down_proj")]),
        ("llama", [RTN(group_size=16, targets="*.o_proj"), SmoothQuant(ignore="*.o_proj"), RTN(ignore="*.o_proj")]),
    ],
)
def test_orders_and_scales_that_the_run_can_fold_are_planned(family, steps, tiny_folder, recipe):
    notes = compress.plan(recipe(*steps, model=tiny_folder(family), save={"format": "native"}, eval=None)).notes
    assert not any("rehearse" in note for note in notes)
    compress.apply(compress.load(tiny_folder(family))[0], steps, torch.zeros(2, 8, dtype=torch.long))


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
