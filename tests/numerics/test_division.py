"""Division by numbers is exact on every device; here the device of the tensors is a simulated GPU."""

import pytest
import torch
from simulated_gpu import simulated

from compress.numerics.division import divided

NUMBERS = [3, 6.0, 7.5, 127, 127.5, 448.0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("number", NUMBERS)
def test_quotients_on_a_gpu_are_those_of_the_cpu(number, dtype, monkeypatch):
    values = torch.randn(5000, generator=torch.Generator().manual_seed(0)).to(dtype)
    with simulated(monkeypatch):
        actual = divided(values.to("cuda"), number)
        assert actual.is_cuda
        actual = actual.cpu()
    assert actual.dtype == dtype
    assert torch.equal(actual, values / number) and torch.equal(divided(values, number), values / number)
