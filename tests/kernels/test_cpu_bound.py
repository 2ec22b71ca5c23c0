"""Prepared calls: they are used again for the same products alone, and compute what an unprepared one does."""

import copy
import threading

import pytest
import torch
from products import INT8, SETS, part_of, random

from compress.kernels import dispatch
from compress.model.linear import CompressedLinear
from compress.weights.transforms.rounding import InputRounding

pytestmark = pytest.mark.skipif(not SETS, reason="the kernels were not built")


@pytest.fixture
def asked(monkeypatch):
    """The calls for which a kernel was looked for."""
    found, kernel_for = [], dispatch.kernel_for

    def counted(part, x, rounding):
        found.append(part)
        return kernel_for(part, x, rounding)

    monkeypatch.setattr(dispatch, "kernel_for", counted)
    return found


def unprepared(part, x, rounding=None, bias=None):
    """The product by a copy of the part, which has prepared nothing."""
    return dispatch.linear(x, [copy.deepcopy(part)], rounding, bias)


@torch.no_grad()
def test_the_kernel_of_a_call_is_looked_for_once(asked):
    part, bias = part_of(40, 64, 4, 32, True), random(40)
    for batch in (1, 3, 20):
        dispatch.linear(random(batch, 64), [part], None, bias)
    assert len(asked) == 1
    assert dispatch.linear(random(2, 3, 64), [part], None, None).shape == (2, 3, 40)
    assert len(asked) == 1


@torch.no_grad()
def test_a_call_of_another_kind_is_prepared_anew(asked):
    part, x, bias = part_of(40, 64, 4, 32, True), random(3, 64), random(40)
    rounding, grouped = InputRounding.of(INT8), InputRounding.of(INT8, group=32)
    for inputs, by in (
        (x, None),
        (x.bfloat16(), None),
        (x, rounding),
        (x, grouped),
        (x, None),
        (x.bfloat16(), grouped),
    ):
        before = len(asked)
        found = dispatch.linear(inputs, [part], by, bias)
        assert len(asked) == before + 1
        assert found.dtype is inputs.dtype and torch.equal(found, unprepared(part, inputs, by, bias))


@torch.no_grad()
def test_what_depends_on_more_than_the_input_is_not_prepared():
    """A static scale and columns of outliers may change between calls."""
    part, x = part_of(40, 64, 8, 32, True), random(3, 64)
    scale, columns = torch.tensor([0.02]), torch.zeros(64, dtype=torch.bool)
    static, spared = InputRounding.of(INT8, scale=scale), InputRounding.of(INT8, columns=columns)
    for rounding, change in ((static, lambda: scale.mul_(3)), (spared, lambda: columns[:9].fill_(True))):
        first = dispatch.linear(x, [part], rounding, None)
        change()
        second = dispatch.linear(x, [part], rounding, None)
        assert not torch.equal(first, second) and torch.equal(second, unprepared(part, x, rounding))


def test_inputs_that_are_not_contiguous_or_need_gradients():
    part, x = part_of(40, 64, 4, 32, True), random(64, 3).T
    with torch.no_grad():
        found = dispatch.linear(x.contiguous(), [part], None, None)
        assert torch.equal(dispatch.linear(x, [part], None, None), found)
    leaf = x.contiguous().requires_grad_()
    dispatch.linear(leaf, [part], None, None).sum().backward()
    torch.testing.assert_close(leaf.grad, part.dense(torch.float32).sum(0).expand(3, -1))
    with torch.no_grad():
        assert torch.equal(dispatch.linear(leaf, [part], None, None), found)


@torch.no_grad()
def test_a_layer_that_changes_gives_its_new_products():
    layer, x = CompressedLinear(part_of(40, 64, 4, 32, True), random(40)), random(2, 64)
    layer(x)
    layer.put(part_of(40, 64, 4, 32, True, seed=9))
    assert torch.equal(layer(x), unprepared(layer.codes, x, bias=layer.bias))
    other = CompressedLinear(part_of(40, 64, 4, 32, True, seed=3), random(40, seed=4))
    layer.load_state_dict(other.state_dict())
    assert torch.equal(layer(x), other(x))
    layer.to(torch.bfloat16)
    assert torch.equal(layer(x.bfloat16()), unprepared(layer.codes, x.bfloat16(), bias=layer.bias))
    layer.round_inputs(InputRounding.of(INT8))
    assert torch.equal(layer(x), unprepared(layer.codes, x, layer.rounding, layer.bias.float()))


@torch.no_grad()
def test_prepared_calls_are_left_out_in_plain_torch_and_without_their_kernel(monkeypatch):
    part, x = part_of(40, 64, 4, 32, True), random(2, 64)
    dispatch.linear(x, [part], None, None)
    with dispatch.plain_torch():
        assert torch.equal(dispatch.linear(x, [part], None, None), part.product(x))
    monkeypatch.setattr(dispatch, "KERNELS", [])
    assert torch.equal(dispatch.linear(x, [part], None, None), part.product(x))


@torch.no_grad()
def test_inputs_of_matmul_precision_are_asked_for_in_every_call():
    part, x, before = part_of(40, 64, 4, 32, True), random(2, 64), torch.get_float32_matmul_precision()
    dispatch.linear(x, [part], None, None)
    torch.set_float32_matmul_precision("medium")
    try:
        assert torch.equal(dispatch.linear(x, [part], None, None), unprepared(part, x))
    finally:
        torch.set_float32_matmul_precision(before)


@torch.no_grad()
def test_several_callers_with_several_threads_each():
    """Small products one after the other, so that helpers join, leave, fall asleep and take work from each other."""
    parts = [part_of(rows, 256, 4, 32, True, seed=rows) for rows in (16, 100, 700, 1600)]
    x, before, wrong = random(1, 256), torch.get_num_threads(), []
    torch.set_num_threads(1)
    expected = [dispatch.linear(x, [part], None, None) for part in parts]

    def call(threads):
        torch.set_num_threads(threads)  # of this caller
        for _ in range(150):
            for part, known in zip(parts, expected, strict=True):
                if not torch.equal(dispatch.linear(x, [part], None, None), known):
                    wrong.append(part.shape)

    callers = [threading.Thread(target=call, args=(threads,)) for threads in (2, 3, 8)]
    try:
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    finally:
        torch.set_num_threads(before)
    assert not wrong
