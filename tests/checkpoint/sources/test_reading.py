"""Weights are asked for early, block by block, and the time of waiting for them is measured."""

import os

import pytest
import torch

import compress
from compress import RTN, Wanda
from compress.checkpoint.opened import Weights
from compress.checkpoint.opening import open_model
from compress.checkpoint.tensors import Reading
from compress.models.structure.blocks import Block


@pytest.fixture
def asked(monkeypatch):
    """The names of blocks in the order in which their pages were asked for, and of those that were brought."""
    found = []
    bring, ask = Weights.bring, Weights.ask
    monkeypatch.setattr(
        Weights, "bring", lambda self, block: [found.append(f"bring {block.index}"), bring(self, block)][1]
    )
    monkeypatch.setattr(Weights, "ask", lambda self, block: [found.append(f"ask {block.index}"), ask(self, block)][1])
    return found


IN_TURN = ["bring 0", "ask 1", "bring 1", "ask 2", "bring 2"]


def test_a_sweep_asks_for_the_next_block_before_it_works_on_one(recipe, asked, tmp_path):
    compress.run(recipe(RTN(), eval=None), tmp_path, progress=False)
    assert [entry for entry in asked if entry != "bring 0"][: len(IN_TURN) - 1] == IN_TURN[1:]


def test_a_survey_and_a_streamed_model_do_the_same(recipe, pico, asked, tmp_path):
    compress.run(recipe(Wanda(allocate="owl", repair=0), eval=None), tmp_path, progress=False)
    swept = [entry for entry in asked if entry != "bring 0"]
    assert swept == 3 * IN_TURN[1:]  # the comparison with transformers, the survey, and the sweep
    opened = open_model(str(pico))
    asked.clear()
    with opened.streaming() as model:
        model(torch.zeros(1, 4, dtype=torch.long))
    assert asked == IN_TURN


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the platform has no way to ask")
def test_all_bytes_of_a_block_are_asked_for(pico, monkeypatch):
    ranges = []
    monkeypatch.setattr(os, "posix_fadvise", lambda file, first, size, advice: ranges.append(size))
    opened = open_model(str(pico))
    block: Block = opened.blocks[1]
    opened.weights.ask(block)
    assert sum(ranges) >= sum(4 * tensor.numel() for tensor in block.module.state_dict().values())


def test_what_was_read_is_counted(pico):
    opened = open_model(str(pico))
    outside = opened.weights.reading.size_bytes
    opened.bring(opened.blocks[0])
    block = sum(tensor.nbytes for tensor in opened.blocks[0].module.state_dict().values())
    assert outside > 0 and opened.weights.reading.size_bytes == outside + block and opened.weights.reading.seconds > 0


def test_every_kind_of_tensor_can_be_waited_for():
    reading = Reading()
    reading.wait_for([torch.tensor(1.0), torch.empty(0, 3), torch.ones(3, 5000, dtype=torch.bfloat16)])
    assert reading.size_bytes == 4 + 30000 and reading.seconds > 0


def test_the_report_states_what_was_read(recipe, pico, tmp_path):
    report = compress.run(recipe(RTN()), tmp_path, progress=False).report
    weights = sum(t.nbytes for b in open_model(str(pico)).blocks for t in _brought(str(pico), b.index))
    assert report["reading"]["size_bytes"] > 2 * weights > 0  # for the passes, and to evaluate the base model
    assert "waiting for" in (tmp_path / "report.md").read_text()


def _brought(source, index):
    opened = open_model(source)
    opened.bring(opened.blocks[index])
    return opened.blocks[index].module.state_dict().values()
