"""What the tests of kernels share."""

import pytest
import torch


@pytest.fixture(autouse=True)
def compiled_anew():
    """Forget what a test compiled: torch compiles the forward pass of a class at most eight times."""
    yield
    torch.compiler.reset()
