"""Dispatch: the first registered kernel that supports a call computes it; the reference computes the rest."""

import copy
import importlib.util
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from compress import kernels
from compress.kernels import dispatch, reference
from compress.layers.linear import CompressedLinear
from compress.layers.parts.codes import CodesPart
from compress.layers.parts.dense import DensePart
from compress.layers.transforms.rounding import InputRounding
from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS


class Fake:
    """Answers a constant for calls with few rows."""

    def __init__(self, answer, rows):
        self.answer, self.rows = answer, rows

    def supports(self, part, x, rounding):
        return x.shape[0] <= self.rows

    def prepare(self, part):
        return None

    def product(self, x, part, prepared, rounding, bias):
        return torch.full((x.shape[0], part.shape[0]), self.answer)


class Watching:
    """Takes codes, whose weight it multiplies out once, and remembers what it was given."""

    def __init__(self):
        self.prepared, self.calls = [], []

    def supports(self, part, x, rounding):
        return part.kind == "codes"

    def prepare(self, part):
        self.prepared.append(part)
        return part.dense(torch.float32)

    def product(self, x, part, prepared, rounding, bias):
        self.calls.append((x, rounding, bias))
        x = x if rounding is None else rounding(x)
        return nn.functional.linear(x, prepared.to(x.dtype), bias)


@pytest.fixture
def part():
    return CodesPart.of(quantize(torch.arange(12.0).reshape(3, 4), GRIDS["int4"], 4))


@pytest.fixture
def kernel(monkeypatch):
    actual = Watching()
    monkeypatch.setattr(dispatch, "KERNELS", [actual])
    return actual


@pytest.fixture
def layer():
    actual = CompressedLinear.of(nn.Linear(8, 5).requires_grad_(False))
    actual.put(quantize(actual.weight, GRIDS["int8"]))
    return actual


def test_the_first_that_supports_the_call(part, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", [Fake(1.0, 1), Fake(2.0, 2)])
    bias = torch.ones(3)
    for rows, answer in ((1, 1.0), (2, 2.0)):
        assert torch.equal(dispatch.linear(torch.ones(rows, 4), [part], None, bias), torch.full((rows, 3), answer))
    x = torch.ones(3, 4)
    assert torch.equal(dispatch.linear(x, [part], None, bias), reference.linear(x, [part], None, bias))


def test_without_kernels_it_is_the_reference(part, monkeypatch):
    monkeypatch.setattr(dispatch, "KERNELS", [])
    x, rounding = torch.randn(2, 4), InputRounding.of(GRIDS["int8"])
    parts = [part, DensePart.of(torch.randn(3, 4))]
    for requested in ((x, [part], None, None), (x, parts, rounding, torch.ones(3))):
        assert torch.equal(dispatch.linear(*requested), reference.linear(*requested))


def test_a_kernel_is_given_the_rounding_and_the_inputs_as_they_were(kernel, layer):
    rounding, x = InputRounding.of(GRIDS["int8"]), torch.randn(3, 8)
    layer.round_inputs(rounding)
    actual = layer(x)
    [(inputs, by, bias)] = kernel.calls
    assert inputs is x and by is rounding and bias is layer.bias
    assert torch.equal(actual, nn.functional.linear(rounding(x), layer.weight, layer.bias))


def test_a_part_is_prepared_once_and_again_when_it_has_moved(kernel, layer):
    x = torch.randn(3, 8)
    for _ in range(3):
        layer(x)
    assert len(kernel.prepared) == 1
    layer.to(torch.bfloat16)
    for _ in range(2):
        layer(x.bfloat16())
    assert len(kernel.prepared) == 2
    twin = copy.deepcopy(layer)
    twin(x.bfloat16())
    assert len(kernel.prepared) == 3 and kernel.prepared[2] is twin.codes
    layer.put(layer.codes.codes())
    layer(x.bfloat16())
    assert len(kernel.prepared) == 4


def test_another_kernel_prepares_a_part_for_itself(kernel, layer, monkeypatch):
    x, alternative = torch.randn(3, 8), Watching()
    layer(x)
    monkeypatch.setattr(dispatch, "KERNELS", [alternative, kernel])
    layer(x)
    assert (len(kernel.prepared), len(alternative.prepared)) == (1, 1)


@pytest.mark.parametrize("order", [1, -1])
def test_parts_that_no_kernel_takes_are_computed_by_the_reference_on_rounded_inputs(kernel, part, order):
    """The bias is added once, with the first part."""
    x, rounding, bias = torch.randn(3, 4), InputRounding.of(GRIDS["int8"]), torch.randn(3)
    parts = [part, DensePart.of(torch.randn(3, 4)), DensePart.of(torch.randn(3, 4))][::order]
    actual = dispatch.linear(x, parts, rounding, bias)
    torch.testing.assert_close(actual, reference.linear(x, parts, rounding, bias))
    weight = sum(part.dense(torch.float32) for part in parts)
    torch.testing.assert_close(actual, rounding(x) @ weight.T + bias, rtol=1e-5, atol=1e-4)
    assert len(kernel.calls) == 1 and kernel.calls[0][0] is x


FIRST = """
import importlib, os, sys, traceback, jaxtyping, pydantic, torch, torch._dynamo
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            importlib.import_module(name)
        except BaseException:
            print(name, traceback.format_exc(), file=sys.stderr, flush=True)
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
"""


def test_every_module_may_be_imported_first():
    """No two modules wait for each other: each is imported in a process in which none of the package was."""
    actual = [module.name for module in pkgutil.walk_packages(kernels.__path__, f"{kernels.__name__}.")]
    modules = [name for name in actual if not name.endswith("._native")]
    if importlib.util.find_spec("triton") is None:
        modules.remove("compress.kernels.triton.programs")
    assert {"compress.kernels.cpu.packed", "compress.kernels.triton.codes"} <= set(modules)
    path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
    completed = subprocess.run(
        [sys.executable, "-c", FIRST, *modules],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    assert completed.stderr == ""
