"""The next block is read into page-locked memory in the background: once, one block at a time, and errors are seen."""

import threading

import pytest
import torch

import compress
from compress import RTN
from compress.checkpoint.opening import open_model
from compress.checkpoint.tensors import Prefetch, page_locked


class Pinned:
    """Copies tensors, and remembers how many copies there were and in which thread."""

    def __init__(self, error=None):
        self.count, self.threads, self.error = 0, set(), error

    def __call__(self, tensor):
        if self.error is not None:
            raise self.error
        self.count += 1
        self.threads.add(threading.current_thread().name)
        return tensor.clone()


def opened_with(pin, source):
    """The open model, with weights that are prefetched."""
    opened = open_model(str(source))
    assert opened.weights.checkpoint.tensors.ahead is None
    opened.weights.checkpoint.tensors.ahead = Prefetch(pin)
    return opened


def tensors(block):
    return {name: tensor.clone() for name, tensor in block.module.state_dict().items()}


def test_a_prefetched_block_equals_the_files_and_is_pinned_once(pico):
    plain, opened = open_model(str(pico)), opened_with(pin := Pinned(), pico)
    for block in opened.blocks:
        opened.bring(block)
        plain.bring(plain.blocks[block.index])
        expected = tensors(plain.blocks[block.index])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(block).items())
        opened.weights.release(block)
    assert pin.count == (len(opened.blocks) - 1) * len(expected)  # the first block was not asked for
    assert all(name.startswith("compress-prefetch") for name in pin.threads)


def test_a_block_that_is_brought_twice_is_read_from_its_file_the_second_time(pico):
    opened = opened_with(pin := Pinned(), pico)
    first, second = opened.blocks[:2]
    opened.bring(first)  # asks for the second one
    opened.weights.bring(second)
    before, pinned = tensors(second), pin.count
    opened.weights.bring(second)
    assert pin.count == pinned and all(torch.equal(t, before[name]) for name, t in tensors(second).items())


def test_a_new_request_replaces_one_that_was_not_taken(pico):
    opened = opened_with(pin := Pinned(), pico)
    for block in opened.blocks[:2]:
        opened.weights.ask(block)
    opened.weights.ask(opened.blocks[1])  # the same again: nothing happens
    opened.weights.bring(opened.blocks[1])
    size = len(tensors(opened.blocks[1]))
    assert size <= pin.count <= 2 * size
    opened.weights.bring(opened.blocks[0])
    assert pin.count <= 2 * size


def test_an_error_of_the_thread_is_raised_by_bring_and_only_once(pico):
    opened = opened_with(pin := Pinned(RuntimeError("out of memory")), pico)
    opened.weights.ask(opened.blocks[0])
    with pytest.raises(RuntimeError, match="out of memory"):
        opened.weights.bring(opened.blocks[0])
    pin.error = None
    opened.weights.bring(opened.blocks[0])


def test_the_packed_tensors_of_a_checkpoint_are_prefetched(recipe, tmp_path):
    compress.run(recipe(RTN(), eval=None), tmp_path, progress=False)
    plain, opened = open_model(str(tmp_path)), open_model(str(tmp_path))
    opened.weights.checkpoint.tensors.ahead = Prefetch(pin := Pinned())
    for block in opened.blocks:
        opened.bring(block)
        plain.bring(plain.blocks[block.index])
        expected = tensors(plain.blocks[block.index])
        assert all(torch.equal(tensor, expected[name]) for name, tensor in tensors(block).items())
    assert pin.count


def test_without_pages_to_lock_the_copy_is_an_ordinary_one(monkeypatch):
    def refused(self):
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.Tensor, "pin_memory", refused)
    tensor = torch.arange(5)
    found = page_locked(tensor)
    assert torch.equal(found, tensor) and found.data_ptr() != tensor.data_ptr()
