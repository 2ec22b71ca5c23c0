"""Embedding and head stay mapped in bfloat16 while a run computes in float32; its checkpoint has the same bytes."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import compress
from compress import GPTQ, RTN, Finetune, Wanda
from compress.checkpoint.opening import open_model
from compress.kernels.dispatch import plain_torch
from compress.layers.embedding import layer_of
from compress.layers.parts.dense import DensePart
from compress.models.structure.ends import find_ends
from compress.numerics import dtypes
from compress.pipeline.sources import maps_ends


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def narrow(request, pico, tmp_path) -> str:
    """The pico model in bfloat16, with and without a tied head."""
    model = AutoModelForCausalLM.from_pretrained(pico, dtype=torch.bfloat16, tie_word_embeddings=request.param)
    model.save_pretrained(tmp_path / "narrow")
    return str(tmp_path / "narrow")


def test_logits_are_those_of_a_copy_in_float32(narrow, ids, monkeypatch):
    monkeypatch.setattr(dtypes, "SLICE", 1000)  # several slices of the head
    wide, mapped = open_model(narrow, "float32"), open_model(narrow, "float32", narrow_ends=True)
    assert not wide.mapped_ends and len(mapped.mapped_ends) == len(find_ends(wide.model))
    for end in find_ends(mapped.model):
        assert layer_of(mapped.model.get_submodule(end.name)).all_parts[0].dtype is torch.bfloat16
    mapped.map_ends()  # again
    found = []
    for opened in (wide, mapped):
        for block in opened.blocks:
            opened.bring(block)
        with torch.no_grad(), plain_torch():
            found.append(opened.model(input_ids=ids()).logits)
    assert found[1].dtype is torch.float32 and torch.allclose(*found, rtol=1e-5, atol=1e-5)


def test_a_product_in_slices_is_that_of_the_whole(monkeypatch):
    draw = torch.Generator().manual_seed(0)
    weight, bias, x = (torch.randn(shape, generator=draw) for shape in ((50, 8), (50,), (2, 3, 8)))
    part, results = DensePart.of(weight.bfloat16()), []
    for size in (1 << 22, 64):
        monkeypatch.setattr(dtypes, "SLICE", size)
        inputs = x.clone().requires_grad_()
        output = part.product(inputs, bias)
        output.square().sum().backward()
        results.append((output.detach(), inputs.grad))
    assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-5) for one, other in zip(*results, strict=True))


def test_the_dtype_of_the_file_needs_no_copy(narrow, pico):
    assert not open_model(narrow, "bfloat16", narrow_ends=True).mapped_ends
    assert not open_model(pico, "float32", narrow_ends=True).mapped_ends  # its file is in float32


@pytest.mark.parametrize(
    "passes",
    [(GPTQ(group_size=32),), (Wanda(), RTN(group_size=32, targets=[r"re:.*"]))],
    ids=["blocks", "the head, too"],
)
def test_the_checkpoint_is_that_of_a_copy_in_float32(passes, narrow, recipe, tmp_path, monkeypatch):
    asked, folders = recipe(*passes, model=narrow, dtype="float32"), []
    for name in ("mapped", "wide"):
        folders.append(tmp_path / name)
        assert maps_ends(asked)
        with monkeypatch.context() as patch:
            if name == "wide":
                patch.setattr("compress.pipeline.sources.maps_ends", lambda recipe: False)
            compress.run(asked, folders[-1])
    mapped, wide = ({f.name: f.read_bytes() for f in folder.glob("*.safetensors")} for folder in folders)
    assert mapped == wide


@pytest.mark.parametrize(
    "change", [{"passes": (RTN(), Finetune())}, {"save": {"dtype": "float16"}}, {"format": "gguf"}]
)
def test_not_where_ends_are_trained_or_rounded(change, recipe):
    save = change.get("save", {"format": change["format"]} if "format" in change else {})
    assert maps_ends(recipe(RTN()))
    assert not maps_ends(recipe(*change.get("passes", (RTN(),)), save=save))


RUN = """
import sys, threading
from pathlib import Path
from compress import Recipe
from compress.passes.contract.journal import Journal
from compress.pipeline.prepare import prepare
from compress.pipeline.run import compress

def anonymous_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))

def run(folder):
    recipe = {
        "model": str(folder), "dtype": "float32", "passes": [{"rtn": {"group_size": 32}}], "eval": None,
        "calibration": {"source": str(folder / "ids.npy"), "sequences": None, "length": None},
    }
    compress(prepare(Recipe.model_validate(recipe), folder / "out", overwrite=False, journal=Journal()))

small, large = map(Path, sys.argv[1:])
run(small)
before, peak, done = anonymous_bytes(), [0], threading.Event()

def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous_bytes())

thread = threading.Thread(target=watch)
thread.start()
run(large)
done.set()
thread.join()
print(peak[0] - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="RssAnon is that of Linux")
def test_a_run_holds_no_copy_of_a_large_embedding(tmp_path):
    shape = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    for name, vocabulary in (("small", 100), ("large", 200_000)):
        config = LlamaConfig(vocab_size=vocabulary, tie_word_embeddings=True, **shape)
        LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / name)
        np.save(tmp_path / name / "ids.npy", torch.randint(vocabulary, (2, 8)).numpy())
    command = [sys.executable, "-c", RUN, str(tmp_path / "small"), str(tmp_path / "large")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert int(done.stdout.splitlines()[-1]) < 2 * 200_000 * 256  # half of a copy in float32
