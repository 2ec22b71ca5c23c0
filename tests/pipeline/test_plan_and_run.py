"""A plan is green only if the run works: what can be known without weights is the same error in both."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

import compress
from compress import GPTQ, LKD, RTN, Distill, DropBlocks, KVCache, Narrow, SliceGPT
from compress.errors import CompressError, OutputError


@pytest.fixture
def teacher(tiny, tmp_path):
    """teacher(**changes of its config) -> the folder of a tiny model."""

    def save(**changes) -> str:
        tiny("llama", **changes).save_pretrained(tmp_path / "teacher")
        return str(tmp_path / "teacher")

    return save


STATES = {"steps": 1, "top_k": None}
WRONG = {
    "a pattern that matches nothing": ([RTN(targets="*.none")], {}),
    "a group size": ([RTN(group_size=20)], {}),
    "a grid without a layout": ([RTN(weights="nf4", group_size=16)], {}),
    "two quantizing passes of some layers": (
        [RTN(group_size=16, targets="*.mlp.*"), GPTQ(group_size=16, targets="*.up_proj")],
        {},
    ),
    "a device": ([RTN(group_size=16)], {"device": "cuda:9"}),
    "all blocks dropped": ([DropBlocks(count=9)], {}),
    "a share of heads": ([Narrow(heads=0.01)], {}),
    "a share of channels": ([SliceGPT(sparsity=0.001)], {}),
    "nothing to reconstruct": ([RTN(group_size=16, targets="*.mlp.*"), LKD(steps=1, targets="*.q_proj")], {}),
    "a layer map": ([Distill(hidden=1.0, layer_map=((0, 9),), **STATES)], {}),
    "hidden states of another width": ([Narrow(hidden=0.25), Distill(cosine=1.0, **STATES)], {}),
    "mask_probability": ([Distill(mask_probability=0.2, steps=1)], {}),
}


def agree(recipe, out: Path) -> str:
    """Both errors, which must be equal, and nothing written; the message."""
    told = []
    for attempt in (lambda: compress.plan(recipe), lambda: compress.run(recipe, out)):
        with pytest.raises(CompressError) as caught:
            attempt()
        told.append((type(caught.value), str(caught.value)))
    assert told[0] == told[1] and not list(out.glob("*.safetensors"))
    return told[0][1]


@pytest.mark.parametrize("name", WRONG)
def test_plan_and_run_raise_the_same_error(name, recipe, tiny_folder, tmp_path):
    steps, options = WRONG[name]
    agree(recipe(*steps, model=tiny_folder("llama"), **options), tmp_path / "out")


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"vocab_size": 65}, {}, "has a vocabulary of 65 tokens, the model of 64; use a teacher with"),
        ({"hidden_size": 64}, {"cosine": 1.0, **STATES}, "hidden states have 64 channels, the model's 32; leave out"),
        ({"num_hidden_layers": 2}, {"hidden": 1.0, "layer_map": ((2, 2),), **STATES}, "the teacher 0 to 1"),
    ],
)
def test_a_teacher_that_does_not_fit(changes, options, message, teacher, recipe, tiny_folder, tmp_path):
    step = Distill(teacher=teacher(**changes), **options)
    assert message in agree(recipe(step, model=tiny_folder("llama")), tmp_path / "out")


def test_masked_tokens_need_a_tokenizer(recipe, tiny_folder, tmp_path):
    line = agree(recipe(RTN(group_size=16), model=tiny_folder("bert")), tmp_path / "out")
    assert "predicts masked tokens, but it has no tokenizer; save a tokenizer with a mask token" in line


def test_an_encoder_has_no_cache(recipe, tiny_folder, tmp_path):
    asked = recipe(KVCache(), model=tiny_folder("bert"), eval=compress.Evaluate(perplexity=()))
    assert "passes[0] kv_cache: " in agree(asked, tmp_path / "out")


def test_inputs_of_experts_can_be_compared(recipe, tiny_folder):
    fine = GPTQ(group_size=16, error="asymmetric")
    found = compress.plan(recipe(fine, model=tiny_folder("qwen3-moe"), save={"format": "native"}))
    assert any(".experts." in layer.name for layer in found.layers)


# ---- the output folder ----


def test_the_folder_is_checked_before_the_model_is_opened(recipe, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    nowhere = recipe(RTN(), model="/no/such")
    for attempt in (lambda: compress.plan(nowhere, tmp_path), lambda: compress.run(nowhere, tmp_path)):
        with pytest.raises(OutputError, match="is not empty and was not written by compress; choose another folder"):
            attempt()
    with pytest.raises(OutputError, match=r"mine\.txt: is a file; choose another folder"):
        compress.plan(nowhere, tmp_path / "mine.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_plan_writes_nothing_and_accepts_the_folder_of_a_run(recipe, tmp_path):
    out = tmp_path / "new" / "out"
    compress.plan(recipe(RTN()), out)
    assert not list(tmp_path.iterdir())
    compress.run(recipe(RTN()), out)
    assert compress.plan(recipe(RTN()), out).layers


def test_a_disk_that_is_too_small(recipe, tmp_path, monkeypatch):
    needed = compress.plan(recipe(RTN())).checkpoint_bytes
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed - 1))
    for attempt in (lambda: compress.plan(recipe(RTN()), tmp_path), lambda: compress.run(recipe(RTN()), tmp_path)):
        with pytest.raises(
            OutputError, match="takes [0-9.]+ MB, but the disk has [0-9.]+ MB free; choose another folder, or free"
        ):
            attempt()
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=needed))
    compress.run(recipe(RTN()), tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=0))
    assert compress.plan(recipe(RTN()), tmp_path).layers  # its shards are there already
