"""A real block with its real inputs, as the tests of structure discovery want it."""

import pytest
import torch

from compress.sweep.capture import ModelShell


@pytest.fixture
def second_block(tiny, in_memory, ids):
    """second_block(family) -> (its second block, a forward pass of it on captured inputs, with all routes open)."""

    def make(family):
        opened = in_memory(tiny(family))
        captured = ModelShell(opened).capture(ids())
        with torch.no_grad():
            hidden = captured.calls[0].run(opened.blocks[0].module, captured.hidden)

        def forward(block):
            with torch.no_grad():
                return captured.calls[1].run(block, hidden)

        return opened.blocks[1].module, forward

    return make
