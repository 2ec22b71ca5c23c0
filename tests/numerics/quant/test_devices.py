"""Scales and codes do not depend on the device: on a simulated GPU, which divides by numbers as CUDA does, all bits."""

import pytest
import torch
from simulated_gpu import simulated

from compress.numerics.quant.codes import quantize
from compress.numerics.quant.grids import GRIDS
from compress.numerics.quant.inputs import round_inputs
from compress.numerics.quant.pairs import fit as fit_pairs

WEIGHT = torch.randn(24, 512, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", GRIDS)
def test_a_gpu_gives_the_codes_of_the_cpu(name, monkeypatch):
    grid = GRIDS[name]
    size = 32 if grid.group_size is None else grid.group_size
    for symmetric in (True,) if grid.symmetric_only else (True, False):
        expected = quantize(WEIGHT, grid, size, symmetric)
        with simulated(monkeypatch):
            actual = quantize(WEIGHT.to("cuda"), grid, size, symmetric)
            pairs = [(actual.codes, expected.codes), (actual.scale, expected.scale), (actual.zero, expected.zero)]
            assert all(
                single is None if alternative is None else torch.equal(single.cpu(), alternative)
                for single, alternative in pairs
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "symmetric"), [("int8", True), ("int8", False), ("int4", True), ("fp8_e4m3", True)])
def test_a_gpu_rounds_inputs_as_the_cpu_does(name, symmetric, dtype, monkeypatch):
    x = WEIGHT.to(dtype)
    expected = round_inputs(x, GRIDS[name], symmetric=symmetric, clip=0.9)
    with simulated(monkeypatch):
        assert torch.equal(round_inputs(x.to("cuda"), GRIDS[name], symmetric=symmetric, clip=0.9).cpu(), expected)


def test_a_gpu_fits_pairs_as_the_cpu_does(monkeypatch):
    expected = fit_pairs(WEIGHT, 32, torch.float32)
    with simulated(monkeypatch):
        assert torch.equal(fit_pairs(WEIGHT.to("cuda"), 32, torch.float32).cpu(), expected)
