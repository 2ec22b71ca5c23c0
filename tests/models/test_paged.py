"""Weights in files without names: equal tensors, a portion in memory at a time, and equal checkpoints."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

import compress
from compress import GPTQ, RTN, Calibration, Evaluate, SmoothQuant, Wanda
from compress.errors import SaveError, ShortageError
from compress.models import paged as paging
from compress.models.paged import LEAST_BYTES, hold_in_file, paged
from compress.pipeline import plan as planning
from compress.pipeline.fitting import LIBRARIES_BYTES, unlimited

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the maps of the process are those of Linux")


def module_of(**tensors):
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return module


def mapped(tensor) -> bool:
    """Whether a tensor lies in a file that has no name any more."""
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if "(deleted)" in line]
    bounds = [[int(place, 16) for place in line[0].split("-")] for line in maps if "compress-weights-" in line[5]]
    return any(start <= tensor.data_ptr() < end for start, end in bounds)


@pytest.mark.skipif(sys.platform != "linux", reason="the maps of the process are those of Linux")
def test_solved_weights_are_views_of_a_file_without_a_name(tmp_path):
    whole = torch.arange(1 << 19, dtype=torch.float32)
    tensors = {"weight": whole.clone(), "mask": whole > 7, "scale": torch.ones(3, dtype=torch.bfloat16)}
    shared = torch.ones(5)
    modules = [module_of(**tensors, part=whole[:4], common=shared), module_of(weight=-whole, common=shared)]
    hold_in_file(modules, tmp_path / "work")
    for name, tensor in {**tensors, "part": whole[:4], "common": shared}.items():
        found = getattr(modules[0], name)
        assert torch.equal(found, tensor) and found.dtype == tensor.dtype
        assert mapped(found) == (name in tensors)  # views of larger tensors, and common ones, stay
    assert torch.equal(modules[1].weight, -whole) and modules[1].common is shared
    assert list((tmp_path / "work").iterdir()) == []
    modules[1].weight.add_(1)  # what is changed is a copy
    assert torch.equal(modules[1].weight, 1 - whole)


def test_small_weights_stay_in_memory(tmp_path):
    module = module_of(weight=torch.ones(LEAST_BYTES // 4 - 1))
    before = module.weight
    hold_in_file([module], tmp_path)
    assert module.weight is before


def test_weights_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveError, match="weights of a block cannot be written to .*file .*; free disk"):
        hold_in_file([module_of(weight=torch.ones(LEAST_BYTES // 4))], tmp_path / "file")


@LINUX
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.bool])
def test_paged_tensors_are_equal_and_keep_their_order(dtype, tmp_path, monkeypatch):
    monkeypatch.setattr(paging, "LEAST_BYTES", 1)
    values = torch.arange(60).reshape(6, 10).to(dtype)
    tensors = {"rows": values, "columns": values.T, "every other": values[:, ::2], "scalar": values[0, 1].clone()}
    views = dict(paged(tensors.items(), tmp_path))
    assert {name: view.stride() for name, view in views.items()} == {n: t.stride() for n, t in tensors.items()}
    assert all(torch.equal(view, tensors[name]) and view.dtype == dtype for name, view in views.items())
    assert {name for name, view in views.items() if mapped(view)} == {"rows", "columns", "scalar"}
    assert list(tmp_path.iterdir()) == []


def test_a_portion_of_the_tensors_is_in_memory_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(paging, "PORTION_BYTES", 3 * LEAST_BYTES)
    computed = []

    def tensors():
        for number in range(7):
            computed.append(number)
            yield str(number), torch.full((LEAST_BYTES // 4,), float(number))

    portions = []
    for name, view in paged(tensors(), tmp_path):
        assert float(view[0]) == float(name)
        portions.append(len(computed) - int(name))
    assert max(portions) == 3


def test_without_a_folder_tensors_stay(tmp_path):
    tensor = torch.ones(LEAST_BYTES)
    assert dict(paged([("x", tensor)], None))["x"] is tensor


@pytest.fixture
def small_portions(monkeypatch):
    """Portions that are smaller than the blocks of small models."""
    monkeypatch.setattr(paging, "PORTION_BYTES", 1 << 15)
    monkeypatch.setattr(paging, "LEAST_BYTES", 1 << 10)


@pytest.fixture
def ids(tmp_path):
    """ids(batch): a calibration of 4 sequences of 32 tokens."""
    numpy.save(tmp_path / "ids.npy", numpy.random.default_rng(0).integers(32, size=(4, 32)))
    source = str(tmp_path / "ids.npy")
    return lambda batch: Calibration(source=source, sequences=None, length=None, batch=batch)


OPTIONS = {"save": {"verify": "own"}, "eval": None}
CHAINS = {
    "gptq": [GPTQ(group_size=16)],
    "wanda": [Wanda()],
    "wanda 2:4": [Wanda(pattern="2:4", repair=0)],
    "smoothquant": [SmoothQuant(), RTN(group_size=16)],
}


@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
@pytest.mark.parametrize("chain", CHAINS)
def test_weights_in_files_change_no_byte(chain, dtype, small_portions, ids, tiny_folder, recipe, tmp_path, monkeypatch):
    asked = recipe(*CHAINS[chain], model=tiny_folder("qwen3-moe"), calibration=ids(2), dtype=dtype, **OPTIONS)
    digests, files = {}, []
    write = paging.in_file
    monkeypatch.setattr(paging, "in_file", lambda *arguments: files.append(1) or write(*arguments))
    for pages in (False, True):
        if pages:
            in_files = lambda found, limit: unlimited(replace(found, pages_weights=True))  # noqa: E731
            monkeypatch.setattr(planning, "check_available", in_files)
        out = tmp_path / str(pages)
        compress.run(asked, out)
        digests[pages] = (out / "SHA256SUMS").read_text()
        assert bool(files) == pages
    assert digests[True] == digests[False]


@pytest.fixture
def mixture(tmp_path):
    """The folder of a model of one block with 32 experts, in float32."""
    sizes = {"hidden_size": 64, "intermediate_size": 64, "moe_intermediate_size": 64, "vocab_size": 32}
    heads = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    config = Qwen3MoeConfig(**sizes, **heads, num_experts=32, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_limit_moves_the_weights_of_a_block_to_files(small_portions, ids, mixture, recipe, tmp_path):
    asked = recipe(Wanda(repair=0), model=mixture, calibration=ids(1), **OPTIONS)
    block = 4 * 32 * 3 * 64 * 64  # of the experts, in float32; other parts need less
    free = compress.plan(asked)
    assert free.memory_bytes > block and not free.fit.pages_weights
    limit = LIBRARIES_BYTES + free.memory_bytes - block // 2
    limited = compress.plan(asked, memory=limit)
    assert limited.fit.pages_weights and limited.memory_bytes < free.memory_bytes - block // 2
    assert any("weights of a block are stored in files" in note for note in limited.notes)
    with pytest.raises(ShortageError):
        compress.plan(asked, memory=LIBRARIES_BYTES + free.memory_bytes // 100)
    compress.run(asked, tmp_path / "free"), compress.run(asked, tmp_path / "limited", memory=limit)
    digests = [(tmp_path / name / "SHA256SUMS").read_text() for name in ("free", "limited")]
    assert digests[0] == digests[1]


def test_a_packed_block_that_is_larger_than_the_limit_is_evaluated(small_portions, ids, mixture, recipe, tmp_path):
    """Kernels copy the packed weights layer by layer then."""
    scored = Evaluate(perplexity=(str(tmp_path / "ids.npy"),), agreement=(), windows=2, length=32)
    asked = recipe(
        RTN(weights="int8", group_size=32), model=mixture, calibration=ids(1), eval=scored, save={"verify": "own"}
    )
    (evaluation,) = [need for need in compress.plan(asked).fit.needs if need.where == "evaluation"]
    copies = evaluation.parts["weights in the layout of kernels"]
    assert copies > 32 * 3 * 64 * 64
    limit = LIBRARIES_BYTES + evaluation.size_bytes - copies // 2
    limited = compress.plan(asked, memory=limit)
    assert limited.fit.copies_bytes < copies and limited.fit.pages_weights
    free, small = compress.run(asked, tmp_path / "free"), compress.run(asked, tmp_path / "small", memory=limit)
    assert (tmp_path / "free" / "SHA256SUMS").read_text() == (tmp_path / "small" / "SHA256SUMS").read_text()
    scores = [result.report["perplexity"][0]["compressed"]["perplexity"] for result in (free, small)]
    assert scores[0] == scores[1]
