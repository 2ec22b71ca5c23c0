"""What the tests of kernels share."""

import pytest
from products import SETS

from compress.kernels.cpu.library import library


@pytest.fixture(params=SETS)
def chosen(request):
    """One instruction set after the other."""
    assert library().compress_use(request.param.encode()) == 0
    yield request.param
    library().compress_use(SETS[0].encode())
