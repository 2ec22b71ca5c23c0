"""A gated block of random weights and what a sweep would hand to a block pass: for the tests of several passes."""

import torch
from torch import nn

from compress.layers.linear import CompressedLinear
from compress.models.structure.links import find_groups, find_links
from compress.passes.contract.processes import ALONE


class Gated(nn.Module):
    """norm -> two linears of one input -> a third one reads their product, linked to b alone unless `act` is a ReLU."""

    def __init__(self, norm, width, hidden, act=torch.tanh):
        super().__init__()
        self.norm, self.act, self.width = norm, act, width
        self.a, self.b = nn.Linear(width, hidden), nn.Linear(width, hidden, bias=False)
        self.out = nn.Linear(hidden, width)
        for parameter in self.parameters():
            nn.init.normal_(parameter)
        self.requires_grad_(False)

    def forward(self, x):
        h = self.norm(x)
        return x + self.out(self.act(self.a(h)) * self.b(h))


class TwoReaders(Gated):
    """Something that is no linear reads the norm's output, too."""

    def forward(self, x):
        h = self.norm(x)
        return h + self.out(self.act(self.a(h)) * self.b(h))


class Inputs:
    """BlockInputs of a block and its batches, without a sweep; names: of the linears that the pass works on."""

    processes = ALONE

    def __init__(self, block, batches, names):
        self.block, self.batches, self.names = block, batches, names
        self.groups = [group for group in find_groups(block, self.probe) if set(names) & set(group.linears)]
        self.links = [link for link in find_links(block, self.probe) if set(names) & set(link.readers)]

    def observe(self, observer):
        seen, handles = {}, []
        for group in self.groups:
            first = self.block.get_submodule(group.linears[0])
            seen[group] = observer(CompressedLinear.of(first).shape[1], torch.device("cpu"))
            hook = lambda module, args, s=seen[group]: s.update(args[0].reshape(-1, args[0].shape[-1]))  # noqa: E731
            handles.append(first.register_forward_pre_hook(hook))
        for batch in self.batches:
            self.block(batch)
        for handle in handles:
            handle.remove()
        return seen

    def replayed(self, observer):
        return self.observe(observer)

    def probe(self, block):
        rows = torch.randn(2, 9, block.width, generator=torch.Generator().manual_seed(9))
        return block(rows.to(next(block.parameters()).dtype))
