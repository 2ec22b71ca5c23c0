"""What the tests of kernels share."""

import pytest
import torch
from products import SETS

from compress.native.library import library


@pytest.fixture(params=SETS)
def chosen(request):
    """One instruction set after the other."""
    assert library().compress_use(request.param.encode()) == 0
    yield request.param
    library().compress_use(SETS[0].encode())


@pytest.fixture(autouse=True)
def compiled_anew():
    """Forget what a test compiled: torch compiles the forward pass of a class at most eight times."""
    yield
    torch.compiler.reset()
